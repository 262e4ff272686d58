// Inputs that layers have beside the residual stream: weights, in the words of
// paceline/models/layer_sizes.py. Owns no memory of rows.
#pragma once

#include "forward/linear.h"

namespace paceline {

struct LayerInputs {
    Linear embedding, projection;  // of all layers' inputs, one layer after another
    const float* norm;             // [width]
    int width;                     // of one layer's input
    float multiplier;              // of the embedding

    int total() const { return projection.n(); }
    int layers() const { return total() / width; }
    // Of tokens that the embedding has not, the first row is read.
    int row_of(int token) const { return token < embedding.n() ? token : 0; }
};

struct LayerGate {
    Linear gate, projection;
    const float* norm;
};

}  // namespace paceline
