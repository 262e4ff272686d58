#include "layers/recurrent_layer.h"

#include <algorithm>
#include <stdexcept>

#include "forward/workspace.h"

namespace paceline {

void Recurrences::check(const Batch& batch) const {
    if (batch.states.size() != (first_ ? batch.spans.size() : 0)) {
        throw std::invalid_argument("recurrent layers need a state for each span, others none");
    }
    for (size_t span = 0; span < batch.states.size(); ++span) {
        const int first = batch.first_rows[span];
        const int end = span + 1 < batch.states.size() ? batch.first_rows[span + 1] : batch.num_rows();
        const std::vector<int32_t> parents(batch.parents.begin() + first, batch.parents.begin() + end);
        check_span(parents, batch.states[span], states_);
    }
}

void Recurrences::begin() {
    if (!first_) {
        return;
    }
    const Batch& batch = *shared_.batch;
    step_.clear(first_->conv.kernel);
    for (int row = shared_.slice.first; row < shared_.slice.end;) {
        const int span = batch.span_of[row], before = row - batch.first_rows[span];
        parents_.clear();
        for (; row < shared_.slice.end && batch.span_of[row] == span; ++row) {
            parents_.push_back(batch.parents[row] - before);
        }
        // What a slice of a span reads that is not its first was written by the one before it.
        StateSpan where = batch.states[span];
        where.certain = std::clamp(where.certain - before, 0, int(parents_.size()));
        if (before > 0) {
            where.read = where.write;
            where.path.clear();
        }
        step_.add(parents_, std::move(where));
    }
}

void Recurrences::read(const RecurrentLayer& layer, const Inputs& in) {
    const RecurrentLayer::Parts parts = layer.parts();
    const int inner = layer.shape.inner();
    const bool short_conv = layer.kind == RecurrentKind::short_conv;
    read_.need(shared_.rows(), parts.width);
    run_linear(layer.first, in, read_.out());
    pool().each(layer.in_scale || short_conv ? shared_.rows() : 0, [&](int row, int) {
        float* x = read_.row(row);
        for (int i = 0; layer.in_scale && i < parts.width; ++i) {
            x[i] *= layer.in_scale[i];
        }
        for (int i = 0; short_conv && i < inner; ++i) {
            x[parts.mixed + i] *= x[parts.before + i];
        }
    });
}

const RowBuffer& Recurrences::walk(const RecurrentLayer& r) {
    const RecurrentLayer::Parts parts = r.parts();
    const int inner = r.shape.inner(), keys = r.shape.keys();
    const bool delta = r.kind == RecurrentKind::delta;
    const bool short_conv = r.kind == RecurrentKind::short_conv;
    const LayerStates states = states_.of_layer(r.index, r.conv, r.shape);
    mixed_.need(shared_.rows(), r.conv.channels);
    recurred_.need(shared_.rows(), inner);
    float *read = read_.row(0), *mixed = mixed_.row(0);
    step_.begin(states);
    step_.convolve(r.conv, states, read + parts.mixed, read_.ld(), mixed, mixed_.ld());
    if (!short_conv) {
        const RecurrentRows numbers{mixed + (delta ? 0 : inner + keys), mixed + (delta ? keys : inner),
                                    mixed + (delta ? 2 * keys : 0),
                                    delta ? read + parts.rate : nullptr, read + parts.decay,
                                    mixed_.ld(), read_.ld()};
        step_.recur(r.shape, r.numbers, r.skip, states, numbers, recurred_.row(0), recurred_.ld());
    }
    step_.end(states);
    return short_conv ? mixed_ : recurred_;
}

void Recurrences::run(const DecoderLayer& layer) {
    const RecurrentLayer& r = *layer.recurrent;
    const RowBuffer& results = walk(r);
    const int first_gate = r.parts().gate, inner = r.shape.inner();
    const Inputs inputs = shared_.inputs(shared_.rows(), inner);
    pool().each(shared_.rows(), [&](int row, int thread) {
        const float *x = results.row(row), *gate = read_.row(row) + first_gate;
        float* gated = shared_.scratch(thread);
        if (r.kind == RecurrentKind::short_conv) {
            for (int i = 0; i < inner; ++i) {
                gated[i] = x[i] * gate[i];
            }
            std::fill(gated + inner, gated + round_up(inner, TILE), 0.0f);
        } else {
            kernels().recurrent->gated_norm(x, gate, r.norm, r.gating, r.norm_eps, inner,
                                            r.norm_groups, gated);
        }
        r.last.take(gated, inputs, row, shared_.spare(thread));
    });
    run_linear(r.last, inputs, shared_.out(shared_.branches(layer), r.out_scale));
}

}  // namespace paceline
