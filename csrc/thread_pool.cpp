#include "thread_pool.h"

#include <chrono>

#if !defined(_WIN32)
#include <pthread.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr auto SPIN_TIME = std::chrono::microseconds(50);
constexpr int SPINS_PER_LOOK = 64;  // at the clock

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::resize(int threads) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (threads != size_.load()) {
        stop_workers();
        size_.store(threads);
    }
}

void ThreadPool::start_workers() {
    const uint64_t seen = generation_.load();
    while (static_cast<int>(workers_.size()) < size_.load() - 1) {
        const int thread = static_cast<int>(workers_.size()) + 1;
        workers_.emplace_back([this, thread, seen] { worker(thread, seen); });
    }
}

void ThreadPool::stop_workers() {
    closing_ = true;
    generation_.fetch_add(1);
    wake();
    for (std::thread& thread : workers_) {
        thread.join();
    }
    workers_.clear();
    closing_ = false;
}

// No wake-up is lost: a condition is changed before `wake` reads how many sleep, and a sleeper is
// counted before it looks at the condition again, all in one sequentially consistent order. So one
// of the two sees the other; and as the sleeper holds the mutex from being counted until it sleeps,
// a notice that follows the count finds it asleep.
template <typename Ready> void ThreadPool::wait(Ready ready) {
    if (ready()) {
        return;
    }
    const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; ++i) {
            if (ready()) {
                return;
            }
            relax();
        }
        std::this_thread::yield();  // whom this one waits for may have no core
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    condition_.wait(lock, ready);
    sleepers_.fetch_sub(1);
}

void ThreadPool::wake() {
    if (sleepers_.load() > 0) {
        const std::lock_guard<std::mutex> lock(mutex_);
        condition_.notify_all();
    }
}

void ThreadPool::run(const std::function<void(int)>& work) {
    const std::lock_guard<std::mutex> turn(turn_);
    start_workers();
    work_ = &work;
    running_.store(static_cast<int>(workers_.size()));
    generation_.fetch_add(1);
    wake();
    work(0);
    wait([this] { return running_.load() == 0; });
}

// The generation cannot change twice while a worker looks: `run` waits for every worker to finish,
// and `stop_workers` for it to end.
void ThreadPool::worker(int thread, uint64_t seen) {
    while (true) {
        wait([&] { return generation_.load() != seen; });
        seen = generation_.load();
        if (closing_) {
            return;
        }
        (*work_)(thread);
        if (running_.fetch_sub(1) == 1) {
            wake();
        }
    }
}

// The phase read here is the one to leave: it cannot end before this thread has arrived. It ends
// once, so that a fast thread that arrives again counts towards the next phase while a slow one
// still waits for this one.
void ThreadPool::barrier() {
    const uint64_t phase = phase_.load();
    if (arrived_.fetch_add(1) + 1 == size_.load()) {
        arrived_.store(0);
        phase_.store(phase + 1);
        wake();
    } else {
        wait([&] { return phase_.load() != phase; });
    }
}

namespace {

// Never destroyed: at exit another thread may still be inside a run.
ThreadPool* the_pool = [] {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, [] { the_pool = new ThreadPool(the_pool->size()); });
#endif
    return new ThreadPool(1);
}();

}  // namespace

ThreadPool& pool() { return *the_pool; }

void set_threads(int threads) { the_pool->resize(threads); }

}  // namespace paceline
