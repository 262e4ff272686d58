#include "forward/layer_inputs.h"

#include <algorithm>
#include <cmath>

#include "forward/forward.h"

namespace paceline {

void Decoder::layer_inputs(const Batch& batch, const Slice& slice) {
    const LayerInputs& w = *layer_inputs_;
    const int rows = slice.end - slice.first, ld = round_up(w.total(), TILE);
    told_.need(size_t(rows) * ld);
    pool().each(rows, [&](int row, int thread) {
        normed(x_row(row), nullptr, scratch(thread));
        w.projection.take(scratch(thread), in_hidden_, row, spare(thread));
    });
    const float root = 1.0f / std::sqrt(float(shape_.hidden)), half = std::sqrt(0.5f);
    run_linear(w.projection, in_hidden_, {told_.get(), nullptr, ld, root});
    pool().each(rows, [&](int row, int thread) {
        float *told = told_.get() + size_t(row) * ld, *token = scratch(thread);
        float* read = spare(thread);
        w.embedding.gather(w.row_of(batch.tokens[slice.first + row]), w.multiplier, token, read);
        for (int layer = 0; layer < w.layers(); ++layer, told += w.width, token += w.width) {
            kernels().rms_norm(told, w.norm, shape_.norm_eps, w.width, read);
            for (int i = 0; i < w.width; ++i) {
                told[i] = (read[i] + token[i]) * half;
            }
        }
    });
}

void Decoder::take_layer_input(const DecoderLayer& layer, size_t index, int rows) {
    const LayerInputs& w = *layer_inputs_;
    const int ld_told = round_up(w.total(), TILE), ld = round_up(w.width, TILE);
    gates_.need(size_t(rows) * ld);
    pool().each(rows, [&](int row, int thread) {
        if (layer.post_mlp_norm) {
            add_branch(row, layer.post_mlp_norm);
        }
        if (layer.altup) {
            correct_streams(layer, row, scratch(thread));
        }
        normed(x_row(row), nullptr, scratch(thread));
        layer.gate->gate.take(scratch(thread), in_hidden_, row, spare(thread));
    });
    run_linear(layer.gate->gate, in_hidden_, {gates_.get(), nullptr, ld, 1.0f});
    const Inputs inner = inputs_.view(rows, w.width, most_orders_);
    pool().each(rows, [&](int row, int thread) {
        const float* told = told_.get() + size_t(row) * ld_told + index * w.width;
        float* gated = scratch(thread);
        kernels().activate(gates_.get() + size_t(row) * ld, w.width, shape_.activation, nullptr, gated);
        for (int i = 0; i < w.width; ++i) {
            gated[i] *= told[i];
        }
        layer.gate->projection.take(gated, inner, row, spare(thread));
    });
    run_linear(layer.gate->projection, inner, {branch_.get(), nullptr, ld_hidden_, 1.0f});
}

}  // namespace paceline
