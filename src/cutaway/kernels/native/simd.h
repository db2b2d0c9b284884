// Eight floats (AVX2, FMA and F16C) or sixteen (AVX-512), and the few operations on them that the kernels need.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace cutaway {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int LANES = 16;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline Vec size_of(Vec x) { return _mm512_abs_ps(x); }
inline Vec with_sign_of(Vec size, Vec x) { return _mm512_or_ps(size, _mm512_and_ps(x, all(-0.0f))); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
inline Vec zero_where_equal(Vec a, Vec b, Vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ), x); }
inline bool no_number(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
inline float first(Vec x) { return _mm512_cvtss_f32(x); }
// The next LANES numbers as floats.
inline Vec from_i8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline Vec from_u8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline Vec from_u8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x)); }
inline Vec from_i8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
inline Vec from_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Vec from_bf16(const void* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline __m256 halved(Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
using Doubles = __m512d;  // half as many numbers
inline Doubles lower(Vec x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline Doubles upper(Vec x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
inline Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
inline double total(Doubles x) { return _mm512_reduce_add_pd(x); }

#else

using Vec = __m256;
constexpr int LANES = 8;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec from_i8(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline Vec from_u8(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline Vec from_u8(__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)); }
inline Vec from_i8(__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)); }
inline Vec from_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Vec from_bf16(const void* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline Vec size_of(Vec x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Vec with_sign_of(Vec size, Vec x) { return _mm256_or_ps(size, _mm256_and_ps(x, all(-0.0f))); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline Vec zero_where_equal(Vec a, Vec b, Vec x) { return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ), x); }
inline bool no_number(Vec x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
inline float first(Vec x) { return _mm256_cvtss_f32(x); }
inline __m256 halved(Vec x) { return x; }
using Doubles = __m256d;
inline Doubles lower(Vec x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline Doubles upper(Vec x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
inline Doubles add(Doubles a, Doubles b) { return _mm256_add_pd(a, b); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
inline double total(Doubles x) {
    const __m128d y = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
    return _mm_cvtsd_f64(_mm_add_sd(y, _mm_unpackhi_pd(y, y)));
}

#endif

// The sum of all lanes, in an order that is always the same.
inline float total(Vec x) {
    const __m256 y = halved(x);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}

// The largest of all lanes.
inline float highest(Vec x) {
#if defined(__AVX512F__)
    const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
    const __m256 y = x;
#endif
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps(z, z, 1)));
}

inline float half_to_float(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }
inline float half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

// Two halves that follow one another, each in all lanes.
inline void halves_at(const uint8_t* p, Vec* one, Vec* two) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    float at[4];
    _mm_storeu_ps(at, _mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
    *one = all(at[0]);
    *two = all(at[1]);
}

// Four sums of all lanes at once, each in the order that `total` has.
inline __m128 totals(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
    const Vec ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const Vec cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    const Vec s = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    const Vec t = add(s, _mm512_shuffle_ps(s, s, 0xEE));
    const Vec u = add(t, _mm512_shuffle_ps(t, t, 0x55));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), u));
#else
    const Vec ab = add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const Vec cd = add(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    const Vec s = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));  // a a c c, b b d d
    const Vec t = add(s, _mm256_shuffle_ps(s, s, 0xF5));
    return _mm_shuffle_ps(_mm_unpacklo_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)),
                          _mm_unpackhi_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)), 0x44);
#endif
}

}  // namespace cutaway
