// The one pool of threads for kernels. Knows no kernels.
//
// `each` runs a phase: pieces of work that any thread may do in any order. The caller does pieces
// too, and the phase ends when its pieces are done, not when all threads have come: a thread that
// has no processor at the moment takes no pieces, and delays the others at most by those that it
// had taken: half of its share of what was left then, and one at a time at the end. Waiting threads
// spin for about 50 microseconds and then sleep, so a pool that has nothing to do costs nothing, and
// whoever needs their processor gets it.
//
// On a machine without a processor for every thread, such delays can cost more than a thread brings.
// The pool then works with fewer threads and tries one more from time to time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "threads/crew.h"

namespace paceline {

class ThreadPool {
  public:
    explicit ThreadPool(int threads) : size_(threads), crew_(threads) {}
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_.load(); }

    // While it is held, phases of other callers wait, and the number of threads stays.
    using Turn = std::unique_lock<std::recursive_mutex>;
    Turn take_turn() { return Turn(turn_); }

    // Waits for its turn. The threads themselves start with the next phase.
    void resize(int threads);

    // Calls work(piece, thread) once for each piece = 0..count - 1 and returns when all are done.
    // `thread` is 0..size - 1, the caller's is 0, and each thread's pieces ascend. `work` must not
    // throw, and not call this. Callers from several threads take turns. Throws std::system_error
    // where a thread cannot be started.
    template <typename Work> void each(int count, const Work& work) {
        const Call call = [](const void* self, int piece, int thread) {
            (*static_cast<const Work*>(self))(piece, thread);
        };
        run({call, &work, count});
    }

  private:
    using Call = void (*)(const void* work, int piece, int thread);
    struct Phase {
        Call call;
        const void* work;
        int count;
    };

    // Where threads wait for one kind of change. They spin for a while and then sleep.
    class Door {
      public:
        template <typename Ready> void wait(Ready ready);
        // What `ready` looks at has changed. True if somebody slept.
        bool wake();

      private:
        alignas(64) std::atomic<int> sleepers_{0};
        std::mutex mutex_;
        std::condition_variable condition_;
    };

    void check_between_phases() const;
    void run(const Phase& phase);
    void share(const Phase& phase);
    // Does pieces of the phase in progress until none is left. Returns their number.
    int work_off(int thread);
    // Seconds that the caller waited after having done `own` pieces.
    double wait_for_pieces(int own);
    void worker(int thread);
    bool is_active(int thread) const { return thread < active_.load(); }
    bool has_work() const { return untaken_.load() > 0; }
    void set_active(int threads);
    void start_workers();
    void stop_workers();

    std::recursive_mutex turn_;  // held by `run` and `resize` too
    std::atomic<int> size_;
    std::vector<std::thread> workers_;  // size_ - 1 of them, or none yet
    Phase phase_{};                     // changed between phases only
    bool in_phase_ = false;             // guarded by the turn
    Crew crew_;

    // Each on a cache line of its own: some spin on one while others change the next. A piece is
    // taken by counting `untaken_` down, and after that its phase cannot end before the taker has
    // added it to `done_`. So what belongs to the phase is read after taking and stays until then.
    alignas(64) std::atomic<int> untaken_{0};  // pieces of this phase
    alignas(64) std::atomic<int> done_{0};     // pieces that workers have done
    alignas(64) std::atomic<int> active_{0};   // threads that take pieces; with 0 they end
    Door work_, end_, bench_;                  // waiting for pieces, for the last one, to be active
};

// The process's pool, of one thread at first. It lives until the process ends, and a forked child,
// which has none of its parent's threads, gets another of the same size.
ThreadPool& pool();
void set_threads(int threads);

}  // namespace paceline
