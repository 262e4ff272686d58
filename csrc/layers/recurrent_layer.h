// Recurrent layers: their weights, in the words of paceline/models/layer_sizes.py, and what computes them
// for the rows of a slice.
#pragma once

#include "forward/buffers.h"
#include "forward/linear.h"
#include "layers/recurrent_step.h"
#include "kernels/recurrent.h"

namespace paceline {

class Workspace;
struct Batch;
struct DecoderLayer;

enum class RecurrentKind : int { delta, mamba2, short_conv };

struct RecurrentLayer {
    RecurrentKind kind;
    RecurrentShape shape;  // of a short convolution one head of its width, without keys
    Convolution conv;
    RecurrentNumbers numbers;
    const float* skip;  // [heads] or null
    const float* in_scale;  // [parts().width], factors of what comes out of `first`; null: none
    float out_scale;        // of what comes out of `last`
    const float* norm;  // null where `gating` is none
    GatedNorm gating;
    int norm_groups;
    float norm_eps;
    Linear first, last;
    size_t index;  // among the recurrent layers

    // Columns of what comes out of the first linear.
    struct Parts {
        int mixed;        // what is convolved
        int gate;         // of what comes out
        int rate, decay;  // raw numbers of heads
        int before;       // of a short convolution: a gate of what is convolved
        int width;        // of all
    };
    Parts parts() const {
        const int inner = shape.inner(), channels = conv.channels, heads = shape.heads;
        switch (kind) {
            case RecurrentKind::delta: {
                const int rate = channels + inner;
                return {0, channels, rate, rate + heads, 0, rate + 2 * heads};
            }
            case RecurrentKind::mamba2: {
                const int decay = inner + channels;
                return {inner, 0, 0, decay, 0, decay + heads};
            }
            default: return {2 * inner, inner, 0, 0, 0, 3 * inner};
        }
    }
};

class Recurrences {
  public:
    // `first`: the first recurrent layer; null where there is none.
    Recurrences(const RecurrentLayer* first, Workspace& shared) : first_(first), shared_(shared) {}

    // What layers keep, one layer after another from the first one on.
    void set_states(const LayerStates& first) { states_ = first; }
    // Raises std::invalid_argument where spans' states are not those of recurrent layers.
    void check(const Batch& batch) const;

    // Before a slice's first layer: its walks, which all layers share.
    void begin();
    // A layer's first linear, and what comes after it up to the residual stream or the branch.
    void read(const RecurrentLayer& layer, const Inputs& in);
    void run(const DecoderLayer& layer);

  private:
    // The convolution and the recurrence: what comes out.
    const RowBuffer& walk(const RecurrentLayer& layer);

    const RecurrentLayer* first_;
    Workspace& shared_;
    LayerStates states_{};  // of the first recurrent layer
    RowBuffer read_, mixed_, recurred_;
    RecurrentStep step_;
    std::vector<int32_t> parents_;  // of a span
};

}  // namespace paceline
