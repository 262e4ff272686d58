#include "threads/thread_pool.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

#if !defined(_WIN32)
#include <pthread.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto SPIN_TIME = std::chrono::microseconds(50);
constexpr int SPINS_PER_LOOK = 64;  // at the clock

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline double seconds_since(Clock::time_point began) {
    return std::chrono::duration<double>(Clock::now() - began).count();
}

// Whether it became true before it was time to sleep.
template <typename Ready> bool spin(Ready ready) {
    if (ready()) {
        return true;
    }
    const auto until = Clock::now() + SPIN_TIME;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; ++i) {
            if (ready()) {
                return true;
            }
            relax();
        }
    } while (Clock::now() < until);
    return false;
}

}  // namespace

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::check_between_phases() const {
    if (in_phase_) {
        std::fputs("paceline: a piece of work called the pool that runs it\n", stderr);
        std::abort();
    }
}

void ThreadPool::resize(int threads) {
    const Turn turn = take_turn();
    check_between_phases();
    if (threads != size_.load()) {
        stop_workers();
        size_.store(threads);
        crew_ = Crew(threads);
    }
}

void ThreadPool::start_workers() {
    if (active_.load() == 0) {
        set_active(crew_.active());
    }
    while (static_cast<int>(workers_.size()) < size_.load() - 1) {
        const int thread = static_cast<int>(workers_.size()) + 1;
        workers_.emplace_back([this, thread] { worker(thread); });
    }
}

void ThreadPool::stop_workers() {
    set_active(0);
    work_.wake();
    for (std::thread& thread : workers_) {
        thread.join();
    }
    workers_.clear();
}

void ThreadPool::set_active(int threads) {
    active_.store(threads);
    bench_.wake();
}

// No wake-up is lost: a condition is changed before `wake` reads how many sleep, and a sleeper is
// counted before it looks at the condition again, all in one sequentially consistent order. So one
// of the two sees the other; and as the sleeper holds the mutex from being counted until it sleeps,
// a notice that follows the count finds it asleep.
template <typename Ready> void ThreadPool::Door::wait(Ready ready) {
    if (!spin(ready)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        condition_.wait(lock, ready);
        sleepers_.fetch_sub(1);
    }
}

bool ThreadPool::Door::wake() {
    if (sleepers_.load() == 0) {
        return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    condition_.notify_all();
    return true;
}

void ThreadPool::run(const Phase& phase) {
    const Turn turn = take_turn();
    check_between_phases();
    const bool is_shared = size_.load() > 1 && phase.count > 1;
    if (is_shared) {
        start_workers();  // may throw, and then no phase has begun
    }
    in_phase_ = true;
    if (is_shared) {
        share(phase);
    } else {
        for (int piece = 0; piece < phase.count; ++piece) {
            phase.call(phase.work, piece, 0);
        }
    }
    in_phase_ = false;
}

void ThreadPool::share(const Phase& phase) {
    const auto began = Clock::now();
    phase_ = phase;
    done_.store(0);
    untaken_.store(phase.count);
    double lost = work_.wake() ? seconds_since(began) : 0.0;
    const int own = work_off(0);
    lost += wait_for_pieces(own);
    if (crew_.observe(seconds_since(began), lost, own, phase.count - own)) {
        set_active(crew_.active());
    }
}

double ThreadPool::wait_for_pieces(int own) {
    const int others = phase_.count - own;
    const auto ready = [&] { return done_.load() == others; };
    if (ready()) {
        return 0.0;
    }
    const auto began = Clock::now();
    end_.wait(ready);
    return seconds_since(began);
}

int ThreadPool::work_off(int thread) {
    const int shares = 2 * size_.load();
    int taken = 0;
    int untaken = untaken_.load();
    while (untaken > 0) {
        const int some = std::max(1, untaken / shares);
        if (untaken_.compare_exchange_weak(untaken, untaken - some)) {
            const int first = phase_.count - untaken;
            for (int piece = first; piece < first + some; ++piece) {
                phase_.call(phase_.work, piece, thread);
            }
            taken += some;
            untaken = untaken_.load();
        }
    }
    return taken;
}

void ThreadPool::worker(int thread) {
    const auto is_over = [this] { return active_.load() == 0; };
    while (!is_over()) {
        bench_.wait([&] { return is_active(thread) || is_over(); });
        work_.wait([&] { return !is_active(thread) || has_work(); });
        const int taken = is_active(thread) ? work_off(thread) : 0;
        if (taken > 0) {
            done_.fetch_add(taken);
            end_.wake();
        }
    }
}

namespace {

// Never destroyed: at exit another thread may still be inside a phase.
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
