// The whole forward of a decoder over a batch: one call, one team of threads, no Python between.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "forward/adapter.h"
#include "forward/altup.h"
#include "forward/batch.h"
#include "forward/buffers.h"
#include "disk/expert_cache.h"
#include "forward/experts.h"
#include "forward/latent.h"
#include "forward/layer_inputs.h"
#include "disk/layer_stream.h"
#include "forward/linear.h"
#include "forward/recurrent_layer.h"
#include "threads/thread_pool.h"

namespace paceline {

// Numbers that all layers share; the fields of paceline's ModelConfig.
struct DecoderShape {
    int hidden, vocab, max_len;
    int num_logits;  // rows of the head: vocab, or fewer in a draft whose head is pruned
    float norm_eps, embedding_multiplier, residual_multiplier, logits_divisor, logits_softcap;
    Activation activation;
    bool layer_norm;  // norms are layer_norm, their vectors [2, hidden]: weights, then biases
    bool gated;       // feed-forwards have a gate
    float gate_multiplier, mlp_out_scale;  // of dense ones: of what their activation reads, and adds
    float attention_out_scale;             // of attention beside a recurrence
    bool attention_gate;  // the last of what a layer's first linear gives weighs its heads
    bool parallel;    // a feed-forward reads what its layer's attention reads
    bool heads_normed_last;  // queries and keys, after the rotation

    int norm_size() const { return layer_norm ? 2 * hidden : hidden; }
};

struct RotaryTable {
    const float *cos, *sin;  // [max_len, dim]
    int dim;
    const float* q_scale;  // [max_len], of the queries; null: 1
};

struct DecoderLayer {
    const float *input_norm, *q_norm, *k_norm;          // null: none
    const float *post_attention_norm, *post_mlp_norm;  // null: none
    const float* mlp_norm;  // null: none
    const float* learnt;    // what its activation has beyond its input; null: nothing
    const float* sinks;     // [heads]; null: none
    const float* v_norm;    // [head_dim]; null: none
    AttentionShape attention;
    // Which layer's keys and values it reads: itself or an earlier one. Of its own, `qkv` has those
    // for keys and, unless `values_are_keys`, for values.
    int kv_layer;
    bool owns_kv, values_are_keys;
    bool norms_whole;  // q_norm and k_norm are over all heads together, and not over each
    Linear qkv, o;                   // without parts where there is no attention
    FeedForward mlp;                 // without parts where there is a mixture
    std::optional<Mixture> mixture;  // instead of it
    std::optional<LatentAttention> latent;  // between qkv and o
    std::optional<RecurrentLayer> recurrent;  // instead of attention
    RotaryTable rotary;
    std::optional<LayerGate> gate;  // of its input beside the residual stream
    float scale;                    // of the residual stream that leaves it
    std::optional<AltUpLayer> altup;  // where there are several streams
    // Gates that are not so many standard deviations above their row's mean are 0, and the others
    // lowered by as much; -inf: they stay.
    float sparse_deviations;

    bool has_attention() const { return o.num_parts > 0; }
    bool has_mlp() const { return mixture || mlp.down.num_parts > 0; }
    // What reads the rows behind its first norm; without parts where it is a feed-forward alone.
    const Linear& first() const { return recurrent ? recurrent->first : qkv; }
    int q_width() const { return attention.heads * attention.head_dim; }
    int kv_width() const { return attention.kv_heads * attention.head_dim; }
    // The norm of the last branch that is added to the residual stream; null: it has been added.
    const float* last_norm() const { return gate ? gate->norm : post_mlp_norm; }
};

// How rows of hidden states join the embeddings of a head's tokens: see paceline/models/decoder_reader.py.
struct Entry {
    const float *token_norm, *input_norm;  // null: none
    Linear join;                           // without parts: the first layer reads the joined rows
    bool norm_before_residual;
    bool is_residual;  // the inputs are the residual stream, and nothing is read of the tokens

    bool is_fused() const { return join.num_parts > 0; }
    bool is_read_joined() const { return !is_fused() && !is_residual; }
};

// Rows of hidden states that a forward takes in and hands out.
struct Streams {
    const float* inputs;    // [rows of the batch, hidden], for the entry; null where there is none
    std::vector<int> taps;  // paceline/models/backend.py says what they count
    float* features;        // [rows of the batch, taps.size(), hidden]

    bool has_tap(size_t tap) const {
        return std::find(taps.begin(), taps.end(), static_cast<int>(tap)) != taps.end();
    }
};

class Decoder {
  public:
    // `final_norm` may be null, and so may `places` [max_len, hidden], which are added to embeddings.
    Decoder(DecoderShape shape, std::optional<Entry> entry, std::vector<DecoderLayer> layers,
            std::optional<LayerInputs> layer_inputs, std::optional<AltUp> altup,
            Linear embedding, Linear head, const float* final_norm, const float* places,
            Kept keep_alive);

    // What each layer reads keys and values from; it writes there where they are its own.
    void set_cache(std::vector<KvLayer> caches, int num_blocks, Kept keep_alive);

    // What brings those layers whose weights do not stay in memory.
    void set_stream(LayerStream* stream, Kept keep_alive);
    // What brings experts that do not.
    void set_cache_of_experts(ExpertCache* cache, Kept keep_alive);

    // What recurrent layers keep, one layer after another from the first one on.
    void set_states(const LayerStates& first, Kept keep_alive);
    // Raises std::invalid_argument where spans' states are not those of recurrent layers.
    void check_states(const Batch& batch) const;

    // Logits of the sampled rows, [samples, num_logits].
    void forward(const Batch& batch, const Streams& streams, float* logits);
    // Only the lowest id of each sampled row's maximum; -1 where a logit is not a finite number.
    void forward_greedy(const Batch& batch, const Streams& streams, int32_t* tokens);
    // Writes the keys and values of rows [rows of the batch, hidden] that every layer reads unchanged.
    void write_kv(const Batch& batch, const float* inputs);

    const DecoderShape& shape() const { return shape_; }
    // Pairs of a layer and an expert that the latest forward read.
    int experts_read() const { return experts_read_; }
    // Experts that it had to read from disk.
    int experts_fetched() const { return experts_fetched_; }
    // [layers][rows, per_token], of the latest forward; empty where a layer is no mixture.
    const std::vector<std::vector<int>>& chosen_experts() const { return chosen_; }
    bool has_entry() const { return entry_.has_value(); }
    // Whether spans are blocks, of which some layer sees all.
    bool reads_blocks() const {
        return std::any_of(layers_.begin(), layers_.end(),
                           [](const DecoderLayer& layer) { return layer.attention.ahead; });
    }
    // Whether keys are values too.
    bool is_latent() const { return layers_.front().latent.has_value(); }
    size_t num_layers() const { return layers_.size(); }
    const std::vector<DecoderLayer>& all_layers() const { return layers_; }
    // The first recurrent layer; null where there is none. All are of one shape.
    const RecurrentLayer* recurrent() const { return recurrent_; }
    size_t num_recurrent() const { return num_recurrent_; }
    int num_blocks() const { return num_blocks_; }

  private:
    // Rows whose attention is computed together: its partial results fit the buffer.
    struct Pass {
        int first_block, end_block, first_row, end_row;
    };
    // A slice of the batch that goes through all layers before the next one does.
    struct Slice {
        int first, end;            // rows
        int samples, samples_end;  // entries of the batch's sample_rows
    };

    void run(const Batch& batch, const Streams& streams, float* logits, int32_t* tokens);
    std::vector<Slice> slices(const Batch& batch) const;
    // Where a slice from `first` on ends: no block is cut, and no tree that recurrent layers walk.
    int slice_end(const Batch& batch, int first) const;
    void prepare(const Batch& batch, const Slice& slice);
    // Unless it is planned for layers of this shape already.
    void plan_attention(const Batch& batch, const Slice& slice, const AttentionShape& a);
    void cut_rows(const Batch& batch, const Slice& slice, int most);
    void layers(const Batch& batch, const Slice& slice, const Streams& streams);
    // Fills the rows of x that enter the first layer; what its queries, keys and values read.
    const Inputs& enter(const Batch& batch, const Slice& slice, const Streams& streams);
    // A row of x, which is a token's embedding, and a row of hidden states as a row of `in_joined_`.
    void join(int row, const float* input, int thread);
    void leave(const Batch& batch, const Slice& slice, const Streams& streams);
    void attention(const Batch& batch, const Slice& slice, const DecoderLayer& layer,
                   const KvLayer& kv, const Inputs& in);
    // A layer's recurrence, attention, or both beside each other, which read the same rows.
    void mix(const Batch& batch, const Slice& slice, size_t index, const Inputs& in);
    // recurrent_layer.cpp: the walks of a slice, which all recurrent layers share; one layer's
    // first linear, to `first_`; and what comes after it.
    void plan_recurrences(const Batch& batch, const Slice& slice);
    void read_recurrent(const RecurrentLayer& layer, int rows, const Inputs& in);
    void recurrence(const DecoderLayer& layer, int rows);
    // The last linear of a layer's attention or recurrence, times `scale`: into the stream or, of
    // layers that have one, into the branch, to which a recurrence may have been written before.
    void mix_in(const DecoderLayer& layer, const Linear& last, const Inputs& in, float scale,
                bool is_second = false);
    // layer_inputs.cpp: the inputs of all layers for the rows of x, to `told_`.
    void layer_inputs(const Batch& batch, const Slice& slice);
    // From the end of a layer's feed-forward to the branch of its input.
    void take_layer_input(const DecoderLayer& layer, size_t index, int rows);
    // altup.cpp: from rows of x to their streams, and back.
    void spread_streams(int rows);
    void gather_streams(int rows);
    // From the streams of rows to what a layer reads: x, `laurel_` and the inputs of its `qkv`.
    void predict_streams(const DecoderLayer& layer, int rows);
    void add_laurel(int row);
    // What a layer made of a row of x, to all of its streams; x is what its gate reads.
    void correct_streams(const DecoderLayer& layer, int row, float* spare);
    // The branch of the layer's input, to the streams; x is the active one.
    void end_streams(const DecoderLayer& layer, int row);
    void stream_scores(const AltUpLayer& w, const float* x, float* scores, float* spare) const;
    float* stream(int row, int index) const {
        return streams_.get() + (size_t(row) * altup_->streams + index) * ld_hidden_;
    }
    // latent.cpp: from the inputs of a layer's first linear to `qkv_`, which has no values.
    void latent_heads(const LatentAttention& a, const Linear& first_linear, int rows,
                      const Inputs& in);
    // From `attended_` to the inputs of the layer's last linear.
    Inputs latent_results(const LatentAttention& a, const Linear& last, int rows);
    // Heads of rows, each `step` behind the one before it, in rows `ld` apart.
    struct HeadRows {
        const float* x;
        int ld, step;
    };
    // Each head through its linear, to y likewise.
    void by_head(const std::vector<Linear>& linears, int rows, const HeadRows& from, float* y, int ld,
                 int step);
    void feed_forward(const DecoderLayer& layer, int rows);
    // Rows of `in_hidden_` through a feed-forward, that of `layer` or of its mixture.
    void feed(const DecoderLayer& layer, const FeedForward& mlp, int rows, const LinearOut& out);
    // experts.cpp: the feed-forward of a layer that is a mixture.
    void mixture(const DecoderLayer& layer, int rows);
    // The results of all entries of the assignment, which are those of `rows`, to `expert_out_`; and
    // of some experts' entries.
    void experts(const Mixture& mixture, size_t index, int rows);
    void run_experts(const Mixture& mixture, const std::vector<ReadyExpert>& ready);
    // Counts those of the assignment that no slice before has read in this layer.
    void count_experts(const DecoderLayer& layer, int entries);
    // One linear of each of these experts, its tiles shared out among all threads.
    void grouped(const std::vector<ReadyExpert>& ready, Linear FeedForward::*which,
                 const std::vector<Inputs>& inputs, float* y, int ld);
    // Keys and values of rows first..end - 1 from `qkv_`, which begins with row `first`, to the cache,
    // and their queries to `q_`.
    void turn_heads(const Batch& batch, int first, int end, const DecoderLayer& layer,
                    const KvLayer& kv);
    size_t index_of(const DecoderLayer& layer) const { return size_t(&layer - layers_.data()); }
    // The queries and keys of rows of `qkv_` after norms over all heads.
    void norm_heads(const DecoderLayer& layer, int rows);
    // x[row] plus the branch's row, through its own norm where there is one.
    void add_branch(int row, const float* norm);
    // A layer's attention or recurrence is a branch that is added later, and not at once.
    bool branches(const DecoderLayer& layer) const {
        return shape_.parallel || layer.post_attention_norm;
    }
    void norm(const float* x, const float* weight, float* y) const;
    float* x_row(int row) const { return x_.get() + static_cast<size_t>(row) * ld_hidden_; }
    // What a row of x holds at the end of a layer is there: its last branch is added, where it has a
    // norm, and all is scaled.
    void end_layer(const DecoderLayer& layer, int row);
    // What tap `tap` is of the batch's row `at`, to the features that asked for it.
    void hand_out(const Streams& streams, size_t tap, int at, const float* x) const;
    // The norm of x, padded with zeros; x itself where there is no norm.
    void normed(const float* x, const float* weight, float* y) const;
    // The norm of a row of x as a row of inputs of `to`.
    void norm_for(const Linear& to, int row, const float* weight, int thread);
    void head(int samples, float* logits);
    void head_greedy(int samples, int32_t* tokens);
    // Of one thread: two rows of any width, the second one for `Linear::take` and `Linear::gather`.
    float* scratch(int thread) const {
        return scratch_.get() + static_cast<size_t>(thread) * scratch_stride_;
    }
    float* spare(int thread) const { return scratch(thread) + scratch_stride_ / 2; }

    const DecoderShape shape_;
    const std::optional<Entry> entry_;
    const std::vector<DecoderLayer> layers_;
    const std::optional<LayerInputs> layer_inputs_;
    const std::optional<AltUp> altup_;
    const Linear embedding_, head_;
    const float *const final_norm_, *const places_;
    Kept keep_alive_, keep_cache_, keep_states_;

    LayerStream* stream_ = nullptr;
    ExpertCache* cache_ = nullptr;
    Kept keep_stream_;
    std::vector<KvLayer> caches_;
    int num_blocks_ = 0;
    size_t num_recurrent_ = 0;
    const RecurrentLayer* recurrent_ = nullptr;
    LayerStates states_{};  // of the first recurrent layer

    const int q_width_, qkv_width_;  // of the widest layers
    const int widest_mlp_;  // of dense layers, experts and shared ones
    const int ld_hidden_, ld_qkv_, ld_q_, ld_gate_up_, ld_mlp_;  // row strides, in floats
    const int most_orders_;  // of one linear's inputs
    Buffer<float> x_, branch_, qkv_, q_, attended_, gate_up_, partials_, scratch_, sampled_;
    Buffer<float> head_chunk_;
    int scratch_stride_ = 0;
    InputBuffer inputs_, expert_inputs_;
    Buffer<float> normed_, routed_, expert_gate_up_, expert_out_, shared_;  // of mixtures
    InputBuffer head_inputs_;
    Buffer<float> down_, queries_, results_;  // of latent attention
    Buffer<float> first_, mixed_, recurred_;  // of recurrent layers
    RecurrentStep step_;
    std::vector<int32_t> span_parents_;
    Buffer<float> told_, gates_;  // [rows, inputs of all layers], and of one layer
    Buffer<float> streams_, laurel_, ranks_;  // [rows, streams, hidden], beside attention
    Assignment assignment_;
    std::vector<std::vector<bool>> is_read_;  // [layers][experts], of the latest forward
    std::vector<std::vector<int>> chosen_;
    int experts_read_ = 0, experts_fetched_ = 0;
    // Views of one memory, used in turn.
    Inputs in_joined_{}, in_hidden_{};
    std::vector<RowBlock> blocks_;
    std::vector<Pass> passes_;
    int chunks_ = 0;
    AddedLinears added_;
    const AttentionShape* planned_ = nullptr;  // what blocks and passes are for; null: nothing yet
    std::vector<float> best_values_;    // [threads, samples]
    std::vector<int32_t> best_tokens_;  // [threads, samples]
};

}  // namespace paceline
