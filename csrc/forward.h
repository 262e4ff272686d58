// The whole forward of a decoder over a batch: one call, one team of threads, no Python between.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "batch.h"
#include "buffers.h"
#include "linear.h"
#include "thread_pool.h"

namespace paceline {

// Numbers that all layers share; the fields of paceline's ModelConfig.
struct DecoderShape {
    int hidden, intermediate, vocab, max_len;
    int num_logits;  // rows of the head: vocab, or fewer in a draft whose head is pruned
    AttentionShape attention;  // its window is that of sliding layers
    float norm_eps, embedding_multiplier, residual_multiplier, logits_divisor, logits_softcap;
    Activation activation;
};

struct RotaryTable {
    const float *cos, *sin;  // [max_len, dim]
    int dim;
};

struct DecoderLayer {
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm;                          // null: none
    const float *post_attention_norm, *post_mlp_norm;      // null: none
    Linear qkv, o, gate_up, down;
    RotaryTable rotary;
    bool sliding;
};

// Where a forward leaves the residual streams that enter some layers, as they are before the layer's
// norm; the number of layers stands for what leaves the last one.
struct Taps {
    std::vector<int> layers;
    float* rows;  // [rows of the batch, layers.size(), hidden]
};

class Decoder {
  public:
    Decoder(DecoderShape shape, std::vector<DecoderLayer> layers, Linear embedding, Linear head,
            const float* final_norm, nanobind::object keep_alive);

    // Keys and values of all layers, one KvLayer after another.
    void set_cache(const KvLayer& first, int num_blocks, nanobind::object keep_alive);

    // Logits of the sampled rows, [samples, num_logits].
    void forward(const Batch& batch, const Taps& taps, float* logits);
    // Only the lowest id of each sampled row's maximum; -1 where a logit is not a finite number.
    void forward_greedy(const Batch& batch, const Taps& taps, int32_t* tokens);

    const DecoderShape& shape() const { return shape_; }
    size_t num_layers() const { return layers_.size(); }
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

    void run(const Batch& batch, const Taps& taps, float* logits, int32_t* tokens);
    std::vector<Slice> slices(const Batch& batch) const;
    void prepare(const Batch& batch, const Slice& slice);
    void plan_attention(const Batch& batch, const Slice& slice);
    void layers(const Batch& batch, const Slice& slice, const Taps& taps);
    void last_norm(const Batch& batch, const Slice& slice, bool is_ended);
    void attention(const Batch& batch, const Slice& slice, const DecoderLayer& layer,
                   const KvLayer& kv);
    void feed_forward(const DecoderLayer& layer, int rows);
    void linear(const Linear& weights, const Inputs& x, const LinearOut& out);
    // x[row] plus the branch's row, through its own norm where the family has one.
    void add_branch(int row, const float* norm);
    float* x_row(int row) const { return x_.get() + static_cast<size_t>(row) * ld_hidden_; }
    // What a row of x holds at the end of a layer is there: its branch is added, where it has a norm.
    void end_layer(const DecoderLayer& layer, int row);
    // A row of x, which is the batch's row `at`, to the taps of a layer.
    void tap(const Taps& taps, size_t layer, int row, int at) const;
    // The norm of a row of x as a row of inputs of `to`.
    void norm_for(const Linear& to, int row, const float* weight, int thread);
    void head(int samples, float* logits);
    void head_greedy(int samples, int32_t* tokens);
    KvLayer cache(size_t layer) const;
    // Of one thread: two rows of any width, the second one for `Linear::take` and `Linear::gather`.
    float* scratch(int thread) const {
        return scratch_.get() + static_cast<size_t>(thread) * scratch_stride_;
    }
    float* spare(int thread) const { return scratch(thread) + scratch_stride_ / 2; }

    const DecoderShape shape_;
    const std::vector<DecoderLayer> layers_;
    const Linear embedding_, head_;
    const float* const final_norm_;
    nanobind::object keep_alive_, keep_cache_;

    KvLayer first_cache_{};
    int num_blocks_ = 0;

    const int q_width_, qkv_width_;
    const int ld_hidden_, ld_qkv_, ld_q_, ld_gate_up_, ld_mlp_;  // row strides, in floats
    const int most_orders_;  // of one linear's inputs
    Buffer<float> x_, branch_, qkv_, q_, attended_, gate_up_, partials_, scratch_, sampled_;
    Buffer<float> head_chunk_;
    int scratch_stride_ = 0;
    InputBuffer inputs_;
    Inputs in_hidden_{}, in_attended_{}, in_mlp_{};  // views of one memory, used in turn
    std::vector<RowBlock> blocks_;
    std::vector<Pass> passes_;
    int chunks_ = 0;
    std::vector<float> best_values_;    // [threads, samples]
    std::vector<int32_t> best_tokens_;  // [threads, samples]
};

void bind_forward(nanobind::module_& module);

}  // namespace paceline
