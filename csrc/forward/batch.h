// Spans to the flat arrays of one forward: the native counterpart of paceline/backends/rows/row_batch.py.
#pragma once

#include <cstdint>
#include <vector>

#include "forward/linear.h"
#include "kernels/kernels.h"
#include "layers/recurrent_step.h"

namespace paceline {

// Rows of a batch that go through all layers before the next ones do.
struct BatchSlice {
    int first, end;            // rows
    int samples, samples_end;  // entries of the batch's sample_rows
};

// What of one request goes through a forward: nodes of a tree, parents first, of which the first
// `cached` ones have been computed. Node i's slot is the request's slot `start` + i.
struct NodeSpan {
    std::vector<int32_t> tokens, parents, samples;
    int start, cached;
    std::vector<int32_t> blocks;
};

struct Adapter;

struct Batch {
    // Raises std::invalid_argument where a span does not fit its block table, the vocabulary or the
    // context. With `are_blocks` each span is a block, whose rows see each other all.
    Batch(std::vector<NodeSpan> spans, int vocab, int max_len, int num_blocks, bool are_blocks);

    int num_rows() const { return static_cast<int>(tokens.size()); }
    // Slices of about `most` rows, which cut no block and no tree that recurrent layers walk.
    std::vector<BatchSlice> slices(int most) const;

    std::vector<int32_t> tokens, write_slots;  // [rows]; a slot is block * 16 + lane
    std::vector<AttentionRow> rows;            // [rows]
    std::vector<int32_t> span_of;              // [rows]
    std::vector<int32_t> parents;              // [rows], nodes of the span
    std::vector<int32_t> first_rows;           // of each span
    std::vector<StateSpan> states;             // of each span; none where no layer is recurrent
    std::vector<const Adapter*> adapters;      // of each span, null where it has none; or no entries
    Kept keep_adapters;
    std::vector<AttentionSpan> spans;
    std::vector<int32_t> sample_rows, sample_offsets;  // as in the Python Batch
    int last_position = 0;                             // of any row

  private:
    void add(NodeSpan span);
    void add_paths(const std::vector<int32_t>& parents, int cached);
    int slice_end(int first, int most) const;

    int vocab_, max_len_, num_blocks_;
    bool are_blocks_;
    std::vector<std::vector<int32_t>> tables_, paths_;
};

}  // namespace paceline
