// Feed-forward layers: their weights, and what computes the dense ones for the rows of a slice.
#pragma once

#include "forward/buffers.h"
#include "forward/linear.h"

namespace paceline {

class LocalConvs;
class ResidualStreams;
class Workspace;
struct DecoderLayer;

// The two linears of a dense feed-forward layer, or of an expert: to twice its width, and back.
struct FeedForward {
    Linear gate_up, down;

    int width() const { return down.k(); }
    FeedForward moved(ptrdiff_t bytes) const { return {gate_up.moved(bytes), down.moved(bytes)}; }
};

class FeedForwards {
  public:
    FeedForwards(Workspace& shared, const ResidualStreams& streams, LocalConvs& convs)
        : shared_(shared), streams_(streams), convs_(convs) {}

    // That of a layer without a mixture, from the residual stream to the stream or the branch.
    void run(const DecoderLayer& layer);
    // Rows of `hidden` through a feed-forward, that of `layer` or of its mixture.
    void feed(const DecoderLayer& layer, const FeedForward& mlp, const LinearOut& out);

  private:
    Workspace& shared_;
    const ResidualStreams& streams_;
    LocalConvs& convs_;
    RowBuffer gate_up_;
};

}  // namespace paceline
