#include "forward/recurrent_layer.h"

#include <algorithm>
#include <stdexcept>

#include "forward/forward.h"

namespace paceline {

void Decoder::set_states(const LayerStates& first, Kept keep_alive) {
    states_ = first;
    keep_states_ = std::move(keep_alive);
}

void Decoder::check_states(const Batch& batch) const {
    if (batch.states.size() != (recurrent_ ? batch.spans.size() : 0)) {
        throw std::invalid_argument("recurrent layers need a state for each span, others none");
    }
    for (size_t span = 0; span < batch.states.size(); ++span) {
        const int first = batch.first_rows[span];
        const int end = span + 1 < batch.states.size() ? batch.first_rows[span + 1] : batch.num_rows();
        const std::vector<int32_t> parents(batch.parents.begin() + first, batch.parents.begin() + end);
        check_span(parents, batch.states[span], states_);
    }
}

void Decoder::plan_recurrences(const Batch& batch, const Slice& slice) {
    step_.clear(recurrent_->conv.kernel);
    std::vector<int32_t>& parents = span_parents_;
    for (int row = slice.first; row < slice.end;) {
        const int span = batch.span_of[row], before = row - batch.first_rows[span];
        parents.clear();
        for (; row < slice.end && batch.span_of[row] == span; ++row) {
            parents.push_back(batch.parents[row] - before);
        }
        // What a slice of a span reads that is not its first was written by the one before it.
        StateSpan where = batch.states[span];
        where.certain = std::clamp(where.certain - before, 0, int(parents.size()));
        if (before > 0) {
            where.read = where.write;
            where.path.clear();
        }
        step_.add(parents, std::move(where));
    }
}

void Decoder::read_recurrent(const RecurrentLayer& layer, int rows, const Inputs& in) {
    const RecurrentLayer::Parts parts = layer.parts();
    const int ld = round_up(parts.width, TILE), inner = layer.shape.inner();
    const bool short_conv = layer.kind == RecurrentKind::short_conv;
    float* first = first_.need(size_t(rows) * ld);
    run_linear(layer.first, in, {first, nullptr, ld, 1.0f});
    pool().each(layer.in_scale || short_conv ? rows : 0, [&](int row, int) {
        float* x = first + size_t(row) * ld;
        for (int i = 0; layer.in_scale && i < parts.width; ++i) {
            x[i] *= layer.in_scale[i];
        }
        for (int i = 0; short_conv && i < inner; ++i) {
            x[parts.mixed + i] *= x[parts.before + i];
        }
    });
}

void Decoder::recurrence(const DecoderLayer& layer, int rows) {
    const RecurrentLayer& r = *layer.recurrent;
    const RecurrentLayer::Parts parts = r.parts();
    const int ld_first = round_up(parts.width, TILE), ld = round_up(r.conv.channels, TILE);
    const int inner = r.shape.inner(), ld_inner = round_up(inner, TILE);
    const LayerStates states = states_.of_layer(r.index, r.conv, r.shape);
    float* first = first_.get();
    float* mixed = mixed_.need(size_t(rows) * ld);
    float* y = recurred_.need(size_t(rows) * ld_inner);
    step_.begin(states);
    step_.convolve(r.conv, states, first + parts.mixed, ld_first, mixed, ld);
    const float* out = mixed;
    int ld_out = ld;
    if (r.kind != RecurrentKind::short_conv) {
        const bool delta = r.kind == RecurrentKind::delta;
        const int keys = r.shape.keys();
        const RecurrentRows numbers{mixed + (delta ? 0 : inner + keys), mixed + (delta ? keys : inner),
                                    mixed + (delta ? 2 * keys : 0),
                                    delta ? first + parts.rate : nullptr, first + parts.decay, ld,
                                    ld_first};
        step_.recur(r.shape, r.numbers, r.skip, states, numbers, y, ld_inner);
        out = y;
        ld_out = ld_inner;
    }
    step_.end(states);
    const Inputs inputs = inputs_.view(rows, inner, most_orders_);
    pool().each(rows, [&](int row, int thread) {
        const float* x = out + size_t(row) * ld_out;
        const float* gate = first + size_t(row) * ld_first + parts.gate;
        float* gated = scratch(thread);
        if (r.kind == RecurrentKind::short_conv) {
            for (int i = 0; i < inner; ++i) {
                gated[i] = x[i] * gate[i];
            }
            std::fill(gated + inner, gated + ld_inner, 0.0f);
        } else {
            kernels().recurrent->gated_norm(x, gate, r.norm, r.gating, r.norm_eps, inner,
                                            r.norm_groups, gated);
        }
        r.last.take(gated, inputs, row, spare(thread));
    });
    mix_in(layer, r.last, inputs, r.out_scale);
}

}  // namespace paceline
