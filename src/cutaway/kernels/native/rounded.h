// Products of whole numbers: weights of 8 bits with a scale for each 32, and x rounded in the same way.
//
// Sixteen rows of W lie together: of each group of 32 first their sixteen scales (halves), then eight times four
// numbers of every row, each with 128 added. A result's bits depend on its row of x and its row of W alone: a group's
// sum is a whole number, and groups are added up in order.
#pragma once
#include <vector>

#include "formats.h"
#include "pool.h"

namespace cutaway {

constexpr int TOGETHER = 16;                                   // rows of W
constexpr int64_t TOGETHER_BYTES = TOGETHER * (2 + GROUP);     // of a group of each
constexpr int ROUNDED_TILE = 8;                                // rows of x whose sums are held at once

// Rows of x, rounded: q · d, and what the 128 in each weight adds up to, to be taken off.
struct Rounded {
    const int8_t* q;        // [n, padded]
    const float* d;         // [n, groups]
    const int32_t* extra;   // [n, groups]
};

// One row's next 32 numbers; those that are no numbers make the scale one that is none.
inline void round_group(const float* x, int8_t* q, float* d, int32_t* extra) {
    alignas(64) float largest[LANES], wrong[LANES];
    Vec high = zero(), none = zero();
    for (int j = 0; j < PARTS; j++) {
        const Vec v = load(x + j * LANES);
        high = larger(size_of(v), high);
        none = fma(v, zero(), none);
    }
    store(largest, high);
    store(wrong, none);
    float most = 0, nothing = 0;
    for (int j = 0; j < LANES; j++) {
        most = std::max(most, largest[j]);
        nothing += wrong[j];
    }
    const float scale = most / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int32_t sum = 0;
    alignas(64) float turned[GROUP];
    for (int j = 0; j < PARTS; j++) store(turned + j * LANES, nearest(mul(load(x + j * LANES), all(inverse))));
    for (int j = 0; j < GROUP; j++) {
        const auto number = static_cast<int32_t>(turned[j]);
        q[j] = static_cast<int8_t>(number);
        sum += number;
    }
    *d = scale + nothing;
    *extra = -128 * sum;
}

// A row of W as floats.
inline void expand_together(const uint8_t* data, int64_t row, int64_t groups, float* out) {
    const uint8_t* tile = data + row / TOGETHER * groups * TOGETHER_BYTES;
    const int64_t lane = row % TOGETHER;
    for (int64_t g = 0; g < groups; g++, tile += TOGETHER_BYTES) {
        const float d = half_at(tile + 2 * lane);
        for (int j = 0; j < GROUP; j++)
            out[g * GROUP + j] = d * static_cast<float>(tile[2 * TOGETHER + j / 4 * 64 + lane * 4 + j % 4] - 128);
    }
}

// Sixteen rows of W for C rows of x. y: rows so far apart; bias: of the sixteen, or null.
#if defined(__AVX512F__)
template <int C>
__attribute__((target("avx512vnni"))) inline void tile_by_dots(
    const uint8_t* w, int64_t groups, const Rounded& x, int64_t padded, float* y, int64_t stride, const float* bias) {
    __m512 acc[C];
    for (int c = 0; c < C; c++) acc[c] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, w += TOGETHER_BYTES) {
        const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
        for (int b = 0; b < TOGETHER_BYTES; b += 64) _mm_prefetch(reinterpret_cast<const char*>(w + 4 * TOGETHER_BYTES + b), _MM_HINT_T0);
        __m512i part[8];
        for (int j = 0; j < 8; j++) part[j] = _mm512_loadu_si512(w + 2 * TOGETHER + j * 64);
        for (int c = 0; c < C; c++) {
            const int8_t* q = x.q + c * padded + g * GROUP;
            __m512i sum = _mm512_set1_epi32(x.extra[c * groups + g]), other = _mm512_setzero_si512();
            for (int j = 0; j < 8; j += 2) {
                int32_t four, next;
                std::memcpy(&four, q + 4 * j, 4);
                std::memcpy(&next, q + 4 * j + 4, 4);
                sum = _mm512_dpbusd_epi32(sum, part[j], _mm512_set1_epi32(four));
                other = _mm512_dpbusd_epi32(other, part[j + 1], _mm512_set1_epi32(next));
            }
            const __m512 both = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, other));
            acc[c] = _mm512_fmadd_ps(both, _mm512_mul_ps(d, _mm512_set1_ps(x.d[c * groups + g])), acc[c]);
        }
    }
    for (int c = 0; c < C; c++)
        _mm512_storeu_ps(y + c * stride, bias ? _mm512_add_ps(acc[c], _mm512_loadu_ps(bias)) : acc[c]);
}
#endif

template <int C>
inline void tile_by_pairs(
    const uint8_t* w, int64_t groups, const Rounded& x, int64_t padded, float* y, int64_t stride, const float* bias) {
    const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(static_cast<char>(0x80));
    for (int half = 0; half < 2; half++) {
        __m256 acc[C];
        for (int c = 0; c < C; c++) acc[c] = _mm256_setzero_ps();
        const uint8_t* p = w;
        for (int64_t g = 0; g < groups; g++, p += TOGETHER_BYTES) {
            const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * half)));
            __m256i sums[C];
            for (int c = 0; c < C; c++) sums[c] = _mm256_setzero_si256();
            for (int j = 0; j < 8; j++) {
                const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 * TOGETHER + j * 64 + 32 * half));
                const __m256i part = _mm256_xor_si256(raw, flip), size = _mm256_abs_epi8(part);
                for (int c = 0; c < C; c++) {
                    int32_t four;
                    std::memcpy(&four, x.q + c * padded + g * GROUP + 4 * j, 4);
                    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(four), part);
                    sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), ones));
                }
            }
            for (int c = 0; c < C; c++)
                acc[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[c]), _mm256_mul_ps(d, _mm256_set1_ps(x.d[c * groups + g])), acc[c]);
        }
        for (int c = 0; c < C; c++) {
            float* to = y + c * stride + 8 * half;
            _mm256_storeu_ps(to, bias ? _mm256_add_ps(acc[c], _mm256_loadu_ps(bias + 8 * half)) : acc[c]);
        }
    }
}

template <int C>
inline void tile_together(
    const uint8_t* w, int64_t groups, const Rounded& x, int64_t padded, float* y, int64_t stride, const float* bias) {
#if defined(__AVX512F__)
    static const bool dots = __builtin_cpu_supports("avx512vnni");
    if (dots) return tile_by_dots<C>(w, groups, x, padded, y, stride, bias);
#endif
    tile_by_pairs<C>(w, groups, x, padded, y, stride, bias);
}

// Rows from..to of W, multiples of sixteen, for n rows of x.
inline void product_together(
    const uint8_t* data, int64_t groups, int64_t from, int64_t to, const Rounded& x, int64_t padded, int64_t n, float* y,
    int64_t stride, const float* bias) {
    for (int64_t r = from; r < to; r += TOGETHER) {
        const uint8_t* w = data + r * groups * (2 + GROUP);
        for (int64_t c = 0; c < n;) {
            const Rounded at{x.q + c * padded, x.d + c * groups, x.extra + c * groups};
            float* out = y + c * stride + r;
            const float* shift = bias ? bias + r : nullptr;
            const int64_t left = n - c;
            if (left >= ROUNDED_TILE) { tile_together<ROUNDED_TILE>(w, groups, at, padded, out, stride, shift); c += ROUNDED_TILE; }
            else if (left >= 4) { tile_together<4>(w, groups, at, padded, out, stride, shift); c += 4; }
            else if (left >= 2) { tile_together<2>(w, groups, at, padded, out, stride, shift); c += 2; }
            else { tile_together<1>(w, groups, at, padded, out, stride, shift); c += 1; }
        }
    }
}

}  // namespace cutaway
