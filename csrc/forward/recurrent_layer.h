// A recurrent layer's weights, in the words of paceline/models/layer_sizes.py. Owns no memory of rows.
#pragma once

#include "forward/linear.h"
#include "kernels/recurrent.h"

namespace paceline {

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

}  // namespace paceline
