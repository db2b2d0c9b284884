// Dot products of queries with a block of keys, in two ways and one order of sums: keys as they lie for a few
// queries, laid across for many.
#pragma once
#include <algorithm>

#include "simd.h"

namespace cutaway {

constexpr int KEYS = 32;    // of a block
constexpr int QUERIES = 4;  // whose sums are held side by side

// One query: where its numbers are, and who it is.
struct Query {
    const float* q;
    float* z;
    int64_t position;
};

// Dot products of up to four queries with one key.
template <int N>
inline void dots(const Query* queries, const float* key, int64_t width, float* out) {
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
        out[i * KEYS] = sum;
    }
}

// The same with four keys that follow one another: each number that was loaded is used N or four times.
template <int N>
inline void dots_by_four(const Query* queries, const float* key, int64_t apart, int64_t width, float* out) {
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
        _mm_storeu_ps(out + i * KEYS, totals(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
        for (int j = 0; j < 4; j++)
            for (int64_t e = d; e < width; e++) out[i * KEYS + j] += queries[i].q[e] * key[j * apart + e];
    }
}

// Of a block's keys, for N queries. The results' rows are KEYS apart.
template <int N>
inline void dots_of(const Query* queries, const float* key, int64_t apart, int64_t count, int64_t width, float* out) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) dots_by_four<N>(queries, key + j * apart, apart, width, out + j);
    for (; j < count; j++) dots<N>(queries, key + j * apart, width, out + j);
}

// A block's keys, number by number: [width, KEYS], zeros after the last key. For many queries that is worth its while.
inline void lay_across(const float* key, int64_t apart, int64_t count, int64_t width, float* across) {
    int64_t d = 0;
    for (; d + 4 <= width; d += 4)
        for (int64_t j = 0; j < KEYS; j += 4) {
            __m128 four[4];
            for (int i = 0; i < 4; i++) four[i] = j + i < count ? _mm_loadu_ps(key + (j + i) * apart + d) : _mm_setzero_ps();
            _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
            for (int i = 0; i < 4; i++) _mm_store_ps(across + (d + i) * KEYS + j, four[i]);
        }
    for (; d < width; d++)
        for (int64_t j = 0; j < KEYS; j++) across[d * KEYS + j] = j < count ? key[j * apart + d] : 0.0f;
}

// What `total` finds in lane FROM and every APART-th after it: those lanes' sums, added up in its order, of N queries
// and LANES keys.
template <int FROM, int APART, int N>
inline void lanes_across(const float* const* q, const float* across, int64_t whole, Vec (&sums)[N]) {
    if constexpr (APART == LANES) {
        for (int i = 0; i < N; i++) sums[i] = zero();
        for (int64_t d = FROM; d < whole; d += LANES) {
            const Vec k = load(across + d * KEYS);
            for (int i = 0; i < N; i++) sums[i] = fma(all(q[i][d]), k, sums[i]);
        }
    } else {
        Vec more[N];
        lanes_across<FROM, APART * 2>(q, across, whole, sums);
        lanes_across<FROM + APART, APART * 2>(q, across, whole, more);
        for (int i = 0; i < N; i++) sums[i] = add(sums[i], more[i]);
    }
}

// The same results as dots_of, to the bit, from keys that lie across: nothing is added up between lanes.
template <int N>
inline void dots_across(const Query* queries, const float* across, int64_t count, int64_t width, float* out) {
    constexpr int SOME = LANES == 8 && N > 2 ? 2 : N;  // whose sums, and those that wait for others, fit the registers
    const int64_t whole = width / LANES * LANES;
    for (int from = 0; from < N; from += SOME) {
        const float* q[SOME];
        for (int i = 0; i < SOME; i++) q[i] = queries[std::min(from + i, N - 1)].q;
        for (int64_t j = 0; j < count; j += LANES) {
            Vec sums[SOME];
            lanes_across<0, 1>(q, across + j, whole, sums);
            for (int i = 0; i < SOME && from + i < N; i++) {
                for (int64_t d = whole; d < width; d++) sums[i] = add(sums[i], mul(all(q[i][d]), load(across + d * KEYS + j)));
                store(out + (from + i) * KEYS + j, sums[i]);
            }
        }
    }
}

// Dot products of N queries with a block's keys; `across` is where those lie across, or null.
template <int N>
inline void dots_with(const Query* queries, const float* across, const float* key, int64_t apart, int64_t some, int64_t width, float* s) {
    if (across) dots_across<N>(queries, across, some, width, s);
    else dots_of<N>(queries, key, apart, some, width, s);
}

}  // namespace cutaway
