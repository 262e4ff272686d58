#include "disk/readers.h"

#include <chrono>

namespace paceline {

Readers::~Readers() {
    {
        const Lock held = lock();
        is_over_ = true;
    }
    wake();
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

void Readers::start(int threads, Next next) {
    next_ = std::move(next);
    for (int i = 0; i < threads; ++i) {
        threads_.emplace_back([this] { read_on(); });
    }
}

void Readers::read_on() {
    Lock held = lock();
    for (;;) {
        std::optional<Task> task;
        work_.wait(held, [&] { return is_over_ || (task = next_()); });
        if (is_over_) {
            return;
        }
        held.unlock();
        std::string error = files_.read(task->chunk);
        held.lock();
        ReadSlot& slot = *task->slot;
        if (error.empty()) {
            bytes_read_ += task->chunk.bytes;
        } else {
            slot.error = std::move(error);
        }
        if (--slot.left == 0) {
            slot.state = ReadSlot::State::ready;
            arrival_.notify_all();
        }
    }
}

void Readers::wait_for(Lock& lock, const std::function<bool()>& is_so) {
    const auto began = std::chrono::steady_clock::now();
    arrival_.wait(lock, is_so);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
    seconds_waited_ += waited.count();
}

int64_t Readers::bytes_read() const {
    const Lock held = lock();
    return bytes_read_;
}

double Readers::seconds_waited() const {
    const Lock held = lock();
    return seconds_waited_;
}

}  // namespace paceline
