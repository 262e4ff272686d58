#include "layers/local_conv.h"

#include <algorithm>

#include "forward/workspace.h"

namespace paceline {

void LocalConvs::read(const LocalConv& conv, const Linear& to, const float* norm) {
    const int rows = shared_.rows();
    normed_.need(rows, shared_.shape.hidden);
    deltas_.need(rows, conv.deltas.n());
    pool().each(rows, [&](int row, int thread) {
        shared_.normed(shared_.x.row(row), norm, normed_.row(row));
        conv.deltas.take(normed_.row(row), shared_.hidden, row, shared_.spare(thread));
    });
    run_linear(conv.deltas, shared_.hidden, deltas_.out());
    run(conv, 0, normed_);
    pool().each(rows, [&](int row, int thread) {
        shared_.norm_for(to, row, normed_.row(row), nullptr, thread);
    });
}

void LocalConvs::finish(const LocalConv& conv) const {
    run(conv, 1, shared_.branch);
}

void LocalConvs::run(const LocalConv& conv, int side, const RowBuffer& x) const {
    const int hidden = shared_.shape.hidden, groups = hidden / conv.group;
    const float* base = conv.base + size_t(side) * conv.kernel * hidden;
    pool().each(groups, [&](int group, int) {
        const int first = group * conv.group, end = first + conv.group;
        // The last row first: a row reads those before it as they were.
        for (int row = shared_.rows() - 1; row >= 0; --row) {
            const float* deltas = deltas_.row(row) + size_t(side) * conv.kernel * groups + group;
            const int taps = std::min(conv.kernel, block_row(row) + 1);
            float* y = x.row(row);
            for (int at = first; at < end; ++at) {
                float sum = (base[at] + deltas[0]) * y[at];
                for (int tap = 1; tap < taps; ++tap) {
                    const float factor = base[size_t(tap) * hidden + at] + deltas[size_t(tap) * groups];
                    sum += factor * x.row(row - tap)[at];
                }
                y[at] = sum;
            }
        }
    });
}

int LocalConvs::block_row(int row) const {
    const Batch& batch = *shared_.batch;
    const int at = shared_.slice.first + row;
    return batch.rows[at].position - batch.spans[batch.span_of[at]].start;
}

}  // namespace paceline
