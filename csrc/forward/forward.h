// The whole forward of a decoder over a batch: one call, one team of threads, no Python between.
#pragma once

#include <algorithm>
#include <vector>

#include "disk/expert_cache.h"
#include "disk/layer_stream.h"
#include "layers/attention.h"
#include "forward/batch.h"
#include "forward/decoder_weights.h"
#include "layers/head.h"
#include "layers/mixtures.h"
#include "forward/workspace.h"

namespace paceline {

// Rows of hidden states that a forward takes in and hands out.
struct Streams {
    const float* inputs;    // [rows of the batch, hidden], for the entry; null where there is none
    std::vector<int> taps;  // paceline/models/backend.py says what they count
    float* features;        // [rows of the batch, taps.size(), hidden]

    bool has_tap(size_t tap) const {
        return std::find(taps.begin(), taps.end(), static_cast<int>(tap)) != taps.end();
    }
};

// Owns the weights, and the order in which the parts of a forward read and write the rows of a slice.
class Decoder {
  public:
    explicit Decoder(DecoderWeights weights);

    // What each layer reads keys and values from; it writes there where they are its own.
    void set_cache(std::vector<KvLayer> caches, int num_blocks, Kept keep_alive);
    // What recurrent layers keep, one layer after another from the first one on.
    void set_states(const LayerStates& first, Kept keep_alive);
    // What brings those layers, or those experts, whose weights do not stay in memory.
    void set_stream(LayerStream* stream, Kept keep_alive);
    void set_experts(ExpertCache* cache, Kept keep_alive);

    // Logits of the sampled rows, [samples, num_logits].
    void forward(const Batch& batch, const Streams& streams, float* logits);
    // Only the lowest id of each sampled row's maximum; -1 where a logit is not a finite number.
    void forward_greedy(const Batch& batch, const Streams& streams, int32_t* tokens);
    // Writes the keys and values of rows [rows of the batch, hidden] that every layer reads unchanged.
    void write_kv(const Batch& batch, const float* inputs);

    // Raises std::invalid_argument where spans' states are not those of recurrent layers.
    void check_states(const Batch& batch) const { recurrences_.check(batch); }
    const DecoderWeights& weights() const { return weights_; }
    const ExpertCounts& experts() const { return mixtures_.counts(); }  // of the latest forward
    int num_blocks() const { return num_blocks_; }

  private:
    void run_slices(const Batch& batch, const Streams& streams);
    void run_layers(const Streams& streams);
    // Fills the rows of x that enter the first layer; what its queries, keys and values read.
    const Inputs& enter(const Streams& streams);
    // What the embedding of a row's token is.
    void embed(int row, int thread) const;
    // A row of x, which is a token's embedding, and a row of hidden states as a row of `joined`.
    void join(int row, const float* input, int thread) const;
    // A layer's recurrence, attention, or both beside each other, which read the same rows.
    void mix(const DecoderLayer& layer, const Inputs& in);
    // What a row of x holds at the end of a layer is there: its last branch is added, where it has a
    // norm, and all is scaled.
    void end_layer(const DecoderLayer& layer, int row) const;
    void leave(const Streams& streams);
    // What tap `tap` is of a row, to the features that asked for it.
    void hand_out(const Streams& streams, size_t tap, int row, const float* x) const;

    const DecoderWeights weights_;
    std::vector<KvLayer> caches_;
    int num_blocks_ = 0;
    LayerStream* stream_ = nullptr;
    Kept keep_cache_, keep_states_, keep_stream_;

    Workspace shared_;
    ResidualStreams residual_streams_;
    Attention attention_;
    Recurrences recurrences_;
    LocalConvs local_convs_;
    FeedForwards feed_forwards_;
    Mixtures mixtures_;
    InputsOfLayers inputs_of_layers_;
    Head head_;
};

}  // namespace paceline
