// Threads that read pieces of files into slots of memory. What comes next they ask the owner, under
// one lock, which guards all slots and whatever says what comes next.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "disk/direct_files.h"

namespace paceline {

// Memory that is read into.
struct ReadSlot {
    enum class State { free, reading, ready };
    State state = State::free;
    size_t left = 0;    // chunks that have not come; the slot is ready behind the last one
    std::string error;  // of a chunk that could not be read
};

// Where the bytes of an extent lie.
struct Place {
    uint8_t* at;
    size_t bytes;
};

class Readers {
  public:
    struct Task {
        ReadSlot* slot;
        Chunk chunk;
    };
    using Next = std::function<std::optional<Task>()>;
    using Lock = std::unique_lock<std::mutex>;

    // Throws ReadError where a file cannot be opened.
    explicit Readers(const std::vector<std::string>& paths) : files_(paths) {}
    ~Readers();
    Readers(const Readers&) = delete;
    Readers& operator=(const Readers&) = delete;

    // `next`: the next task, if there is one; who calls it holds the lock.
    void start(int threads, Next next);
    Lock lock() const { return Lock(mutex_); }
    // There may be a task.
    void wake() { work_.notify_all(); }
    // Until something is so that depends on the slots; lets go of the lock meanwhile.
    template <typename IsSo> void wait(Lock& lock, const IsSo& is_so) {
        if (!is_so()) {
            wait_for(lock, is_so);
        }
    }

    int64_t bytes_read() const;
    // In `wait`.
    double seconds_waited() const;

  private:
    void read_on();
    void wait_for(Lock& lock, const std::function<bool()>& is_so);

    const DirectFiles files_;
    Next next_;
    mutable std::mutex mutex_;
    std::condition_variable work_, arrival_;
    bool is_over_ = false;
    int64_t bytes_read_ = 0;
    double seconds_waited_ = 0.0;
    std::vector<std::thread> threads_;
};

}  // namespace paceline
