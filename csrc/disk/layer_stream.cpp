#include "disk/layer_stream.h"

#include <algorithm>

namespace paceline {

namespace {

constexpr int64_t PIECE_BYTES = 4 << 20;
constexpr size_t RESIDENT = SIZE_MAX;  // the turn of a layer that stays

}  // namespace

LayerStream::LayerStream(const std::vector<std::string>& files,
                         const std::vector<std::vector<Extent>>& layers, int slots, int readers)
    : slots_(static_cast<size_t>(slots)), readers_(files) {
    lay_out(layers);
    readers_.start(readers, [this] { return take(); });
}

void LayerStream::lay_out(const std::vector<std::vector<Extent>>& layers) {
    int64_t largest = 0;
    for (const std::vector<Extent>& extents : layers) {
        int64_t size = 0;
        for (const Extent& each : extents) {
            size += page_ceiling(each.offset + each.bytes) - page_floor(each.offset);
        }
        largest = std::max(largest, size);
    }
    memory_ = map_memory(static_cast<size_t>(largest) * slots_.size(), true, "streamed layers");
    for (const std::vector<Extent>& extents : layers) {
        places_.emplace_back();
        turns_.push_back(extents.empty() ? RESIDENT : chunks_.size());
        if (extents.empty()) {
            continue;
        }
        uint8_t* to = memory_.get() + largest * static_cast<int64_t>(chunks_.size() % slots_.size());
        chunks_.emplace_back();
        for (const Extent& each : extents) {
            const int64_t first = page_floor(each.offset);
            const int64_t last = page_ceiling(each.offset + each.bytes);
            places_.back().push_back({to + (each.offset - first), static_cast<size_t>(each.bytes)});
            for (int64_t from = first; from < last; from += PIECE_BYTES) {
                const int64_t bytes = std::min(PIECE_BYTES, last - from);
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
    Readers::Lock lock = readers_.lock();
    Slot& slot = slots_[turn % slots_.size()];
    const bool comes = slot.state == State::free ? next_turn_ == turn : slot.turn == turn;
    if (!comes) {
        start_at(lock, turn);
    }
    readers_.wait(lock, [&] { return slot.state == State::ready && slot.turn == turn; });
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
        const Readers::Lock lock = readers_.lock();
        slots_[turn % slots_.size()].state = State::free;
    }
    readers_.wake();
}

void LayerStream::start_at(Readers::Lock& lock, size_t turn) {
    for (Slot& slot : slots_) {
        if (next_chunk_ > 0 && slot.state == State::reading && slot.turn == next_turn_) {
            slot.left -= chunks_[next_turn_].size() - next_chunk_;  // not begun
            if (slot.left == 0) {
                slot.state = State::free;
            }
        }
    }
    next_turn_ = SIZE_MAX;  // nobody begins anything
    readers_.wait(lock, [this] {
        return std::none_of(slots_.begin(), slots_.end(),
                            [](const Slot& slot) { return slot.state == State::reading; });
    });
    for (Slot& slot : slots_) {
        slot = {};
    }
    next_turn_ = turn;
    next_chunk_ = 0;
    readers_.wake();
}

std::optional<Readers::Task> LayerStream::take() {
    if (next_turn_ >= chunks_.size()) {
        return {};
    }
    Slot& slot = slots_[next_turn_ % slots_.size()];
    if (next_chunk_ == 0) {
        if (slot.state != State::free) {
            return {};
        }
        slot = {};
        slot.state = State::reading;
        slot.turn = next_turn_;
        slot.left = chunks_[next_turn_].size();
    }
    const Readers::Task task{&slot, chunks_[next_turn_][next_chunk_++]};
    if (next_chunk_ == chunks_[next_turn_].size()) {
        next_turn_ = (next_turn_ + 1) % chunks_.size();
        next_chunk_ = 0;
    }
    return task;
}

}  // namespace paceline
