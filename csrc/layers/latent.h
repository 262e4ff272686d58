// Attention whose keys and values are one latent per token (MLA): a layer's weights, in the words of
// paceline/models/weights.py, and what turns a slice's rows to latents and back.
#pragma once

#include <vector>

#include "forward/buffers.h"
#include "forward/linear.h"

namespace paceline {

class Workspace;

struct LatentAttention {
    int rank, q_rank;  // of latents and of compressed queries; 0: queries are not compressed
    int nope_dim, rope_dim, value_dim;  // of a head
    float norm_eps;
    const float *q_norm, *kv_norm;  // q_norm: null where queries are not compressed
    Linear q_b;                     // without parts there
    std::vector<Linear> k_b, v_b;   // by heads: queries to latents, and latents to results

    int heads() const { return int(k_b.size()); }
    int query_dim() const { return nope_dim + rope_dim; }
    int queries() const { return heads() * query_dim(); }
    int results() const { return heads() * value_dim; }
    // Of the layer's first linear come queries, then latents, then what is rotated of keys.
    int first_queries() const { return q_rank > 0 ? q_rank : queries(); }
    int first_width() const { return first_queries() + rank + rope_dim; }
    int key_dim() const { return rope_dim + rank; }
};

class LatentHeads {
  public:
    explicit LatentHeads(Workspace& shared) : shared_(shared) {}

    // A layer's first linear and what follows it, to queries and keys; there are no values.
    void read(const LatentAttention& a, const Linear& first, const Inputs& in, const RowBuffer& qkv);
    // From what rows attended to, to the inputs of the layer's last linear.
    Inputs results(const LatentAttention& a, const Linear& last, const RowBuffer& attended);

  private:
    // Heads of rows, each `step` behind the one before it, in rows `ld` apart.
    struct HeadRows {
        float* x;
        int ld, step;
    };
    // Each head through its linear.
    void by_head(const std::vector<Linear>& linears, const HeadRows& from, const HeadRows& to);

    Workspace& shared_;
    RowBuffer down_, queries_, results_;
    InputBuffer head_inputs_;
};

}  // namespace paceline
