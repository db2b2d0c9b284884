// Rows of x in groups, each group by a matrix of its own: a mixture's tokens in the order of their experts.
#pragma once
#include <vector>

#include "product.h"

namespace cutaway {

// Rows from..to, as if the groups' matrices were one.
inline void grouped_rows(const void* what, int64_t from, int64_t to) {
    int64_t start = 0;
    for (const Product& p : *static_cast<const std::vector<Product>*>(what)) {
        if (start >= to) return;
        const int64_t a = std::max(from - start, int64_t{0}), b = std::min(to - start, p.w->rows);
        if (a < b) product_rows(p, a, b);
        start += in_tiles(p.w->rows);
    }
}

// y = x Wᵀ, group after group. `w` is the first group's matrix; the others' numbers lie so many bytes apart.
inline void run_grouped(Pool& pool, const Matrix& w, int64_t bytes, const int64_t* counts, int64_t groups, const float* x, int64_t padded, float* y) {
    int64_t n = 0;
    for (int64_t g = 0; g < groups; g++) n += counts[g];
    if (n == 0) return;
    Products all{{{&w, x, y, n, padded, w.rows, {}}}, 1};
    const bool rounds = round_x(pool, all);
    const int64_t block = block_of(all.of[0]), parts = w.cols / GROUP;
    std::vector<Matrix> matrices(static_cast<size_t>(groups), w);
    std::vector<Product> few, many;
    int64_t row = 0;
    for (int64_t g = 0; g < groups; row += counts[g++]) {
        if (counts[g] == 0) continue;
        Matrix& own = matrices[static_cast<size_t>(g)];
        own.data += g * bytes;
        Product p{&own, x + row * padded, y + row * w.rows, counts[g], padded, w.rows, {}};
        if (rounds) {
            const Rounded& whole = all.of[0].rounded;
            p.rounded = {whole.q + row * padded, whole.d + row * parts, whole.extra + row * parts};
        }
        ((counts[g] + block - 1) / block >= 4 * pool.threads() ? many : few).push_back(p);
    }
    const int64_t rows = static_cast<int64_t>(few.size()) * in_tiles(w.rows);
    pool.run(grouped_rows, &few, rows, pool.threads() == 1 ? rows : rounds ? TOGETHER : 2 * W_TILE);
    // Those that are worth a product to themselves come last: they round their x anew, into the place of all of it.
    for (const Product& p : many) run(pool, Products{{p}, 1});
}

}  // namespace cutaway
