// Convolutions within a block, around a layer's attention or feed-forward (paceline/models/layer_sizes.py
// says what they compute), over the rows of a slice, which holds whole blocks.
#pragma once

#include "forward/buffers.h"
#include "forward/linear.h"

namespace paceline {

class Workspace;

struct LocalConv {
    int kernel, group;  // taps, and channels that share a delta
    const float* base;  // [2, kernel, hidden]: of what goes in, and of what comes out
    Linear deltas;      // to [2, kernel, hidden / group]
};

class LocalConvs {
  public:
    explicit LocalConvs(Workspace& shared) : shared_(shared) {}

    // From rows of x, through a norm, to the inputs of a part's first linear.
    void read(const LocalConv& conv, const Linear& to, const float* norm);
    // What the part made of them: the branch, in place.
    void finish(const LocalConv& conv) const;

  private:
    // Rows in place; side 0 is of what goes in.
    void run(const LocalConv& conv, int side, const RowBuffer& rows) const;
    // How many rows of its block come before a row.
    int block_row(int row) const;

    Workspace& shared_;
    RowBuffer normed_, deltas_;
};

}  // namespace paceline
