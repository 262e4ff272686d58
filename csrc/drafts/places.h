// Where runs of tokens, known by their hashes, occurred last. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace paceline {

// Places from 1 up, by 64-bit keys that are well mixed. Probed in turn, and at most half full.
class PlaceTable {
  public:
    // The place of a key, 0 where it has none.
    uint32_t find(uint64_t key) const { return slots_[slot_of(key)].place; }

    // Begin to read what `find` reads first.
    void prefetch(uint64_t key) const {
        __builtin_prefetch(slots_.data() + first_slot_of(key));
    }

    // Gives a key a place; returns the one that it had, or 0.
    uint32_t exchange(uint64_t key, uint32_t place) {
        Slot& slot = slots_[slot_of(key)];
        slot.key = key;
        const uint32_t before = std::exchange(slot.place, place);
        if (!before && 2 * ++count_ > slots_.size()) {
            grow();
        }
        return before;
    }

  private:
    static constexpr size_t kLeastSlots = 256;

    struct Slot {
        uint64_t key = 0;
        uint32_t place = 0;
    };

    size_t first_slot_of(uint64_t key) const { return key & (slots_.size() - 1); }

    size_t slot_of(uint64_t key) const {
        size_t at = first_slot_of(key);
        while (slots_[at].place && slots_[at].key != key) {
            at = (at + 1) & (slots_.size() - 1);
        }
        return at;
    }

    void grow() {
        const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
        for (const Slot& each : old) {
            if (each.place) {
                slots_[slot_of(each.key)] = each;
            }
        }
    }

    std::vector<Slot> slots_ = std::vector<Slot>(kLeastSlots);
    size_t count_ = 0;
};

}  // namespace paceline
