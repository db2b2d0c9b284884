// softmax(scale · q kᵀ + mask) v over blocks of keys, with a running maximum and sum.
//
// (Milakov & Gimelshein 2018; Dao et al. 2022.) Blocks begin at the first slot, and within one every sum has its
// order, so that a query's result depends on its own keys alone.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "curves.h"

namespace cutaway {

constexpr int KEYS = 32;     // of a block
constexpr int QUERIES = 4;   // that read a block together
constexpr int WIDE = 64 / LANES;  // registers of a value that are summed side by side

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

// One query: where its numbers are, and who it is.
struct Query {
    const float* q;
    float* z;
    int64_t position;
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

// Dot products of up to four queries with one key.
template <int N>
inline void dots(const Query* queries, const float* key, int64_t width, float* out, int64_t stride) {
    Vec acc[N];
    for (int i = 0; i < N; i++) acc[i] = zero();
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        const Vec k = load(key + d);
        for (int i = 0; i < N; i++) acc[i] = fma(load(queries[i].q + d), k, acc[i]);
    }
    for (int i = 0; i < N; i++) {
        float sum = total(acc[i]);
        for (int64_t e = d; e < width; e++) sum += queries[i].q[e] * key[e];
        out[i * stride] = sum;
    }
}

// The same with four keys that follow one another: each number that was loaded is used N or four times.
template <int N>
inline void dots_by_four(const Query* queries, const float* key, int64_t apart, int64_t width, float* out, int64_t stride) {
    Vec acc[N][4];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < 4; j++) acc[i][j] = zero();
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Vec k[4];
        for (int j = 0; j < 4; j++) k[j] = load(key + j * apart + d);
        for (int i = 0; i < N; i++) {
            const Vec q = load(queries[i].q + d);
            for (int j = 0; j < 4; j++) acc[i][j] = fma(q, k[j], acc[i][j]);
        }
    }
    for (int i = 0; i < N; i++) {
        _mm_storeu_ps(out + i * stride, totals(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
        for (int j = 0; j < 4; j++)
            for (int64_t e = d; e < width; e++) out[i * stride + j] += queries[i].q[e] * key[j * apart + e];
    }
}

// Of a block's keys, for N queries. The results' rows are KEYS apart.
template <int N>
inline void dots_of(const Query* queries, const float* key, int64_t apart, int64_t count, int64_t width, float* out) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) dots_by_four<N>(queries, key + j * apart, apart, width, out + j, KEYS);
    for (; j < count; j++) dots<N>(queries, key + j * apart, width, out + j, KEYS);
}

// z ← kept · z + Σ weight · value, over the values of a block.
template <bool SKIP>
inline void gather(const float* weights, const float* values, int64_t stride, int64_t count, float kept, float* z, int64_t width) {
    int64_t d = 0;
    for (; d + WIDE * LANES <= width; d += WIDE * LANES) {
        Vec sums[WIDE];
        for (int c = 0; c < WIDE; c++) sums[c] = mul(load(z + d + c * LANES), all(kept));
        for (int64_t j = 0; j < count; j++) {
            if (SKIP && weights[j] == 0) continue;
            const Vec p = all(weights[j]);
            for (int c = 0; c < WIDE; c++) sums[c] = fma(p, load(values + j * stride + d + c * LANES), sums[c]);
        }
        for (int c = 0; c < WIDE; c++) store(z + d + c * LANES, sums[c]);
    }
    for (; d + LANES <= width; d += LANES) {
        Vec sum = mul(load(z + d), all(kept));
        for (int64_t j = 0; j < count; j++)
            if (!SKIP || weights[j] != 0) sum = fma(all(weights[j]), load(values + j * stride + d), sum);
        store(z + d, sum);
    }
    for (; d < width; d++) {
        float sum = z[d] * kept;
        for (int64_t j = 0; j < count; j++)
            if (!SKIP || weights[j] != 0) sum += weights[j] * values[j * stride + d];
        z[d] = sum;
    }
}

// The same for four queries that read every key of the block: each value that was loaded is used four times.
inline void gather_for_four(const Query* queries, const float* weights, const float* values, int64_t stride, int64_t count,
                            const float* kept, int64_t width) {
    constexpr int SOME = LANES == 16 ? 4 : 2;  // registers of a value: with four queries, as many sums as there is room for
    int64_t d = 0;
    for (; d + SOME * LANES <= width; d += SOME * LANES) {
        Vec sums[4][SOME];
        for (int i = 0; i < 4; i++)
            for (int c = 0; c < SOME; c++) sums[i][c] = mul(load(queries[i].z + d + c * LANES), all(kept[i]));
        for (int64_t j = 0; j < count; j++) {
            Vec value[SOME];
            for (int c = 0; c < SOME; c++) value[c] = load(values + j * stride + d + c * LANES);
            for (int i = 0; i < 4; i++) {
                const Vec p = all(weights[i * KEYS + j]);
                for (int c = 0; c < SOME; c++) sums[i][c] = fma(p, value[c], sums[i][c]);
            }
        }
        for (int i = 0; i < 4; i++)
            for (int c = 0; c < SOME; c++) store(queries[i].z + d + c * LANES, sums[i][c]);
    }
    for (int i = 0; i < 4; i++)
        if (d < width) gather<false>(weights + i * KEYS, values + d, stride, count, kept[i], queries[i].z + d, width - d);
}

// Up to four queries of one row that read the same key/value head.
inline void attend(const Query* queries, int n, const Keys& keys, const Blocks& blocks, const Reading& reading,
                   int64_t row, int64_t head, int64_t width) {
    const float* k = keys.k + row * keys.k_row + head * keys.k_head;
    const float* v = keys.v + row * keys.v_row + head * keys.v_head;
    const int64_t* positions = keys.positions + row * keys.apart;
    const float none = -std::numeric_limits<float>::infinity();
    float best[QUERIES], sum[QUERIES];
    for (int i = 0; i < n; i++) {
        best[i] = none;
        sum[i] = 0;
        std::memset(queries[i].z, 0, static_cast<size_t>(width) * sizeof(float));
    }
    alignas(64) float s[QUERIES * KEYS];
    for (int64_t from = 0; from < keys.count; from += KEYS) {
        const int64_t b = from / KEYS, some = std::min<int64_t>(KEYS, keys.count - from);
        Seen what[QUERIES];
        bool any = false;
        for (int i = 0; i < n; i++) {
            what[i] = seen(reading, queries[i].position, blocks.least[static_cast<size_t>(b)], blocks.most[static_cast<size_t>(b)]);
            any |= what[i] != Seen::NONE;
        }
        if (!any) continue;
        const float *key = k + from * keys.k_slot, *value = v + from * keys.v_slot;
        switch (n) {
            case 1: dots_of<1>(queries, key, keys.k_slot, some, width, s); break;
            case 2: dots_of<2>(queries, key, keys.k_slot, some, width, s); break;
            case 3: dots_of<3>(queries, key, keys.k_slot, some, width, s); break;
            default: dots_of<4>(queries, key, keys.k_slot, some, width, s);
        }
        float carried[QUERIES];
        int reading_all[QUERIES], whole = 0;  // which queries read the whole block
        for (int i = 0; i < n; i++) {
            if (what[i] == Seen::NONE) continue;
            float* mine = s + i * KEYS;
            for (int64_t j = some; j < KEYS; j++) mine[j] = none;
            for (int j = 0; j < KEYS; j += LANES) {
                Vec x = mul(load(mine + j), all(reading.scale));
                if (reading.cap != 0) x = mul(hyperbolic_tangent(divide(x, all(reading.cap))), all(reading.cap));
                store(mine + j, x);
            }
            for (int64_t j = some; j < KEYS; j++) mine[j] = none;
            int64_t last = some, left_out = 0;  // keys up to the last that is read, and how many of all are not
            if (what[i] == Seen::SOME) {
                last = 0;
                for (int64_t j = 0; j < some; j++) {
                    if (may_read(reading, queries[i].position, positions[from + j])) last = j + 1;
                    else mine[j] = none, left_out++;
                }
            }
            Vec high = load(mine);
            for (int j = LANES; j < KEYS; j += LANES) high = larger(high, load(mine + j));
            const float top = std::max(best[i], highest(high));
            if (top == none) continue;
            const float kept = best[i] == none ? 0.0f : first(exponential(all(best[i] - top)));
            Vec added = zero();
            for (int j = 0; j < KEYS; j += LANES) {
                const Vec x = load(mine + j);
                // What may not be read weighs exactly nothing.
                const Vec p = zero_where_equal(x, all(none), exponential(sub(x, all(top))));
                store(mine + j, p);
                added = add(added, p);
            }
            best[i] = top;
            sum[i] = sum[i] * kept + total(added);
            // What may not be read is left out, not multiplied by nothing: who knows what lies there.
            carried[i] = kept;
            if (left_out > some - last) gather<true>(mine, value, keys.v_slot, last, kept, queries[i].z, width);
            else if (left_out) gather<false>(mine, value, keys.v_slot, last, kept, queries[i].z, width);
            else reading_all[whole++] = i;
        }
        if (whole == QUERIES) {
            gather_for_four(queries, s, value, keys.v_slot, some, carried, width);
            continue;
        }
        for (int m = 0; m < whole; m++) {
            const int i = reading_all[m];
            gather<false>(s + i * KEYS, value, keys.v_slot, some, carried[i], queries[i].z, width);
        }
    }
    for (int i = 0; i < n; i++) {
        if (sum[i] == 0) continue;
        for (int64_t d = 0; d < width; d++) queries[i].z[d] /= sum[i];
    }
}

}  // namespace cutaway
