// Threads that wait for work: awake for a moment after each piece, asleep after that.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cutaway {

class Pool {
  public:
    using Work = void (*)(const void* what, int64_t from, int64_t to);

    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this] { wait_and_work(); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            over_ = true;
            round_.fetch_add(1);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Call `work` for pieces of [0, n), each of `step` but the last, on all threads; return when all are done.
    void run(Work work, const void* what, int64_t n, int64_t step) {
        if (n <= step || workers_.empty()) {
            if (n > 0) work(what, 0, n);
            return;
        }
        work_ = work;
        what_ = what;
        n_ = n;
        step_ = step;
        next_.store(0, std::memory_order_relaxed);
        busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
        round_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> hold(mutex_);
            wake_.notify_all();
        }
        take();
        while (busy_.load(std::memory_order_acquire) > 0) rest();
    }

  private:
    static constexpr int PATIENCE = 20000;  // looks before a thread goes to sleep: some tens of microseconds

    void rest() {
        for (int i = 0; i < 64; i++) {
            if (busy_.load(std::memory_order_acquire) == 0) return;
            _mm_pause();
        }
        std::this_thread::yield();
    }

    void take() {
        for (;;) {
            int64_t from = next_.fetch_add(step_, std::memory_order_relaxed);
            if (from >= n_) return;
            work_(what_, from, from + step_ < n_ ? from + step_ : n_);
        }
    }

    void wait_and_work() {
        uint64_t seen = 0;
        for (;;) {
            int looks = 0;
            while (round_.load(std::memory_order_acquire) == seen) {
                _mm_pause();
                if (++looks < PATIENCE) continue;
                std::unique_lock<std::mutex> hold(mutex_);
                asleep_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(hold, [&] { return round_.load(std::memory_order_seq_cst) != seen; });
                asleep_.fetch_sub(1);
            }
            seen++;
            if (over_) return;
            take();
            busy_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int> busy_{0}, asleep_{0};
    std::atomic<int64_t> next_{0};
    Work work_ = nullptr;
    const void* what_ = nullptr;
    int64_t n_ = 0, step_ = 1;
    bool over_ = false;
};

}  // namespace cutaway
