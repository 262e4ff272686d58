// Several residual streams (AltUp): weights, in the words of paceline/models/weights.py, and the streams
// of a slice's rows, of which layers read and change one.
#pragma once

#include <vector>

#include "forward/buffers.h"
#include "forward/linear.h"

namespace paceline {

class Workspace;
struct DecoderLayer;
struct DecoderWeights;

struct AltUp {
    int streams, active;  // their number, and the one that layers read
    std::vector<Linear> spread, gather;  // of each stream but the first
};

struct AltUpLayer {
    const float *router_norm, *router;  // [hidden], [streams, hidden]
    const float *predict, *correct;     // [streams * streams, streams], [streams, streams]
    const float* scale;                 // [hidden]; null: 1
    Linear left, right;
    const float* norm;  // [hidden]
};

class ResidualStreams {
  public:
    ResidualStreams(const DecoderWeights& weights, Workspace& shared)
        : weights_(weights), shared_(shared) {}

    // From rows of x to their streams, and back.
    void spread();
    void gather();
    // From the streams to what a layer reads: x, what is added beside its attention (LAuReL), and
    // the inputs of its `qkv`.
    void predict(const DecoderLayer& layer);
    void add_laurel(int row) const;
    // What a layer made of a row of x, to all of its streams; x is what its gate reads.
    void correct(const DecoderLayer& layer, int row, float* spare) const;
    // The branch of the layer's input, to the streams; x is the active one.
    void end(const DecoderLayer& layer, int row) const;

  private:
    // What a row says of its streams: scores[streams].
    void score(const AltUpLayer& w, const float* x, float* scores, float* spare) const;
    // Rows through a linear to the branch; `from` gives a row.
    template <typename From> void project(const Linear& linear, const From& from);
    const AltUp& altup() const;
    float* stream(int row, int index) const { return streams_.row(row * altup().streams + index); }

    const DecoderWeights& weights_;
    Workspace& shared_;
    RowBuffer streams_, laurel_, ranks_;  // [rows, streams, hidden], and of rows
};

// Lowers gates by so many standard deviations above their mean, and sets to 0 what is below that.
void cut_gates(float* gates, int width, float deviations);

}  // namespace paceline
