// Threads that wait for work: awake for a moment after each piece, asleep after that.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace cutaway {

class Pool {
  public:
    using Work = void (*)(const void* what, int64_t from, int64_t to);

    explicit Pool(int threads) {
        workers_.reserve(static_cast<size_t>(threads));
        try {
            for (int i = 1; i < threads; i++) workers_.emplace_back([this] { wait_and_work(); });
        } catch (const std::exception&) {  // there are no more to be had: those that there are do all
        }
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            over_ = true;
            state_.fetch_add(ROUND);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Call `work` for pieces of [0, n), multiples of `step` but the last, on all threads; return when all are done.
    // Pieces grow smaller towards the end, so that nobody waits long for the last; a thread that is not there in time
    // is not waited for: the others take its share. Throws bad_alloc where one of them had no memory.
    void run(Work work, const void* what, int64_t n, int64_t step) {
        if (n <= step || workers_.empty()) {
            if (n > 0) work(what, 0, n);
            return;
        }
        failed_.store(false, std::memory_order_relaxed);
        // Closed while it is changed: who looked at the last round can take no piece of it any more.
        const uint64_t round = (state_.load(std::memory_order_relaxed) / ROUND + 1) * ROUND;
        state_.store(round + CLOSED, std::memory_order_seq_cst);
        work_.store(work, std::memory_order_relaxed);
        what_.store(what, std::memory_order_relaxed);
        n_.store(n, std::memory_order_relaxed);
        step_.store(step, std::memory_order_relaxed);
        left_.store(n, std::memory_order_relaxed);
        state_.store(round, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> hold(mutex_);
            wake_.notify_all();
        }
        take();
        for (int looks = 0; left_.load(std::memory_order_acquire) > 0; looks++) {
            if (looks % 64 < 63) _mm_pause();
            else std::this_thread::yield();
        }
        if (failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
    }

  private:
    static constexpr uint64_t ROUND = uint64_t{1} << 32, CLOSED = ROUND - 1;
    static constexpr int PATIENCE = 60000;  // looks before a thread goes to sleep: about a millisecond, what comes between two tokens

    // Pieces, one after the other, until there are none.
    void take() {
        uint64_t state = state_.load(std::memory_order_acquire);
        for (;;) {
            const auto from = static_cast<int64_t>(state % ROUND);
            const Work work = work_.load(std::memory_order_relaxed);
            const void* what = what_.load(std::memory_order_relaxed);
            const int64_t n = n_.load(std::memory_order_relaxed), step = step_.load(std::memory_order_relaxed);
            if (from >= n) return;
            const int64_t share = (n - from) * 7 / (8 * threads()) / step * step;
            const int64_t size = std::min(std::max(share, step), n - from);
            // If this succeeds, the round is still the one that all of the above was read in.
            if (!state_.compare_exchange_weak(state, state + static_cast<uint64_t>(size), std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            try {
                work(what, from, from + size);
            } catch (const std::bad_alloc&) {
                failed_.store(true, std::memory_order_relaxed);
            }
            left_.fetch_sub(size, std::memory_order_acq_rel);
            state = state_.load(std::memory_order_acquire);
        }
    }

    void wait_and_work() {
        uint64_t seen = 0;
        for (;;) {
            int looks = 0;
            while (state_.load(std::memory_order_acquire) / ROUND == seen) {
                _mm_pause();
                if (++looks < PATIENCE) continue;
                std::unique_lock<std::mutex> hold(mutex_);
                asleep_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(hold, [&] { return state_.load(std::memory_order_seq_cst) / ROUND != seen; });
                asleep_.fetch_sub(1);
            }
            seen = state_.load(std::memory_order_acquire) / ROUND;
            if (over_) return;
            // The round may just be closed: its pieces come in a moment.
            while (state_.load(std::memory_order_acquire) == seen * ROUND + CLOSED) _mm_pause();
            take();
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> state_{CLOSED};  // the round, and its next piece
    std::atomic<Work> work_{nullptr};
    std::atomic<const void*> what_{nullptr};
    std::atomic<int64_t> n_{0}, step_{1}, left_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> over_{false}, failed_{false};
};

}  // namespace cutaway
