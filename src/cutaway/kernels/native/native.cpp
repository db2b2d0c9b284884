// What Python calls (kernels/native.py), by plain C names. One call at a time computes; the rest wait their turn.
#include <pthread.h>

#include <memory>
#include <mutex>

#include "block.h"
#include "grouped.h"

#ifndef CUTAWAY_SOURCES
#define CUTAWAY_SOURCES ""
#endif

using namespace cutaway;

namespace {

std::mutex turn;
Pool* pool = nullptr;  // never destroyed: at exit its threads may be gone already
int wanted = 0;        // threads that it was to have

Pool& with_threads(int threads) {
    if (pool == nullptr || wanted != threads) {
        delete pool;
        pool = nullptr;
        pool = new Pool(threads);
        wanted = threads;
    }
    return *pool;
}

constexpr int NO_ROW = 1, NO_MEMORY = 2;  // what calls give back where something is wrong

// One call at a time.
template <class Call>
int in_turn(Call&& call) {
    std::lock_guard<std::mutex> hold(turn);
    try {
        call();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return 0;
}

// Rows of x with zeros after them up to a width, as products read them; as they are where they have it.
const float* in_width(const float* x, int64_t n, int64_t cols, int64_t width) {
    static std::vector<float> wide;
    if (width == cols) return x;
    wide.assign(static_cast<size_t>(n * width), 0.0f);
    for (int64_t i = 0; i < n; i++) std::memcpy(wide.data() + i * width, x + i * cols, static_cast<size_t>(cols) * 4);
    return wide.data();
}

int64_t width_of(const Matrix& w, int64_t n) { return n == 1 ? in_groups(w.cols) * GROUP : padded(w.cols); }

// In a forked child there is one thread, and the pool's are not among its own.
void after_fork() {
    pool = nullptr;
    new (&turn) std::mutex;
}

const int registered = pthread_atfork(nullptr, nullptr, after_fork);

}  // namespace

extern "C" {

// Whether this library can be used.
int cutaway_fits() { return registered == 0; }

// Which sources this was built from.
const char* cutaway_sources() { return CUTAWAY_SOURCES; }

// Sizes of the structs, for the other side to compare with its own.
void cutaway_sizes(int64_t* out) {
    out[0] = sizeof(Matrix);
    out[1] = sizeof(Norm);
    out[2] = sizeof(Attention);
    out[3] = sizeof(Feedforward);
    out[4] = sizeof(Branch);
    out[5] = sizeof(Block);
    out[6] = sizeof(Group);
    out[7] = sizeof(Layer);
    out[8] = sizeof(Pass);
}

// y = x Wᵀ + b. x: [n, cols], y: [n, rows].
int cutaway_product(const Matrix* w, const float* x, float* y, int64_t n, int threads) {
    return in_turn([&] {
        const int64_t width = width_of(*w, n);
        run(with_threads(threads), Products{{{w, in_width(x, n, w->cols, width), y, n, width, w->rows, {}}}, 1});
    });
}

// The same of rows in groups, so many in each, by one of as many matrices: `w` and those that lie so many bytes apart.
int cutaway_grouped(const Matrix* w, int64_t bytes, const int64_t* counts, int64_t groups, const float* x, float* y, int64_t n, int threads) {
    return in_turn([&] {
        const int64_t width = width_of(*w, n);
        run_grouped(with_threads(threads), *w, bytes, counts, groups, in_width(x, n, w->cols, width), width, y);
    });
}

// Some rows of W as floats, all of them where `rows` is null. y: [n, cols].
int cutaway_expand(const Matrix* w, const int64_t* rows, float* y, int64_t n, int threads) {
    for (int64_t i = 0; rows && i < n; i++)
        if (rows[i] < 0 || rows[i] >= w->rows) return NO_ROW;
    auto call = [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) expand_any(*w, rows ? rows[i] : i, y + i * w->cols);
    };
    auto work = [](const void* what, int64_t from, int64_t to) { (*static_cast<const decltype(call)*>(what))(from, to); };
    return in_turn([&] { with_threads(threads).run(work, &call, n, std::max<int64_t>(16, n / (threads * 8))); });
}

// Layers over a pass, one after the other.
int cutaway_layers(const Pass* pass, const Layer* layers, int64_t count, const Group* groups, int threads) {
    return in_turn([&] { Runner(with_threads(threads), *pass, groups).run(layers, count); });
}
}
