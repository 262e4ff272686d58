// Low-rank additions to a decoder's linears, which each row of a batch has or has not (LoRA: Hu et
// al., 2021). Owns no memory: the linears behind it are Python's.
#pragma once

#include <vector>

#include "forward/buffers.h"
#include "forward/linear.h"

namespace paceline {

class Decoder;

// y += scale * up(down(x)), for some of a linear's outputs.
struct LowRank {
    int first;         // of these outputs
    const Linear* up;  // [outputs, rank], of codes or of floats
    float scale;
    int first_rank;    // among those of `down`
};

// What is added to one linear. `down` [ranks, inputs] reads what the linear's first part does. It has
// the ranks of all parts one after another, first of those whose `up` is of codes, each rounded up
// to a STRETCH, then of the others, each to TILE, by rows of zeros; null: nothing is added.
struct AddedLinear {
    const Linear* down = nullptr;
    int code_ranks = 0;  // of parts whose `up` is of codes
    std::vector<LowRank> parts;
    NextRead next{};  // all `up`, and the `down` of the next linear where it follows in memory
};

struct AddedLayer {
    AddedLinear qkv, o, gate_up, down;
};

// An adapter of one decoder, which it keeps alive.
struct Adapter {
    const Decoder* decoder;
    std::vector<AddedLayer> layers;
    int most_ranks;  // of any linear
    Kept keep_alive;
};

// Consecutive rows of a slice with the same adapter.
struct AdaptedRows {
    int first, count;
    const Adapter* adapter;
};

// What follows one another there: all rows with an adapter.
struct AdaptedGroup {
    const Adapter* adapter;
    int runs, runs_end;
};

// Tiles of one of an adapter's linears, for all rows that have it: so they are read once.
struct AddedPiece {
    const AddedLinear* added;
    const LowRank* part;  // null: `down`
    AdaptedGroup group;
    int tile, tiles_end;
};

// Sets each `next`.
void find_next(std::vector<AddedLayer>& layers);

struct Batch;

// What adapters add to the linears of a slice's rows. Owns which rows have which adapter.
class AddedLinears {
  public:
    // For rows first..end - 1 of the batch.
    void plan(const Batch& batch, int first, int end);
    // A linear of layer `layer` with what is added to it: beside it all `down`, then all `up`.
    void run(size_t layer, const Linear& weights, AddedLinear AddedLayer::*which, const Inputs& x,
             const LinearOut& out);

  private:
    void cut(size_t layer, AddedLinear AddedLayer::*which, bool ups);
    // What a piece of a linear fetches of adapters.
    NextRead share_of_next(size_t layer, AddedLinear AddedLayer::*which, int piece, int pieces) const;
    void run_down(const AddedPiece& piece, const Inputs& x) const;
    void run_up(const AddedPiece& piece, const LinearOut& out) const;

    std::vector<AdaptedRows> rows_;  // by adapters; empty where no row has one
    std::vector<AdaptedGroup> groups_;
    InputBuffer ranks_buffer_;
    Inputs ranks_{};  // of the slice's rows
    std::vector<AddedPiece> pieces_;
};

}  // namespace paceline
