// Low-rank additions to a decoder's linears, which each row of a batch has or has not (LoRA: Hu et
// al., 2021). Owns no memory: the linears behind it are Python's.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "linear.h"

namespace paceline {

class Decoder;

// y += scale * up(down(x)), for some of a linear's outputs.
struct LowRank {
    int first;        // of these outputs
    const Linear* up;  // [outputs, rank]
    float scale;
};

// What is added to one linear. `down` [ranks, inputs] has the ranks of all parts one after another,
// each rounded up to TILE by rows of zeros; null: nothing is added.
struct AddedLinear {
    const Linear* down = nullptr;
    std::vector<LowRank> parts;
};

struct AddedLayer {
    AddedLinear qkv, o, gate_up, down;
};

// An adapter of one decoder, which it keeps alive.
struct Adapter {
    const Decoder* decoder;
    std::vector<AddedLayer> layers;
    int most_ranks;  // of any linear
    nanobind::object keep_alive;
};

// Consecutive rows of a slice with the same adapter.
struct AdaptedRows {
    int first, count;
    const Adapter* adapter;
};

// Some rows through a linear of floats.
struct Product {
    const Linear* weights;
    Inputs x;
    LinearOut out;
};

void bind_adapter(nanobind::module_& module);

}  // namespace paceline
