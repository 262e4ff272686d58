// Attention of a slice's rows: their queries, keys and values, and how they are cut into pieces of work.
// Knows neither the norm before it nor what else reads its inputs.
#pragma once

#include <vector>

#include "layers/latent.h"
#include "forward/workspace.h"

namespace paceline {

class Attention {
  public:
    Attention(const DecoderWeights& weights, Workspace& shared);

    // Before a slice's first layer.
    void begin();
    // The layer's first linear, of its inputs.
    void read(const DecoderLayer& layer, const Inputs& in);
    // After it: from queries, keys and values to the residual stream or the branch, to which a
    // recurrence may have been added before.
    void run(const DecoderLayer& layer, const KvLayer& kv);
    // Keys and values of `hidden` alone, to the cache.
    void write(const DecoderLayer& layer, const KvLayer& kv);

  private:
    // Consecutive rows of one span, which are treated together.
    struct Block {
        int first, count, span;
    };
    // Blocks whose attention is computed together: its partial results fit the buffer.
    struct Pass {
        int first_block, end_block, first_row, end_row;
    };

    // Unless it is planned for layers of this shape already.
    void plan(const AttentionShape& shape);
    void cut_rows(int most);
    // Whether threads would, for more than a tenth of the time.
    bool idles(int keys, int kv_heads) const;
    void cut_passes(int rows_per_pass);
    // Keys and values to the cache, where they are the layer's own, and queries to `queries_`.
    void turn_heads(const DecoderLayer& layer, const KvLayer& kv);
    // Queries and keys after norms over all heads.
    void norm_heads(const DecoderLayer& layer);
    void attend(const Pass& pass, const AttentionShape& shape, const KvLayer& kv);
    // The results of a pass as rows of what the last linear reads.
    void finish(const Pass& pass, const DecoderLayer& layer, const Inputs& in);
    float* partial(const Pass& pass, int row, int head, int chunk) const {
        const size_t index = size_t(row - pass.first_row) * planned_->heads + head;
        return partials_.get() + (index * chunks_ + chunk) * partial_stride(*planned_);
    }

    Workspace& shared_;
    LatentHeads latent_;
    int q_width_ = 0, qkv_width_ = 0;  // of the widest layers
    RowBuffer qkv_, queries_, attended_;
    Buffer<float> partials_;  // [rows of a pass, heads, chunks, partial_stride]
    std::vector<Block> blocks_;
    std::vector<Pass> passes_;
    int chunks_ = 0;
    const AttentionShape* planned_ = nullptr;  // what blocks and passes are for; null: nothing yet
};

}  // namespace paceline
