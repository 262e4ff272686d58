#include "layers/layer_inputs.h"

#include <cmath>

#include "forward/workspace.h"

namespace paceline {

void InputsOfLayers::begin() {
    const LayerInputs& w = *weights_.layer_inputs;
    const DecoderShape& shape = shared_.shape;
    inputs_.need(shared_.rows(), w.total());
    pool().each(shared_.rows(), [&](int row, int thread) {
        shared_.norm_for(w.projection, row, nullptr, thread);
    });
    run_linear(w.projection, shared_.hidden, inputs_.out(1.0f / std::sqrt(float(shape.hidden))));
    const float half = std::sqrt(0.5f);
    pool().each(shared_.rows(), [&](int row, int thread) {
        float *input = inputs_.row(row), *token = shared_.scratch(thread);
        float* normed = shared_.spare(thread);
        const int id = w.row_of(shared_.batch->tokens[shared_.slice.first + row]);
        w.embedding.gather(id, w.multiplier, token, normed);
        for (int layer = 0; layer < w.layers(); ++layer, input += w.width, token += w.width) {
            kernels().rms_norm(input, w.norm, shape.norm_eps, w.width, normed);
            for (int i = 0; i < w.width; ++i) {
                input[i] = (normed[i] + token[i]) * half;
            }
        }
    });
}

void InputsOfLayers::run(const DecoderLayer& layer) {
    const int width = weights_.layer_inputs->width, rows = shared_.rows();
    const LayerGate& w = *layer.gate;
    gates_.need(rows, width);
    pool().each(rows, [&](int row, int thread) {
        if (layer.post_mlp_norm) {
            shared_.add_branch(row, layer.post_mlp_norm);
        }
        if (layer.altup) {
            streams_.correct(layer, row, shared_.scratch(thread));
        }
        shared_.norm_for(w.gate, row, nullptr, thread);
    });
    run_linear(w.gate, shared_.hidden, gates_.out());
    const Inputs inner = shared_.inputs(rows, width);
    pool().each(rows, [&](int row, int thread) {
        const float* input = inputs_.row(row) + layer.index * width;
        float* gated = shared_.scratch(thread);
        kernels().activate(gates_.row(row), width, shared_.shape.activation, nullptr, gated);
        for (int i = 0; i < width; ++i) {
            gated[i] *= input[i];
        }
        w.projection.take(gated, inner, row, shared_.spare(thread));
    });
    run_linear(w.projection, inner, shared_.branch.out());
}

}  // namespace paceline
