// Inputs that layers have beside the residual stream: weights, in the words of
// paceline/models/layer_sizes.py, and the inputs of a slice's rows.
#pragma once

#include "forward/buffers.h"
#include "forward/linear.h"

namespace paceline {

class ResidualStreams;
class Workspace;
struct DecoderLayer;
struct DecoderWeights;

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

class InputsOfLayers {
  public:
    InputsOfLayers(const DecoderWeights& weights, Workspace& shared, const ResidualStreams& streams)
        : weights_(weights), shared_(shared), streams_(streams) {}

    // Those of all layers, for the rows of the residual stream.
    void begin();
    // From the end of a layer's feed-forward to the branch of its input.
    void run(const DecoderLayer& layer);

  private:
    const DecoderWeights& weights_;
    Workspace& shared_;
    const ResidualStreams& streams_;
    RowBuffer inputs_, gates_;  // [rows, inputs of all layers], and of one layer
};

}  // namespace paceline
