#include "layers/feed_forward.h"

#include <cmath>

#include "forward/workspace.h"

namespace paceline {

void FeedForwards::run(const DecoderLayer& layer) {
    const bool parallel = shared_.shape.parallel;
    const Linear& first = layer.mlp.gate_up;
    pool().each(shared_.rows(), [&](int row, int thread) {
        if (parallel) {
            shared_.norm_for(first, row, layer.mlp_norm, thread);
        }
        if (shared_.branches(layer)) {
            shared_.add_branch(row, layer.post_attention_norm);
        }
        if (layer.altup) {
            streams_.add_laurel(row);
        }
        if (!parallel && !layer.mlp_conv) {
            shared_.norm_for(first, row, layer.mlp_norm, thread);
        }
    });
    if (layer.mlp_conv) {
        convs_.read(*layer.mlp_conv, first, layer.mlp_norm);
    }
    const bool is_branch = layer.post_mlp_norm || layer.mlp_conv;
    feed(layer, layer.mlp, shared_.out(is_branch, shared_.shape.mlp_out_scale));
    if (layer.mlp_conv) {
        convs_.finish(*layer.mlp_conv);
        pool().each(shared_.rows(), [&](int row, int) { shared_.add_branch(row, nullptr); });
    }
}

void FeedForwards::feed(const DecoderLayer& layer, const FeedForward& mlp, const LinearOut& out) {
    const bool is_dense = &mlp == &layer.mlp;
    const auto run = [&](const Linear& weights, AddedLinear AddedLayer::*which, const Inputs& x,
                         const LinearOut& to) {
        if (is_dense) {
            shared_.added.run(layer.index, weights, which, x, to);
        } else {
            run_linear(weights, x, to);
        }
    };
    const DecoderShape& shape = shared_.shape;
    const float sparse_deviations = is_dense ? layer.sparse_deviations : -INFINITY;
    gate_up_.need(shared_.rows(), 2 * mlp.width());
    run(mlp.gate_up, &AddedLayer::gate_up, shared_.hidden, gate_up_.out());
    const Inputs inner = shared_.inputs(shared_.rows(), mlp.width());
    pool().each(shared_.rows(), [&](int row, int thread) {
        float* up = gate_up_.row(row);
        if (sparse_deviations > -INFINITY) {
            cut_gates(up, mlp.width(), sparse_deviations);
        }
        for (int i = 0; shape.gate_multiplier != 1.0f && i < mlp.width(); ++i) {
            up[i] *= shape.gate_multiplier;
        }
        float* y = shared_.scratch(thread);
        shape.activate(up, mlp.width(), is_dense ? layer.learnt : nullptr, y);
        mlp.down.take(y, inner, row, shared_.spare(thread));
    });
    run(mlp.down, &AddedLayer::down, inner, out);
}

}  // namespace paceline
