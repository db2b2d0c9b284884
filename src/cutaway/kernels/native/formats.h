// How weights lie in memory. Each format gives the next 32 of a row as floats: the very numbers that it stands for.
//
// Layouts are those of ggml's block types (GGUF specification); `expand(row, i, out)` is group i of 32. ABREAST is how
// many rows are best read side by side for a single product, as measured.
#pragma once
#include "simd.h"

namespace cutaway {

constexpr int GROUP = 32;               // numbers that are expanded at once
constexpr int PARTS = GROUP / LANES;    // registers that they fill

// 32 bytes, in as many parts as there are registers of floats.
inline void parted(__m256i bytes, __m128i* out) {
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    if constexpr (PARTS == 2) {
        out[0] = low;
        out[1] = high;
    } else {
        out[0] = low;
        out[1] = _mm_srli_si128(low, 8);
        out[2] = high;
        out[3] = _mm_srli_si128(high, 8);
    }
}

// 32 bytes as floats, after `d · x + m`.
inline void scaled_u8(__m256i bytes, Vec d, Vec m, Vec* out) {
    __m128i part[4];
    parted(bytes, part);
    for (int j = 0; j < PARTS; j++) out[j] = fma(from_u8(part[j]), d, m);
}

inline void scaled_i8(__m256i bytes, Vec d, Vec* out) {
    __m128i part[4];
    parted(bytes, part);
    for (int j = 0; j < PARTS; j++) out[j] = mul(from_i8(part[j]), d);
}

#if defined(__AVX512F__)
// 16 bytes of two nibbles each, looked up in a table of 16 floats: a permutation reads four bits of each index.
inline void looked_up(const uint8_t* p, Vec table, Vec* out) {
    const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    out[0] = _mm512_permutexvar_ps(index, table);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), table);
}
inline Vec sixteen() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
#endif

// 16 bytes of two nibbles each: the low ones first, then the high ones.
inline __m256i nibbles(const uint8_t* p) {
    __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

// 32 bits as bytes: `value` where a bit is set.
inline __m256i spread_bits(const uint8_t* p, char value) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    const __m256i shuffle = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), shuffle);
    const __m256i mask = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
    __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask);
    return _mm256_and_si256(set, _mm256_set1_epi8(value));
}

struct F32 {
    static constexpr int SIZE = 1, BYTES = 4, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const float* p = reinterpret_cast<const float*>(row) + i * GROUP;
        for (int j = 0; j < PARTS; j++) out[j] = load(p + j * LANES);
    }
};

struct F16 {
    static constexpr int SIZE = 1, BYTES = 2, ABREAST = 1;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        for (int j = 0; j < PARTS; j++) out[j] = from_f16(row + (i * GROUP + j * LANES) * 2);
    }
};

struct BF16 {
    static constexpr int SIZE = 1, BYTES = 2, ABREAST = 1;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        for (int j = 0; j < PARTS; j++) out[j] = from_bf16(row + (i * GROUP + j * LANES) * 2);
    }
};

struct Q8_0 {  // d, 32 signed bytes
    static constexpr int SIZE = 32, BYTES = 34, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + i * BYTES;
        scaled_i8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2)), all(half_at(p)), out);
    }
};

struct Q4_0 {  // d, 32 nibbles: d (q − 8)
    static constexpr int SIZE = 32, BYTES = 18, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + i * BYTES;
#if defined(__AVX512F__)
        looked_up(p + 2, mul(sub(sixteen(), all(8.0f)), all(half_at(p))), out);
#else
        scaled_i8(_mm256_sub_epi8(nibbles(p + 2), _mm256_set1_epi8(8)), all(half_at(p)), out);
#endif
    }
};

struct Q4_1 {  // d, m, 32 nibbles: d q + m
    static constexpr int SIZE = 32, BYTES = 20, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + i * BYTES;
        Vec d, m;
        halves_at(p, &d, &m);
#if defined(__AVX512F__)
        looked_up(p + 4, fma(sixteen(), d, m), out);
#else
        scaled_u8(nibbles(p + 4), d, m, out);
#endif
    }
};

struct Q5_0 {  // d, 32 fifth bits, 32 nibbles: d (q − 16)
    static constexpr int SIZE = 32, BYTES = 22, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + i * BYTES;
        __m256i q = _mm256_or_si256(nibbles(p + 6), spread_bits(p + 2, 16));
        scaled_i8(_mm256_sub_epi8(q, _mm256_set1_epi8(16)), all(half_at(p)), out);
    }
};

struct Q5_1 {  // d, m, 32 fifth bits, 32 nibbles: d q + m
    static constexpr int SIZE = 32, BYTES = 24, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + i * BYTES;
        __m256i q = _mm256_or_si256(nibbles(p + 8), spread_bits(p + 4, 16));
        scaled_u8(q, all(half_at(p)), all(half_at(p + 2)), out);
    }
};

// The eight 6-bit scales and minima of a block of 256, packed in 12 bytes.
inline void scale_and_min(const uint8_t* p, int j, int* scale, int* least) {
    if (j < 4) {
        *scale = p[j] & 63;
        *least = p[j + 4] & 63;
    } else {
        *scale = (p[j + 4] & 15) | ((p[j - 4] >> 6) << 4);
        *least = (p[j + 4] >> 4) | ((p[j] >> 6) << 4);
    }
}

struct Q4_K {  // d, dmin, scales, 4 × (32 low nibbles, 32 high ones): d s q − dmin m
    static constexpr int SIZE = 256, BYTES = 144, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + (i / 8) * BYTES;
        int j = static_cast<int>(i % 8), scale, least;
        scale_and_min(p + 4, j, &scale, &least);
        __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 + (j / 2) * 32));
        if (j % 2) q = _mm256_srli_epi16(q, 4);
        q = _mm256_and_si256(q, _mm256_set1_epi8(15));
        scaled_u8(q, all(half_at(p) * static_cast<float>(scale)), all(-(half_at(p + 2) * static_cast<float>(least))), out);
    }
};

struct Q5_K {  // d, dmin, scales, a fifth bit for each, nibbles as in Q4_K
    static constexpr int SIZE = 256, BYTES = 176, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + (i / 8) * BYTES;
        int j = static_cast<int>(i % 8), scale, least;
        scale_and_min(p + 4, j, &scale, &least);
        __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 48 + (j / 2) * 32));
        if (j % 2) q = _mm256_srli_epi16(q, 4);
        q = _mm256_and_si256(q, _mm256_set1_epi8(15));
        __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
        const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << j));
        __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit);
        q = _mm256_or_si256(q, _mm256_and_si256(set, _mm256_set1_epi8(16)));
        scaled_u8(q, all(half_at(p) * static_cast<float>(scale)), all(-(half_at(p + 2) * static_cast<float>(least))), out);
    }
};

struct Q6_K {  // 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d: d s (q − 32)
    static constexpr int SIZE = 256, BYTES = 210, ABREAST = 4;
    static void expand(const uint8_t* row, int64_t i, Vec* out) {
        const uint8_t* p = row + (i / 8) * BYTES;
        int j = static_cast<int>(i % 8), half = j / 4, quarter = j % 4;
        __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + half * 64 + (quarter % 2) * 32));
        if (quarter >= 2) low = _mm256_srli_epi16(low, 4);
        low = _mm256_and_si256(low, _mm256_set1_epi8(15));
        __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 128 + half * 32));
        high = _mm256_srl_epi16(high, _mm_cvtsi32_si128(2 * quarter));
        high = _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(3)), 4);
        __m256i q = _mm256_sub_epi8(_mm256_or_si256(low, high), _mm256_set1_epi8(32));
        const int8_t* scales = reinterpret_cast<const int8_t*>(p + 192) + j * 2;
        float d = half_at(p + 208);
        Vec first = all(d * static_cast<float>(scales[0])), second = all(d * static_cast<float>(scales[1]));
        scaled_i8(q, all(1.0f), out);
        for (int k = 0; k < PARTS; k++) out[k] = mul(out[k], k < PARTS / 2 ? first : second);
    }
};

}  // namespace cutaway
