// The weights of a decoder and the numbers that describe it. Owns no memory of rows.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "layers/altup.h"
#include "layers/feed_forward.h"
#include "layers/latent.h"
#include "layers/layer_inputs.h"
#include "layers/local_conv.h"
#include "forward/linear.h"
#include "layers/experts.h"
#include "layers/recurrent_layer.h"

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
    // From what a feed-forward's first linear gives to what its second one reads.
    void activate(const float* gate_up, int width, const float* learnt, float* y) const {
        if (gated) {
            kernels().gated(gate_up, width, activation, y);
        } else {
            kernels().activate(gate_up, width, activation, learnt, y);
        }
    }
};

struct RotaryTable {
    const float *cos, *sin;  // [max_len, dim]
    int dim;
    const float* q_scale;  // [max_len], of the queries; null: 1
};

struct DecoderLayer {
    size_t index;
    const float *input_norm, *q_norm, *k_norm;          // null: none
    const float *post_attention_norm, *post_mlp_norm;  // null: none
    const float* mlp_norm;  // null: none
    const float* learnt;    // what its activation has beyond its input; null: nothing
    const float* sinks;     // [heads]; null: none
    const float* v_norm;    // [head_dim]; null: none
    AttentionShape attention;
    // Unless it reads an earlier layer's keys and values, `qkv` has parts for keys and, unless
    // `values_are_keys`, for values.
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
    std::optional<LocalConv> attention_conv, mlp_conv;  // around them, within a block
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

struct DecoderWeights {
    DecoderShape shape;
    std::optional<Entry> entry;
    std::vector<DecoderLayer> layers;
    std::optional<LayerInputs> layer_inputs;
    std::optional<AltUp> altup;
    Linear embedding, head;
    const float* final_norm;  // null: none
    const float* places;      // [max_len, hidden], which are added to embeddings; null: none
    int widest, most_orders;  // of any linear: its inputs, and in how many orders it takes them
    Kept keep_alive;

    // Whether spans are blocks, which are not cut: some layer sees, or convolves, all of one.
    bool reads_blocks() const {
        return std::any_of(layers.begin(), layers.end(), [](const DecoderLayer& layer) {
            return layer.attention.ahead || layer.attention_conv;
        });
    }
    // Whether keys are values too.
    bool is_latent() const { return layers.front().latent.has_value(); }
    // The first recurrent layer; null where there is none. All are of one shape.
    const RecurrentLayer* recurrent() const {
        const auto first = std::find_if(layers.begin(), layers.end(), is_recurrent);
        return first == layers.end() ? nullptr : &*first->recurrent;
    }
    size_t num_recurrent() const {
        return size_t(std::count_if(layers.begin(), layers.end(), is_recurrent));
    }

  private:
    static bool is_recurrent(const DecoderLayer& layer) { return layer.recurrent.has_value(); }
};

}  // namespace paceline
