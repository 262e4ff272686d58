// The one pool of threads for kernels. Knows no kernels.
//
// `run` calls a function on every thread, the caller's included, and returns when all are done.
// Inside, `barrier` waits for the others and `Tickets` hand out pieces of work. Waiting threads
// spin for about 50 microseconds and then sleep, so a pool that has nothing to do costs nothing,
// and one that is short of cores gives way.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class ThreadPool {
  public:
    explicit ThreadPool(int threads) : size_(threads) {}
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_.load(); }

    // Waits for a `run` in progress. The threads themselves start with the next `run`.
    void resize(int threads);

    // Calls work(thread) for thread = 0..size-1; not reentrant. `work` must not throw. Callers from
    // several threads take turns. Throws std::system_error where a thread cannot be started.
    void run(const std::function<void(int)>& work);

    // Waits until every thread of the running `run` has come here.
    void barrier();

  private:
    void worker(int thread, uint64_t seen);
    void start_workers();
    void stop_workers();
    template <typename Ready> void wait(Ready ready);
    void wake();

    std::mutex turn_;  // held by `run` and `resize`
    std::atomic<int> size_;
    std::vector<std::thread> workers_;  // size_ - 1 of them, or none yet
    const std::function<void(int)>* work_ = nullptr;
    bool closing_ = false;  // told to the workers, like work_, by the generation

    // Each on a cache line of its own: some spin on one while others change the next.
    alignas(64) std::atomic<uint64_t> generation_{0};  // of `run`
    alignas(64) std::atomic<int> running_{0};          // workers that have not finished it
    alignas(64) std::atomic<int> arrived_{0};          // at the barrier
    alignas(64) std::atomic<uint64_t> phase_{0};       // barriers passed
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable condition_;
};

// The process's pool, of one thread at first. It lives until the process ends, and a forked child,
// which has none of its parent's threads, gets another of the same size.
ThreadPool& pool();
void set_threads(int threads);

// Hands out the pieces 0..count-1 of one phase to whoever comes first. `reset` belongs between
// barriers, or before the run: no one may be taking.
class Tickets {
  public:
    void reset(int count) {
        next_.store(0, std::memory_order_relaxed);
        count_ = count;
    }
    // The next piece, or -1 when there is none left.
    int take() {
        const int piece = next_.fetch_add(1, std::memory_order_relaxed);
        return piece < count_ ? piece : -1;
    }

  private:
    alignas(64) std::atomic<int> next_{0};
    int count_ = 0;
};

}  // namespace paceline
