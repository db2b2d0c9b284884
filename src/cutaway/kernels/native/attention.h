// softmax(scale · q kᵀ + mask) v over blocks of keys, with a running maximum and sum.
//
// (Milakov & Gimelshein 2018; Dao et al. 2022.) Blocks begin at the first slot, and within one every sum has its
// order, so that a query's result depends on its own keys alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "curves.h"
#include "dots.h"

namespace cutaway {

constexpr int SIDE = 16;  // queries whose products become weights side by side
constexpr int RUN = 64;   // that pass by a block of keys while it is near

struct Keys {
    const float* k;                    // [batch, kv_head, slot, d_head], by strides
    const float* v;
    int64_t k_row, k_head, k_slot;     // how far apart rows, heads and slots are
    int64_t v_row, v_head, v_slot;
    int64_t count;                     // slots that are read (filled in for each pass)
    const int64_t* positions;          // of the keys, −1 for none: [batch, count], rows so far apart:
    int64_t apart;
};

struct Reading {
    int64_t causal, window;  // 0 for no window
    float scale, cap;        // 0 for no cap
};

// The positions in each block: the smallest and the largest; −1 as the smallest where a slot is empty.
struct Blocks {
    std::vector<int64_t> least, most;
    void find(const int64_t* positions, int64_t count) {
        const int64_t n = (count + KEYS - 1) / KEYS;
        least.resize(static_cast<size_t>(n));
        most.resize(static_cast<size_t>(n));
        for (int64_t b = 0; b < n; b++) {
            int64_t low = std::numeric_limits<int64_t>::max(), high = -1;
            for (int64_t i = b * KEYS; i < std::min<int64_t>((b + 1) * KEYS, count); i++) {
                low = std::min(low, positions[i]);
                high = std::max(high, positions[i]);
            }
            least[static_cast<size_t>(b)] = low;
            most[static_cast<size_t>(b)] = high;
        }
    }
};

inline bool may_read(const Reading& r, int64_t query, int64_t key) {
    if (key < 0 || query < 0) return false;
    if (r.causal && key > query) return false;
    if (r.window && (key <= query - r.window || (!r.causal && key >= query + r.window))) return false;
    return true;
}

enum class Seen { NONE, SOME, ALL };

inline Seen seen(const Reading& r, int64_t query, int64_t least, int64_t most) {
    if (query < 0 || most < 0) return Seen::NONE;
    if (r.causal && least > query) return Seen::NONE;
    if (r.window && most <= query - r.window) return Seen::NONE;
    if (may_read(r, query, least) && may_read(r, query, most)) return Seen::ALL;
    return Seen::SOME;
}

// z ← kept · z + Σ weight · value over a block's values, for N queries, from number d on; how far whole registers go.
template <int N, int SOME>
inline int64_t gather_by(float* const* z, const float* const* weights, const float* values, int64_t stride, int64_t count,
                         const float* kept, int64_t width, int64_t d) {
    for (; d + SOME * LANES <= width; d += SOME * LANES) {
        Vec sums[N][SOME];
        for (int i = 0; i < N; i++)
            for (int c = 0; c < SOME; c++) sums[i][c] = mul(load(z[i] + d + c * LANES), all(kept[i]));
        for (int64_t j = 0; j < count; j++) {
            Vec value[SOME];
            for (int c = 0; c < SOME; c++) value[c] = load(values + j * stride + d + c * LANES);
            for (int i = 0; i < N; i++) {
                const Vec p = all(weights[i][j]);
                for (int c = 0; c < SOME; c++) sums[i][c] = fma(p, value[c], sums[i][c]);
            }
        }
        for (int i = 0; i < N; i++)
            for (int c = 0; c < SOME; c++) store(z[i] + d + c * LANES, sums[i][c]);
    }
    return d;
}

template <int N>
inline void gather(float* const* z, const float* const* weights, const float* values, int64_t stride, int64_t count,
                   const float* kept, int64_t width) {
    constexpr int MOST = N == 1 ? 64 / LANES : LANES == 16 ? 4 : 2;  // as many sums as there is room for
    int64_t d = gather_by<N, MOST>(z, weights, values, stride, count, kept, width, 0);
    d = gather_by<N, 2>(z, weights, values, stride, count, kept, width, d);
    d = gather_by<N, 1>(z, weights, values, stride, count, kept, width, d);
    for (int i = 0; i < N; i++)
        for (int64_t e = d; e < width; e++) {
            float sum = z[i][e] * kept[i];
            for (int64_t j = 0; j < count; j++) sum += weights[i][j] * values[j * stride + e];
            z[i][e] = sum;
        }
}

// What becomes of a block for the queries that read of it: those up to `live`.
struct Taken {
    int who[SIDE], live = 0;
    alignas(64) float kept[SIDE];  // what earlier blocks' sums are multiplied by
    float added[SIDE];             // the block's weights
    int64_t last[SIDE];            // keys up to the last that is read
    bool holes[SIDE];              // some before it are not
};

// Dot products with a block's keys, of which some are there, become weights.
inline void weigh(const Query* queries, int n, const Seen* what, float* s, const int64_t* positions, int64_t some,
                  const Reading& reading, float* best, bool* reads, Taken& taken) {
    const float none = -std::numeric_limits<float>::infinity();
    Vec added[SIDE];
    const bool few = n <= QUERIES;  // for whom waiting for all would take longer
    for (int i = 0; i < n; i++) {
        if (what[i] == Seen::NONE) continue;
        float* mine = s + i * KEYS;
        Vec x[KEYS / LANES];
        for (int j = 0; j < KEYS / LANES; j++) {
            x[j] = mul(load(mine + j * LANES), all(reading.scale));
            if (reading.cap != 0) x[j] = mul(hyperbolic_tangent(divide(x[j], all(reading.cap))), all(reading.cap));
        }
        const bool every = what[i] == Seen::ALL && some == KEYS;
        int64_t last = some, read = some;
        if (!every) {
            for (int j = 0; j < KEYS / LANES; j++) store(mine + j * LANES, x[j]);
            for (int64_t j = some; j < KEYS; j++) mine[j] = none;
            if (what[i] == Seen::SOME) {
                last = read = 0;
                for (int64_t j = 0; j < some; j++) {
                    if (may_read(reading, queries[i].position, positions[j])) last = j + 1, read++;
                    else mine[j] = none;
                }
            }
            for (int j = 0; j < KEYS / LANES; j++) x[j] = load(mine + j * LANES);
        }
        Vec high = x[0];
        for (int j = 1; j < KEYS / LANES; j++) high = larger(high, x[j]);
        float top = std::max(best[i], highest(high));
        if (read == 0) continue;
        reads[i] = true;
        if (top == none) {  // all are −∞, or no numbers: those are to be seen in the sum
            bool wrong = false;
            for (int j = 0; j < KEYS / LANES; j++) wrong |= no_number(x[j]);
            if (!wrong) continue;
            top = 0;
        }
        const float less = best[i] - top;
        taken.kept[taken.live] = !few ? less : less == none ? 0.0f : first(exponential(all(less)));
        best[i] = top;
        added[taken.live] = zero();
        for (int j = 0; j < KEYS / LANES; j++) {
            Vec p = exponential(sub(x[j], all(top)));
            p = zero_where_equal(x[j], all(none), p);  // what may not be read weighs exactly nothing
            store(mine + j * LANES, p);
            added[taken.live] = add(added[taken.live], p);
        }
        taken.last[taken.live] = last;
        taken.holes[taken.live] = read < last;
        taken.who[taken.live++] = i;
    }
    for (int i = taken.live; i < SIDE; i++) taken.kept[i] = none;
    for (int i = taken.live; i % 4; i++) added[i] = zero();
    for (int i = 0; i < taken.live; i += 4)
        _mm_store_ps(taken.added + i, totals(added[i], added[i + 1], added[i + 2], added[i + 3]));
    for (int i = 0; !few && i < taken.live; i += LANES) {
        const Vec x = load(taken.kept + i);
        store(taken.kept + i, zero_where_equal(x, all(none), exponential(x)));
    }
}

// z ← kept · z + Σ weight · value for N of those queries.
template <int N>
inline void gather_for(const Taken& taken, int from, const Query* queries, const float* s, const float* values,
                       int64_t stride, int64_t some, int64_t width) {
    // What may not be read is left out, not multiplied by nothing: who knows what lies there. So all go as far as the
    // first key that one of them leaves out, and each goes on alone.
    int64_t common = some;
    float* z[N];
    const float* weights[N];
    for (int i = 0; i < N; i++) {
        common = taken.holes[from + i] ? 0 : std::min(common, taken.last[from + i]);
        z[i] = queries[taken.who[from + i]].z;
        weights[i] = s + taken.who[from + i] * KEYS;
    }
    gather<N>(z, weights, values, stride, common, taken.kept + from, width);
    const float kept = 1.0f;
    for (int i = 0; i < N; i++)
        for (int64_t j = common, next; j < taken.last[from + i]; j = next + 1) {
            for (next = j; next < taken.last[from + i] && weights[i][next] != 0; next++) {}
            const float* rest = weights[i] + j;
            if (next > j) gather<1>(z + i, &rest, values + j * stride, stride, next - j, &kept, width);
        }
}

// Call `f` with a number from 1 to 4 as a type.
template <class Call>
inline void with_count(int n, Call&& f) {
    switch (n) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
        default: return f(std::integral_constant<int, 4>{});
    }
}

// Queries of one row that read the same key/value head, no more than RUN.
inline void attend(const Query* queries, int n, const Keys& keys, const Blocks& blocks, const Reading& reading,
                   int64_t row, int64_t head, int64_t width) {
    static thread_local std::vector<float> room;
    const int64_t* positions = keys.positions + row * keys.apart;
    float best[RUN], sum[RUN] = {0};
    bool reads[RUN] = {false};
    for (int i = 0; i < n; i++) {
        best[i] = -std::numeric_limits<float>::infinity();
        std::memset(queries[i].z, 0, static_cast<size_t>(width) * sizeof(float));
    }
    alignas(64) float s[SIDE * KEYS];
    for (int64_t from = 0; from < keys.count; from += KEYS) {
        const int64_t some = std::min<int64_t>(KEYS, keys.count - from);
        const auto b = static_cast<size_t>(from / KEYS);
        Seen what[RUN];
        int any = 0;
        for (int i = 0; i < n; i++) {
            what[i] = seen(reading, queries[i].position, blocks.least[b], blocks.most[b]);
            any += what[i] != Seen::NONE;
        }
        if (any == 0) continue;
        const float* key = keys.k + row * keys.k_row + head * keys.k_head + from * keys.k_slot;
        const float* value = keys.v + row * keys.v_row + head * keys.v_head + from * keys.v_slot;
        float* across = nullptr;
        if (any > 2 * QUERIES) {
            room.resize(static_cast<size_t>(width * KEYS + 16));
            across = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64 / sizeof(float);
            lay_across(key, keys.k_slot, some, width, across);
        }
        for (int side = 0; side < n; side += SIDE) {
            const int beside = std::min(SIDE, n - side);
            const Query* these = queries + side;
            for (int q = 0; q < beside; q += QUERIES)
                with_count(std::min(QUERIES, beside - q), [&](auto count) {
                    dots_with<count()>(these + q, across, key, keys.k_slot, some, width, s + q * KEYS);
                });
            Taken taken;
            weigh(these, beside, what + side, s, positions + from, some, reading, best + side, reads + side, taken);
            for (int q = 0; q < taken.live; q += QUERIES)
                with_count(std::min(QUERIES, taken.live - q), [&](auto count) {
                    gather_for<count()>(taken, q, these, s, value, keys.v_slot, some, width);
                });
            for (int i = 0; i < taken.live; i++) {
                float& mine = sum[side + taken.who[i]];
                mine = mine * taken.kept[i] + taken.added[i];
            }
        }
    }
    for (int i = 0; i < n; i++) {
        if (!reads[i]) continue;  // where all that is read weighs nothing, the quotient is no number
        for (int64_t d = 0; d < width; d++) queries[i].z[d] /= sum[i];
    }
}

}  // namespace cutaway
