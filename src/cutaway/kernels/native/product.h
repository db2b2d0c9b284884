// y = x Wᵀ + b, straight from the blocks that W is stored in.
//
// A result's bits depend on its row of x and its row of W alone: the sum runs along the width in steps of LANES, in
// one accumulator for each span, and the spans are added up in order. So one row alone and the same row among
// a thousand give the same, whatever tile they fall into and however many threads there are.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "formats.h"
#include "pool.h"
#include "rounded.h"

namespace cutaway {

constexpr int SPAN = 640;                           // most numbers of a row that one accumulator adds up
constexpr int W_TILE = 4;                           // rows of W and of x whose products are summed side by side
constexpr int X_TILE = LANES == 16 ? 6 : 3;         // W_TILE · X_TILE accumulators fit the registers
constexpr int X_BYTES = 512 << 10;                  // of x that stay in the second cache
constexpr int X_MOST = 264;                         // rows of x at once

// Most rows of x for which W's numbers are made anew for each tile of them, rather than laid down for all.
template <class F>
constexpr int FEW = (std::is_same<F, F32>::value ? 4 : 2) * X_TILE;

struct Matrix {
    const uint8_t* data;  // null where there is none
    const float* bias;    // or null
    int64_t rows, cols;   // of W
    int32_t format;
};

struct Product {
    const Matrix* w;
    const float* x;  // [n, padded]: rows of whole groups, zeros after the width
    float* y;        // [n, stride]
    int64_t n, padded, stride;
    Rounded rounded;  // the same x, for matrices of whole numbers
};

inline int64_t in_groups(int64_t width) { return (width + GROUP - 1) / GROUP; }

// Groups of a span: a row is cut into spans of equal length, as few as can be.
inline int64_t span_of(int64_t groups) {
    const int64_t spans = (groups * GROUP + SPAN - 1) / SPAN;
    return spans ? (groups + spans - 1) / spans : 1;
}

// A span of R rows of W against C rows of x; sums in columns of W_TILE. What is `ahead` is asked for early: several
// rows at once are more streams than the processor guesses at.
template <class F, int R, int C>
inline void spans_few(const uint8_t* const* rows, const float* x, int64_t padded, int64_t from, int64_t to, int64_t ahead, float* sums) {
    Vec acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = zero();
    for (int64_t i = from; i < to; i++) {
        constexpr int EACH = R * (GROUP * F::BYTES / F::SIZE);
        for (int b = 0; b < EACH; b += 64) _mm_prefetch(reinterpret_cast<const char*>(rows[0] + ahead + i * EACH + b), _MM_HINT_T0);
        Vec w[R][PARTS];
        for (int r = 0; r < R; r++) F::expand(rows[r], i, w[r]);
        for (int j = 0; j < PARTS; j++)
            for (int c = 0; c < C; c++) {
                const Vec v = load(x + c * padded + i * GROUP + j * LANES);
                for (int r = 0; r < R; r++) acc[r][c] = fma(w[r][j], v, acc[r][c]);
            }
    }
    for (int c = 0; c < C; c++) {
        float* sum = sums + c * W_TILE;
        if constexpr (R == 4) _mm_storeu_ps(sum, _mm_add_ps(_mm_loadu_ps(sum), totals(acc[0][c], acc[1][c], acc[2][c], acc[3][c])));
        else for (int r = 0; r < R; r++) sum[r] += total(acc[r][c]);
    }
}

// The same of W_TILE rows of W as floats, so far apart, and C rows of x; sums in columns of W_TILE.
template <int C>
inline void spans_tiled(const float* w, int64_t apart, const float* x, int64_t padded, int64_t groups, float* sums) {
    Vec acc[W_TILE][C];
    for (int r = 0; r < W_TILE; r++)
        for (int c = 0; c < C; c++) acc[r][c] = zero();
    for (int64_t k = 0; k < groups * GROUP; k += LANES) {
        Vec v[C];
        for (int c = 0; c < C; c++) v[c] = load(x + c * padded + k);
        for (int r = 0; r < W_TILE; r++) {
            Vec u = load(w + r * apart + k);
            for (int c = 0; c < C; c++) acc[r][c] = fma(u, v[c], acc[r][c]);
        }
    }
    for (int c = 0; c < C; c++) {
        float* to = sums + c * W_TILE;
        _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), totals(acc[0][c], acc[1][c], acc[2][c], acc[3][c])));
    }
}

inline void spans_of(int64_t c, const float* w, int64_t apart, const float* x, int64_t padded, int64_t groups, float* sums) {
    switch (c) {
        case 1: return spans_tiled<1>(w, apart, x, padded, groups, sums);
        case 2: return spans_tiled<2>(w, apart, x, padded, groups, sums);
        case 3: return spans_tiled<3>(w, apart, x, padded, groups, sums);
#if defined(__AVX512F__)
        case 4: return spans_tiled<4>(w, apart, x, padded, groups, sums);
        case 5: return spans_tiled<5>(w, apart, x, padded, groups, sums);
        case 6: return spans_tiled<6>(w, apart, x, padded, groups, sums);
#endif
    }
}

// Group i of a row, with zeros after the row's end. Only single numbers can end within a group.
template <class F>
inline void expand_padded(const uint8_t* row, int64_t i, int64_t width, Vec* out) {
    if (F::SIZE != 1 || (i + 1) * GROUP <= width) return F::expand(row, i, out);
    alignas(32) uint8_t last[GROUP * 4] = {0};
    std::memcpy(last, row + i * GROUP * F::BYTES, static_cast<size_t>((width - i * GROUP) * F::BYTES));
    F::expand(last, 0, out);
}

template <class F>
inline int64_t row_bytes(int64_t width) { return width / F::SIZE * F::BYTES; }

// A row of W as floats.
template <class F>
inline void expand_row(const Matrix& m, int64_t row, float* out) {
    const uint8_t* data = m.data + row * row_bytes<F>(m.cols);
    for (int64_t g = 0; g * GROUP < m.cols; g++) {
        Vec part[PARTS];
        alignas(64) float numbers[GROUP];
        expand_padded<F>(data, g, m.cols, part);
        for (int j = 0; j < PARTS; j++) store(numbers + j * LANES, part[j]);
        const int64_t some = std::min<int64_t>(GROUP, m.cols - g * GROUP);
        std::memcpy(out + g * GROUP, numbers, static_cast<size_t>(some) * sizeof(float));
    }
}

// Rows of x that stay in the second cache while rows of W pass by: as few blocks as can be, of one size.
inline int64_t block_of(const Product& p) {
    const int64_t fit = X_BYTES / (p.padded * static_cast<int64_t>(sizeof(float)));
    const int64_t most = std::min(std::max(fit, 4 * int64_t{X_TILE}), int64_t{X_MOST}) / X_TILE * X_TILE;
    const int64_t n = std::max(p.n, int64_t{1}), blocks = (n + most - 1) / most, each = (n + blocks - 1) / blocks;
    return (each + X_TILE - 1) / X_TILE * X_TILE;
}

// W_TILE rows of W for C rows of x. What W's numbers are never lies anywhere but in registers.
template <class F, int C>
inline void tile_of_few(const Product& p, int64_t r, int64_t first) {
    const Matrix& m = *p.w;
    const int64_t bytes = row_bytes<F>(m.cols), groups = in_groups(m.cols), span = span_of(groups);
    constexpr int R = C == 1 ? F::ABREAST : W_TILE;
    const uint8_t* rows[W_TILE];
    for (int k = 0; k < W_TILE; k++) rows[k] = m.data + (r + k) * bytes;
    float sums[C * W_TILE] = {0};
    for (int k = 0; k < W_TILE; k += R)
        for (int64_t g = 0; g < groups; g += span)
            spans_few<F, R, C>(rows + k, p.x + first * p.padded, p.padded, g, std::min(g + span, groups), W_TILE * bytes, sums + k);
    const __m128 bias = m.bias ? _mm_loadu_ps(m.bias + r) : _mm_setzero_ps();
    for (int c = 0; c < C; c++) _mm_storeu_ps(p.y + (first + c) * p.stride + r, _mm_add_ps(_mm_loadu_ps(sums + c * W_TILE), bias));
}

// Rows from..to of W for few rows of x; how far it came. Rows that are left over, fewer than a tile, are computed as a
// block.
template <class F>
inline int64_t product_few(const Product& p, int64_t from, int64_t to) {
    const Matrix& m = *p.w;
    if (p.n > FEW<F> || m.cols % GROUP) return from;
    const int64_t tiles = (p.n + X_TILE - 1) / X_TILE;
    int64_t r = from;
    for (; r + W_TILE <= to; r += W_TILE)
        for (int64_t t = 0; t < tiles; t++) {  // of as equal sizes as can be
            const int64_t c = p.n * t / tiles;
            switch (p.n * (t + 1) / tiles - c) {
                case 1: tile_of_few<F, 1>(p, r, c); break;
                case 2: tile_of_few<F, 2>(p, r, c); break;
                case 3: tile_of_few<F, 3>(p, r, c); break;
#if defined(__AVX512F__)
                case 4: tile_of_few<F, 4>(p, r, c); break;
                case 5: tile_of_few<F, 5>(p, r, c); break;
                case 6: tile_of_few<F, 6>(p, r, c); break;
#endif
            }
        }
    return r;
}

// Rows from..to of W for rows first..last of x, no more than a block of them.
template <class F>
inline void product_block(const Product& p, int64_t from, int64_t to, int64_t first, int64_t last) {
    const Matrix& m = *p.w;
    const int64_t bytes = row_bytes<F>(m.cols), groups = in_groups(m.cols), span = span_of(groups);
    const int64_t some = last - first, tiles = (some + X_TILE - 1) / X_TILE;
    alignas(64) float expanded[W_TILE * SPAN], sums[W_TILE * X_MOST];
    for (int64_t r = from; r < to; r += W_TILE) {
        const int n = static_cast<int>(std::min<int64_t>(W_TILE, to - r));
        std::memset(sums, 0, static_cast<size_t>(some * W_TILE) * sizeof(float));
        for (int64_t g = 0; g < groups; g += span) {
            const int64_t stop = std::min(g + span, groups);
            const float* w = expanded;
            int64_t apart = SPAN;
            if (std::is_same<F, F32>::value && n == W_TILE && m.cols % GROUP == 0) {  // floats lie there as they are
                w = reinterpret_cast<const float*>(m.data + r * bytes) + g * GROUP;
                apart = m.cols;
            } else for (int k = 0; k < W_TILE; k++) {
                const uint8_t* row = m.data + (r + std::min(k, n - 1)) * bytes;
                for (int64_t i = g; i < stop; i++) {
                    Vec part[PARTS];
                    expand_padded<F>(row, i, m.cols, part);
                    for (int j = 0; j < PARTS; j++) store(expanded + k * SPAN + (i - g) * GROUP + j * LANES, part[j]);
                }
            }
            for (int64_t t = 0; t < tiles; t++) {  // of as equal sizes as can be
                const int64_t c = some * t / tiles, next = some * (t + 1) / tiles;
                // What lies a tile further is asked for early, a part of it for each tile of x.
                const int64_t begin = W_TILE * bytes * g / groups, all = W_TILE * bytes * (stop - g) / groups;
                for (int64_t b = begin + all * t / tiles; b < begin + all * (t + 1) / tiles; b += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(m.data + (r + W_TILE) * bytes + b), _MM_HINT_T0);
                spans_of(next - c, w, apart, p.x + (first + c) * p.padded + g * GROUP, p.padded, stop - g, sums + c * W_TILE);
            }
        }
        if (n == W_TILE) {
            const __m128 bias = m.bias ? _mm_loadu_ps(m.bias + r) : _mm_setzero_ps();
            for (int64_t c = 0; c < some; c++)
                _mm_storeu_ps(p.y + (first + c) * p.stride + r, _mm_add_ps(_mm_load_ps(sums + c * W_TILE), bias));
            continue;
        }
        for (int64_t c = 0; c < some; c++)
            for (int k = 0; k < n; k++)
                p.y[(first + c) * p.stride + r + k] = sums[c * W_TILE + k] + (m.bias ? m.bias[r + k] : 0.0f);
    }
}

// The number that a GGUF gives each format (ggml_type).
enum Format : int32_t {
    FORMAT_F32 = 0, FORMAT_F16 = 1, FORMAT_Q4_0 = 2, FORMAT_Q4_1 = 3, FORMAT_Q5_0 = 6, FORMAT_Q5_1 = 7,
    FORMAT_Q8_0 = 8, FORMAT_Q4_K = 12, FORMAT_Q5_K = 13, FORMAT_Q6_K = 14, FORMAT_BF16 = 30,
    FORMAT_TOGETHER = 1000,  // no GGUF's: Q8_0, by sixteen rows, see rounded.h
};

// Call `f` with the format's type; false where there is none.
template <class Call>
inline bool with_format(int32_t format, Call&& f) {
    switch (format) {
        case FORMAT_F32: f(F32{}); return true;
        case FORMAT_F16: f(F16{}); return true;
        case FORMAT_BF16: f(BF16{}); return true;
        case FORMAT_Q4_0: f(Q4_0{}); return true;
        case FORMAT_Q4_1: f(Q4_1{}); return true;
        case FORMAT_Q5_0: f(Q5_0{}); return true;
        case FORMAT_Q5_1: f(Q5_1{}); return true;
        case FORMAT_Q8_0: f(Q8_0{}); return true;
        case FORMAT_Q4_K: f(Q4_K{}); return true;
        case FORMAT_Q5_K: f(Q5_K{}); return true;
        case FORMAT_Q6_K: f(Q6_K{}); return true;
        default: return false;
    }
}

// Any row of W as floats.
inline void expand_any(const Matrix& m, int64_t row, float* out) {
    if (m.format == FORMAT_TOGETHER) return expand_together(m.data, row, m.cols / GROUP, out);
    with_format(m.format, [&](auto f) { expand_row<decltype(f)>(m, row, out); });
}

// Rows from..to of W for rows first..last of x, where W is of whole numbers; false where it is not.
inline bool product_rounded(const Product& p, int64_t from, int64_t to, int64_t first, int64_t last) {
    const Matrix& m = *p.w;
    if (m.format != FORMAT_TOGETHER) return false;
    const int64_t groups = m.cols / GROUP;
    const Rounded x{p.rounded.q + first * p.padded, p.rounded.d + first * groups, p.rounded.extra + first * groups};
    product_together(m.data, groups, from, to, x, p.padded, last - first, p.y + first * p.stride, p.stride, m.bias);
    return true;
}

inline void product_rows(const Product& p, int64_t from, int64_t to) {
    if (product_rounded(p, from, to, 0, p.n)) return;
    with_format(p.w->format, [&](auto f) {
        using F = decltype(f);
        from = product_few<F>(p, from, to);
        const int64_t block = block_of(p);
        for (int64_t c = 0; c < p.n && from < to; c += block) product_block<F>(p, from, to, c, std::min(c + block, p.n));
    });
}

// Rows as they are handed out: each matrix begins with a whole tile.
inline int64_t in_tiles(int64_t rows) { return (rows + TOGETHER - 1) / TOGETHER * TOGETHER; }

// Up to three products of the same rows of x that can be computed side by side: their rows are handed out as if they
// were one matrix's.
struct Products {
    Product of[3];
    int count;
};

inline void products_rows(const void* what, int64_t from, int64_t to) {
    const Products& all = *static_cast<const Products*>(what);
    int64_t start = 0;
    for (int i = 0; i < all.count; i++) {
        const int64_t rows = all.of[i].w->rows;
        const int64_t a = std::max(from - start, int64_t{0}), b = std::min(to - start, rows);
        if (a < b) product_rows(all.of[i], a, b);
        start += in_tiles(rows);
    }
}

// Whole matrices for blocks from..to of rows of x.
inline void products_blocks(const void* what, int64_t from, int64_t to) {
    const Products& all = *static_cast<const Products*>(what);
    for (int64_t b = from; b < to; b++) {
        for (int i = 0; i < all.count; i++) {
            const Product& p = all.of[i];
            const int64_t block = block_of(all.of[0]), c = b * block;
            if (product_rounded(p, 0, p.w->rows, c, std::min(c + block, p.n))) continue;
            with_format(p.w->format, [&](auto f) { product_block<decltype(f)>(p, 0, p.w->rows, c, std::min(c + block, p.n)); });
        }
    }
}

// Round x once for all matrices of whole numbers; whether there is one.
inline bool round_x(Pool& pool, Products& products) {
    static std::vector<int8_t> q;
    static std::vector<float> d;
    static std::vector<int32_t> extra;
    bool any = false;
    for (int i = 0; i < products.count; i++) any |= products.of[i].w->format == FORMAT_TOGETHER;
    if (!any) return false;
    const Product& p = products.of[0];
    const int64_t groups = p.w->cols / GROUP;
    if (q.size() < static_cast<size_t>(p.n * p.padded)) q.resize(static_cast<size_t>(p.n * p.padded));
    if (d.size() < static_cast<size_t>(p.n * groups)) d.resize(static_cast<size_t>(p.n * groups)), extra.resize(d.size());
    const Rounded found{q.data(), d.data(), extra.data()};
    auto call = [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++)
            for (int64_t g = 0; g < groups; g++)
                round_group(p.x + i * p.padded + g * GROUP, q.data() + i * p.padded + g * GROUP, d.data() + i * groups + g, extra.data() + i * groups + g);
    };
    auto work = [](const void* what, int64_t from, int64_t to) { (*static_cast<const decltype(call)*>(what))(from, to); };
    pool.run(work, &call, p.n, p.n < 8 ? p.n : 4);
    for (int i = 0; i < products.count; i++) products.of[i].rounded = found;
    return true;
}

inline void run(Pool& pool, Products products) {
    const int64_t step = round_x(pool, products) ? TOGETHER : 2 * W_TILE;
    // Many rows of x are handed out rather than rows of W, so that each of them comes from memory but once.
    const int64_t block = block_of(products.of[0]), blocks = (products.of[0].n + block - 1) / block;
    if (blocks >= 4 * pool.threads()) return pool.run(products_blocks, &products, blocks, 1);
    int64_t rows = 0;
    for (int i = 0; i < products.count; i++) rows += in_tiles(products.of[i].w->rows);
    pool.run(products_rows, &products, rows, pool.threads() == 1 ? rows : step);
}

}  // namespace cutaway
