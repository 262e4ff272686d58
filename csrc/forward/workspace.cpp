#include "forward/workspace.h"

#include <algorithm>

namespace paceline {

Workspace::Workspace(const DecoderWeights& weights)
    : shape(weights.shape),
      most_orders(weights.most_orders),
      widest_(std::max(2 * shape.hidden, weights.widest)) {
    for (const DecoderLayer& layer : weights.layers) {
        widest_ = std::max(widest_, layer.q_width());
    }
    // The second of two joined rows is padded on its own before both are.
    scratch_width_ = round_up(widest_, TILE) + TILE;
}

void Workspace::begin(const Batch& of, const BatchSlice& part) {
    batch = &of;
    slice = part;
    scratch_.need(size_t(pool().size()) * 2 * scratch_width_);
    x.need(rows(), shape.hidden);
    branch.need(rows(), shape.hidden);
    // Room for all, so that no view moves another.
    inputs(std::max(rows(), int(batch->sample_rows.size())), widest_);
    hidden = inputs(rows(), shape.hidden);
    joined = inputs(rows(), 2 * shape.hidden);
    added.plan(*batch, slice.first, slice.end);
}

void Workspace::norm(const float* from, const float* weight, float* y) const {
    const int n = shape.hidden;
    if (shape.layer_norm) {
        kernels().layer_norm(from, weight, weight + n, shape.norm_eps, n, y);
    } else {
        kernels().rms_norm(from, weight, shape.norm_eps, n, y);
    }
}

void Workspace::normed(const float* from, const float* weight, float* y) const {
    if (weight) {
        norm(from, weight, y);
    } else {
        std::fill(std::copy_n(from, shape.hidden, y), y + x.ld(), 0.0f);
    }
}

void Workspace::norm_for(const Linear& to, int row, const float* from, const float* weight,
                         int thread) const {
    normed(from, weight, scratch(thread));
    to.take(scratch(thread), hidden, row, spare(thread));
}

void Workspace::add_branch(int row, const float* weight) const {
    float *to = x.row(row), *from = branch.row(row);
    if (weight) {
        norm(from, weight, from);
    }
    for (int i = 0; i < shape.hidden; ++i) {
        to[i] += shape.residual_multiplier * from[i];
    }
}

LinearOut Workspace::out(bool to_branch, float scale, bool is_second) const {
    if (!to_branch) {
        return {x.row(0), x.row(0), x.ld(), scale * shape.residual_multiplier};
    }
    return {branch.row(0), is_second ? branch.row(0) : nullptr, branch.ld(), scale};
}

}  // namespace paceline
