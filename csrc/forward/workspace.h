// What the parts of a forward share: the rows of a slice, the inputs of the linear that comes next, and
// memory of threads. Knows no order of layers.
#pragma once

#include <vector>

#include "forward/adapter.h"
#include "forward/batch.h"
#include "forward/buffers.h"
#include "forward/decoder_weights.h"

namespace paceline {

class Workspace {
  public:
    explicit Workspace(const DecoderWeights& weights);
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    // The rows are those of this slice from here on.
    void begin(const Batch& batch, const BatchSlice& slice);
    int rows() const { return slice.end - slice.first; }

    // Inputs of a linear, `width` of each row. All are views of one memory, used in turn.
    Inputs inputs(int rows, int width) { return inputs_.view(rows, width, most_orders); }
    // Of one thread: two rows of any width, the second one for `Linear::take` and `Linear::gather`.
    float* scratch(int thread) const { return scratch_.get() + size_t(thread) * 2 * scratch_width_; }
    float* spare(int thread) const { return scratch(thread) + scratch_width_; }

    void norm(const float* x, const float* weight, float* y) const;
    // The norm of x, padded with zeros; x itself where there is no norm.
    void normed(const float* x, const float* weight, float* y) const;
    // The norm of a row as a row of inputs of `to`: of the residual stream, or of any other.
    void norm_for(const Linear& to, int row, const float* weight, int thread) const {
        norm_for(to, row, x.row(row), weight, thread);
    }
    void norm_for(const Linear& to, int row, const float* from, const float* weight, int thread) const;
    // Adds the branch's row to that of the residual stream, through a norm where there is one.
    void add_branch(int row, const float* norm) const;
    // Where a layer's linear writes: it adds its results, times `scale`, to the residual stream, or
    // they are the branch. A second linear adds its own to the branch.
    LinearOut out(bool to_branch, float scale, bool is_second = false) const;
    // A layer's attention or recurrence is a branch that is added later, and not at once.
    bool branches(const DecoderLayer& layer) const {
        return shape.parallel || layer.post_attention_norm || layer.attention_conv;
    }

    const DecoderShape& shape;
    const int most_orders;  // of one linear's inputs
    const Batch* batch = nullptr;
    BatchSlice slice{};
    RowBuffer x, branch;        // the residual stream, and what is added to it
    Inputs hidden{}, joined{};  // rows of hidden states; rows that an entry has joined
    AddedLinears added;

  private:
    int widest_;  // joined rows, inputs of any linear, queries of any layer
    int scratch_width_ = 0;
    Buffer<float> scratch_;
    InputBuffer inputs_;
};

}  // namespace paceline
