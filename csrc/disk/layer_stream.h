// Weights of layers that do not stay in memory: read from files ahead of the forward that needs them.
//
// Layers go round: after the last one comes the first. Each has its addresses for good, so that
// whatever points to its weights goes on to; it shares them with the layers that come into the same
// slot of memory, layer i into slot i % slots. Threads of its own read a layer as soon as the layer
// that had the slot before is done with. Knows no weights and no arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "disk/readers.h"

namespace paceline {

class LayerStream {
  public:
    // `layers`: of each layer its extents; none where it stays in memory. Throws ReadError where a
    // file cannot be opened, std::runtime_error where there is no memory for the slots.
    LayerStream(const std::vector<std::string>& files,
                const std::vector<std::vector<Extent>>& layers, int slots, int readers);
    LayerStream(const LayerStream&) = delete;
    LayerStream& operator=(const LayerStream&) = delete;

    // Of each layer, where its extents lie while the layer is there; their bytes begin as in the
    // file, relative to pages.
    const std::vector<std::vector<Place>>& places() const { return places_; }

    // Waits until a layer is there. It stays until `end`. Layers come in their order, or else what
    // was read ahead is dropped. Throws ReadError; the same layer may be asked for again.
    void begin(size_t layer);
    void end(size_t layer);

    int64_t bytes_read() const { return readers_.bytes_read(); }
    double seconds_waited() const { return readers_.seconds_waited(); }

  private:
    using State = ReadSlot::State;
    struct Slot : ReadSlot {
        size_t turn = 0;  // of the layer that is in it or comes into it
    };

    void lay_out(const std::vector<std::vector<Extent>>& layers);
    // Who calls these holds the lock. The next chunk to read, if its slot is free.
    std::optional<Readers::Task> take();
    void start_at(Readers::Lock& lock, size_t turn);

    std::vector<std::vector<Place>> places_;  // [layers][extents]
    std::vector<size_t> turns_;               // [layers]: place among those that are streamed
    std::vector<std::vector<Chunk>> chunks_;  // [turns]
    Mapped memory_;  // of all slots
    std::vector<Slot> slots_;
    size_t next_turn_ = 0, next_chunk_ = 0;
    Readers readers_;  // the last: they end before what they read into goes
};

}  // namespace paceline
