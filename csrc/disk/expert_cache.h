// Experts that do not stay in memory: as many as fit are kept, and those that a layer asks for and
// that are not there are read from files, all at once, by many threads. Knows no arithmetic.
//
// An expert has an address for good, at which nothing can be read. While a `Use` hands it out, its
// bytes are so much further on.
//
// Layers ask in their order, again and again, so what was asked for last is needed last. Of those
// that nobody uses, that expert goes whose next use is the furthest away, by what is expected: the
// part of a round until its layer comes, and as many rounds as pass until rows choose it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "disk/readers.h"

namespace paceline {

class ExpertCache {
  public:
    // `experts`: of each layer its experts' extents; none of a layer that is no mixture. `bytes` are
    // shared out among the sizes of experts that there are. Throws ReadError where a file cannot be
    // opened, std::runtime_error where there is no memory, or not for one expert of each size.
    ExpertCache(const std::vector<std::string>& files,
                std::vector<std::vector<std::vector<Extent>>> experts, int64_t bytes, int readers);
    ExpertCache(const ExpertCache&) = delete;
    ExpertCache& operator=(const ExpertCache&) = delete;

    size_t num_layers() const { return experts_.size(); }
    // Where the extents of one of a layer's experts lie.
    const std::vector<Place>& places(size_t layer, size_t expert) const {
        return experts_[layer][expert].places;
    }
    // Of a layer; 0 where it has none here.
    size_t number(size_t layer) const {
        return layer < experts_.size() ? experts_[layer].size() : 0;
    }

  private:
    struct Piece {  // that one read brings
        int file;
        int64_t offset, bytes, at;  // whole pages, and where they lie in a slot
    };
    struct Expert {
        uint8_t* address = nullptr;
        std::vector<Place> places;
        std::vector<Piece> pieces;
        int slot = -1;
        float share = 0.0f;  // of rows that choose it, lately
        int64_t seen = 0;    // rows of its layer when that was
    };
    using State = ReadSlot::State;
    struct Slot : ReadSlot {
        uint8_t* memory = nullptr;
        int layer = -1, expert = -1;
        int users = 0;
    };
    struct Kind {  // experts of one size
        int64_t bytes, number;
        std::vector<Slot> slots;
    };

  public:
    struct Wish {
        int expert;
        int rows;  // that chose it
    };
    // The experts that a layer's rows chose. Nothing of what it handed out is overwritten while it
    // lives, but by a later call of `next`.
    class Use {
      public:
        // `rows`: of which each chose some.
        Use(ExpertCache& cache, size_t layer, const std::vector<Wish>& wishes, int rows);
        ~Use();
        Use(const Use&) = delete;
        Use& operator=(const Use&) = delete;

        // Waits for experts that were not handed out yet; which of the wishes they are. Empty when
        // all were. Throws ReadError.
        std::vector<int> next();
        // How much further on than at its address a wish that was handed out lies.
        ptrdiff_t shift(int wish) const;
        // Wishes that had to be read.
        int read() const { return read_; }

      private:
        enum class State { wanted, held, handed_out, done };
        // Who calls these holds the lock.
        Slot* slot(size_t wish) const;
        void start_more();
        std::vector<int> take_ready();

        ExpertCache& cache_;
        const size_t layer_;
        const std::vector<Wish> wishes_;
        std::vector<State> states_;  // [wishes]
        int read_ = 0;
    };

    int64_t bytes_read() const { return readers_.bytes_read(); }
    double seconds_waited() const { return readers_.seconds_waited(); }

  private:
    uint8_t* map(int64_t bytes, bool usable);
    int kind_of(int64_t bytes);
    void lay_out(const std::vector<std::vector<Extent>>& experts);
    void make_slots(int64_t bytes);
    // The rest is called by who holds the lock.
    std::optional<Readers::Task> take();
    void note(size_t layer, const std::vector<Wish>& wishes, int rows);
    float share_of(size_t layer, const Expert& expert) const;
    // Rounds until what is in a slot is expected to be used.
    float rounds_until_used(const Slot& slot) const;
    // Slots of a layer's experts that may be filled anew, `count` or fewer.
    std::vector<Slot*> victims(size_t layer, size_t count);
    void start(size_t layer, int expert, Slot& slot);
    void empty(Slot& slot);
    Slot* slot_of(size_t layer, int expert);

    std::vector<std::vector<Expert>> experts_;  // [layers][experts]
    std::vector<int> kind_;                     // [layers]; -1: no mixture
    std::vector<int64_t> rows_;                 // [layers], that have come by
    std::vector<Kind> kinds_;
    std::vector<Mapped> mappings_;
    size_t layer_ = 0;  // that asked last
    std::deque<Readers::Task> tasks_;
    Readers readers_;  // the last: they end before what they read into goes
};

}  // namespace paceline
