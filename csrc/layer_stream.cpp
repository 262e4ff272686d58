#include "layer_stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace paceline {

#if defined(__linux__)

namespace {

constexpr int64_t CHUNK = 4 << 20;
constexpr size_t RESIDENT = SIZE_MAX;  // the turn of a layer that stays

}  // namespace

LayerStream::LayerStream(const std::vector<std::string>& files,
                         std::vector<std::vector<Extent>> layers, int slots, int readers)
    : files_(files), layers_(std::move(layers)) {
    try {
        map_layers(slots);
        for (int i = 0; i < readers; ++i) {
            readers_.emplace_back([this] { read_on(); });
        }
    } catch (...) {
        give_back();
        throw;
    }
}

LayerStream::~LayerStream() { give_back(); }

void LayerStream::give_back() {
    {
        const std::lock_guard lock(mutex_);
        is_over_ = true;
    }
    room_.notify_all();
    for (std::thread& reader : readers_) {
        reader.join();
    }
    for (const Mapping& mapping : mappings_) {
        munmap(mapping.start, mapping.bytes);
    }
    if (memory_ >= 0) {
        close(memory_);
    }
}

void LayerStream::map_layers(int slots) {
    int64_t largest = 0;
    for (const std::vector<Extent>& extents : layers_) {
        int64_t size = 0;
        for (const Extent& each : extents) {
            size += page_ceiling(each.offset + each.bytes) - page_floor(each.offset);
        }
        largest = std::max(largest, size);
    }
    slots_.resize(static_cast<size_t>(slots));
    memory_ = memfd_create("paceline-layers", MFD_CLOEXEC);
    if (memory_ < 0 || ftruncate(memory_, largest * slots) != 0) {
        throw std::runtime_error(system_reason("no memory for", "streamed layers"));
    }
    for (const std::vector<Extent>& extents : layers_) {
        places_.emplace_back();
        turns_.push_back(extents.empty() ? RESIDENT : chunks_.size());
        if (extents.empty()) {
            continue;
        }
        const int64_t at = largest * static_cast<int64_t>(chunks_.size() % slots_.size());
        void* start = mmap(nullptr, largest, PROT_READ | PROT_WRITE, MAP_SHARED, memory_, at);
        if (start == MAP_FAILED) {
            throw std::runtime_error(system_reason("no memory for", "streamed layers"));
        }
        mappings_.push_back({start, static_cast<size_t>(largest)});
        chunks_.emplace_back();
        uint8_t* to = static_cast<uint8_t*>(start);
        for (const Extent& each : extents) {
            const int64_t first = page_floor(each.offset);
            const int64_t last = page_ceiling(each.offset + each.bytes);
            places_.back().push_back(to + (each.offset - first));
            for (int64_t from = first; from < last; from += CHUNK) {
                const int64_t bytes = std::min(CHUNK, last - from);
                chunks_.back().push_back({each.file, from, bytes, to + (from - first)});
            }
            to += last - first;
        }
    }
}

void LayerStream::begin(size_t layer) {
    const size_t turn = turns_[layer];
    if (turn == RESIDENT) {
        return;
    }
    std::unique_lock lock(mutex_);
    Slot& slot = slots_[turn % slots_.size()];
    const bool comes = slot.state == State::free ? next_turn_ == turn : slot.turn == turn;
    if (!comes) {
        start_at(lock, turn);
    }
    const auto is_there = [&] { return slot.state == State::ready && slot.turn == turn; };
    if (!is_there()) {
        const auto began = std::chrono::steady_clock::now();
        arrival_.wait(lock, is_there);
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
        seconds_waited_ += waited.count();
    }
    if (!slot.error.empty()) {
        const ReadError error(slot.error);
        start_at(lock, turn);  // whoever asks again may find the file mended
        throw error;
    }
}

void LayerStream::end(size_t layer) {
    const size_t turn = turns_[layer];
    if (turn == RESIDENT) {
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        slots_[turn % slots_.size()].state = State::free;
    }
    room_.notify_all();
}

void LayerStream::start_at(std::unique_lock<std::mutex>& lock, size_t turn) {
    for (Slot& slot : slots_) {
        if (next_chunk_ > 0 && slot.state == State::reading && slot.turn == next_turn_) {
            slot.left -= chunks_[next_turn_].size() - next_chunk_;  // not begun
            if (slot.left == 0) {
                slot.state = State::free;
            }
        }
    }
    next_turn_ = SIZE_MAX;  // nobody begins anything
    arrival_.wait(lock, [this] {
        return std::none_of(slots_.begin(), slots_.end(),
                            [](const Slot& slot) { return slot.state == State::reading; });
    });
    for (Slot& slot : slots_) {
        slot = {};
    }
    next_turn_ = turn;
    next_chunk_ = 0;
    room_.notify_all();
}

bool LayerStream::take(std::unique_lock<std::mutex>& lock, size_t* turn, Chunk* chunk) {
    for (;; room_.wait(lock)) {
        if (is_over_) {
            return false;
        }
        if (next_turn_ >= chunks_.size()) {
            continue;
        }
        Slot& slot = slots_[next_turn_ % slots_.size()];
        if (next_chunk_ == 0) {
            if (slot.state != State::free) {
                continue;
            }
            slot = {State::reading, next_turn_, chunks_[next_turn_].size(), ""};
        }
        *turn = next_turn_;
        *chunk = chunks_[next_turn_][next_chunk_++];
        if (next_chunk_ == chunks_[next_turn_].size()) {
            next_turn_ = (next_turn_ + 1) % chunks_.size();
            next_chunk_ = 0;
        }
        return true;
    }
}

void LayerStream::read_on() {
    std::unique_lock lock(mutex_);
    size_t turn = 0;
    Chunk chunk{};
    while (take(lock, &turn, &chunk)) {
        room_.notify_one();  // there may be more
        lock.unlock();
        std::string error = files_.read(chunk);
        lock.lock();
        bytes_read_ += error.empty() ? chunk.bytes : 0;
        Slot& slot = slots_[turn % slots_.size()];
        if (!error.empty()) {
            slot.error = std::move(error);
        }
        if (--slot.left == 0) {
            slot.state = State::ready;
            arrival_.notify_all();
        }
    }
}

#else

LayerStream::LayerStream(const std::vector<std::string>& files, std::vector<std::vector<Extent>>, int,
                         int)
    : files_(files) {}
LayerStream::~LayerStream() = default;
void LayerStream::begin(size_t) {}
void LayerStream::end(size_t) {}

#endif

int64_t LayerStream::bytes_read() const {
    const std::lock_guard lock(mutex_);
    return bytes_read_;
}

double LayerStream::seconds_waited() const {
    const std::lock_guard lock(mutex_);
    return seconds_waited_;
}

}  // namespace paceline
