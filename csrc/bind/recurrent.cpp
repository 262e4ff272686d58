// Python's view of the kernels of recurrent layers one by one, for tests: the phases of one layer over
// requests, and functions of rows. Spans are tuples (parents, read, write, lane, path, certain).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/arrays.h"
#include "layers/recurrent_step.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using Span = std::tuple<std::vector<int32_t>, int, int, int, std::vector<int32_t>, int>;

auto to_numpy(const std::vector<float>& values, std::initializer_list<size_t> shape) {
    auto* copy = new std::vector<float>(values);
    nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    return nb::ndarray<nb::numpy, float>(copy->data(), shape, owner);
}

std::vector<float> copy_of(const float* from, size_t count) {
    return std::vector<float>(from, from + count);
}

// Of spans that cover all rows; `states` has what they are checked against.
RecurrentStep step_of(const std::vector<Span>& spans, size_t rows, int kernel,
                      const LayerStates& states) {
    RecurrentStep step;
    step.clear(kernel);
    for (const auto& [parents, read, write, lane, path, certain] : spans) {
        check_span(parents, {read, write, lane, path, certain}, states);
        step.add(parents, {read, write, lane, path, certain});
    }
    require(!spans.empty() && step.num_rows() == static_cast<int>(rows),
            "the spans have another number of rows than x");
    return step;
}

auto convolve(const Array<const float, 2>& x, const Array<const float, 2>& weight, const std::optional<Array<const float, 1>>& bias,
              bool silu, const std::vector<Span>& spans, Array<float, 3> conv, Array<float, 3> log, Array<uint8_t, 1> due) {
    const size_t rows = x.shape(0), channels = x.shape(1), kernel = weight.shape(0);
    require(kernel >= 1 && kernel <= MAX_KERNEL, "the kernel has too many rows, or none");
    require(weight.shape(1) == channels && (!bias || bias->shape(0) == channels) &&
                conv.shape(1) == kernel - 1 && conv.shape(2) == channels && log.shape(2) == channels &&
                due.shape(0) == log.shape(0),
            "weights, states or logs have other sizes than x");
    LayerStates states{};
    states.conv = conv.data();
    states.log_conv = log.data();
    states.due = due.data();
    states.slots = static_cast<int>(conv.shape(0));
    states.lanes = static_cast<int>(log.shape(0));
    states.nodes = static_cast<int>(log.shape(1));
    const Convolution shape{static_cast<int>(channels), static_cast<int>(kernel), weight.data(),
                            bias ? bias->data() : nullptr, silu};
    RecurrentStep step = step_of(spans, rows, shape.kernel, states);
    std::vector<float> y(rows * channels);
    step.begin(states);
    step.convolve(shape, states, x.data(), shape.channels, y.data(), shape.channels);
    step.end(states);
    return to_numpy(y, {rows, channels});
}

// Queries and keys [rows, groups, key_dim], values [rows, heads, value_dim], rates (of the delta rule)
// and decays [rows, heads]; the numbers of RecurrentNumbers; states [slots, heads, tiles, key_dim, 16].
auto recur(const Array<const float, 3>& query, const Array<const float, 3>& key, const Array<const float, 3>& value,
           const std::optional<Array<const float, 2>>& rate, const Array<const float, 2>& decay, const Array<const float, 1>& decays,
           const Array<const float, 1>& step_bias, float rate_scale, float least_step, float most_step,
           const std::optional<Array<const float, 1>>& skip, const std::vector<Span>& spans, Array<float, 5> state,
           Array<float, 4> log_key, Array<float, 4> log_added, Array<float, 3> log_decay, Array<uint8_t, 1> due) {
    const size_t rows = value.shape(0), heads = value.shape(1), groups = key.shape(1);
    const RecurrentShape shape{static_cast<int>(heads), static_cast<int>(groups),
                               static_cast<int>(key.shape(2)), static_cast<int>(value.shape(2)),
                               rate.has_value()};
    require(groups > 0 && heads % groups == 0 && query.shape(1) == groups &&
                query.shape(2) == key.shape(2) && query.shape(0) == rows && key.shape(0) == rows,
            "queries, keys and values have sizes that do not agree");
    require(decay.shape(0) == rows && decay.shape(1) == heads && decays.shape(0) == heads &&
                step_bias.shape(0) == heads && (!skip || skip->shape(0) == heads) &&
                (!rate || (rate->shape(0) == rows && rate->shape(1) == heads)),
            "there is not a number for each head");
    require(state.shape(1) == heads && static_cast<int>(state.shape(2)) == shape.tiles() &&
                state.shape(3) == key.shape(2) && state.shape(4) == TILE &&
                log_key.shape(2) == groups && log_key.shape(3) == key.shape(2) &&
                log_added.shape(2) == heads && log_added.shape(3) == value.shape(2) &&
                log_decay.shape(2) == heads,
            "states or logs have other sizes than the rows");
    LayerStates states{nullptr, state.data(), nullptr, log_key.data(), log_added.data(),
                       log_decay.data(), due.data(), static_cast<int>(state.shape(0)),
                       static_cast<int>(log_key.shape(0)), static_cast<int>(log_key.shape(1))};
    require(due.shape(0) == log_key.shape(0) && log_added.shape(0) == log_key.shape(0) &&
                log_decay.shape(0) == log_key.shape(0) && log_added.shape(1) == log_key.shape(1) &&
                log_decay.shape(1) == log_key.shape(1),
            "the logs have different sizes");
    const ptrdiff_t keys = shape.keys(), inner = shape.inner(), ld = 2 * keys + inner;
    std::vector<float> mixed(rows * static_cast<size_t>(ld));
    for (size_t row = 0; row < rows; ++row) {
        float* to = mixed.data() + static_cast<ptrdiff_t>(row) * ld;
        to = std::copy_n(query.data() + static_cast<ptrdiff_t>(row) * keys, keys, to);
        to = std::copy_n(key.data() + static_cast<ptrdiff_t>(row) * keys, keys, to);
        std::copy_n(value.data() + static_cast<ptrdiff_t>(row) * inner, inner, to);
    }
    std::vector<float> rates = rate ? copy_of(rate->data(), rows * heads) : std::vector<float>();
    std::vector<float> kept = copy_of(decay.data(), rows * heads), y(rows * heads * value.shape(2));
    const RecurrentRows in{mixed.data(), mixed.data() + keys, mixed.data() + 2 * keys,
                           rate ? rates.data() : nullptr, kept.data(), ld,
                           static_cast<ptrdiff_t>(heads)};
    const RecurrentNumbers numbers{decays.data(), step_bias.data(), rate_scale, least_step,
                                   most_step};
    RecurrentStep step = step_of(spans, rows, 1, states);
    step.begin(states);
    step.recur(shape, numbers, skip ? skip->data() : nullptr, states, in, y.data(), inner);
    step.end(states);
    return to_numpy(y, {rows, heads, value.shape(2)});
}

// Folds a path of a lane into a slot in all layers where it is due. The arrays are those of
// Decoder.set_states.
void fold_states(Array<float, 4> conv, Array<float, 4> state, Array<float, 4> log_conv, Array<float, 4> log_key, Array<float, 4> log_added,
                 Array<float, 4> log_decay, Array<uint8_t, 2> due, int groups, int key_dim, int slot, int lane, const std::vector<int32_t>& path) {
    const int heads = static_cast<int>(state.shape(2));
    const RecurrentShape shape{heads, groups, key_dim, static_cast<int>(log_added.shape(3)) / heads,
                               false};
    const int channels = static_cast<int>(conv.shape(3)), kernel = static_cast<int>(conv.shape(2)) + 1;
    const std::vector<float> weight(static_cast<size_t>(kernel) * channels);  // for no row
    const Convolution convolution{channels, kernel, weight.data(), nullptr, false};
    const LayerStates first{conv.data(), state.data(), log_conv.data(), log_key.data(),
                            log_added.data(), log_decay.data(), due.data(),
                            static_cast<int>(conv.shape(1)), static_cast<int>(due.shape(1)),
                            static_cast<int>(log_conv.shape(2))};
    const StateSpan span{slot, slot, lane, path, 0};
    check_span({}, span, first);
    const nb::gil_scoped_release unlocked;
    const ThreadPool::Turn turn = pool().take_turn();
    RecurrentStep step;
    step.clear(kernel);
    step.add({}, span);
    for (size_t layer = 0; layer < due.shape(0); ++layer) {
        const LayerStates states = first.of_layer(layer, convolution, shape);
        step.begin(states);
        step.convolve(convolution, states, nullptr, 0, nullptr, 0);
        if (key_dim > 0) {
            step.recur(shape, {}, nullptr, states, {}, nullptr, 0);
        }
        step.end(states);
    }
}

auto gated_norm(const Array<const float, 2>& x, const Array<const float, 2>& gate, const std::optional<Array<const float, 1>>& weight,
                const std::string& kind, float eps, int groups) {
    GatedNorm norm;
    require(find_norm(kind.c_str(), &norm), "norm: one that recurrent.h names");
    const size_t rows = x.shape(0), n = x.shape(1), parts = static_cast<size_t>(groups);
    require(groups > 0 && n % parts == 0 && gate.shape(0) == rows && gate.shape(1) == n,
            "x and gate have different sizes, or no equal parts");
    require(norm == GatedNorm::none || (weight && weight->shape(0) == n),
            "the norm's weight has another size");
    std::vector<float> y(rows * n), padded(static_cast<size_t>(round_up(static_cast<int>(n), TILE)));
    for (size_t row = 0; row < rows; ++row) {
        kernels().recurrent->gated_norm(x.data() + row * n, gate.data() + row * n,
                                        weight ? weight->data() : nullptr, norm, eps,
                                        static_cast<int>(n), groups, padded.data());
        std::copy_n(padded.data(), n, y.data() + row * n);
    }
    return to_numpy(y, {rows, n});
}

auto gate(const Array<const float, 2>& x, const Array<const float, 2>& by) {
    const size_t rows = x.shape(0), n = x.shape(1);
    require(by.shape(0) == rows && by.shape(1) == n, "x and gate have different sizes");
    std::vector<float> y(rows * n);
    for (size_t row = 0; row < rows; ++row) {
        kernels().recurrent->gate(x.data() + row * n, by.data() + row * n, static_cast<int>(n),
                                  y.data() + row * n);
    }
    return to_numpy(y, {rows, n});
}

}  // namespace

void bind_recurrent(nb::module_& module) {
        module.def("convolve", &convolve, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(),
               nb::arg("silu"), nb::arg("spans"), nb::arg("conv").noconvert(),
               nb::arg("log").noconvert(), nb::arg("due").noconvert());
    module.def("recur", &recur, nb::arg("query"), nb::arg("key"), nb::arg("value"),
               nb::arg("rate").none(), nb::arg("decay"), nb::arg("decays"), nb::arg("step_bias"),
               nb::arg("rate_scale"), nb::arg("least_step"), nb::arg("most_step"),
               nb::arg("skip").none(), nb::arg("spans"), nb::arg("state").noconvert(),
               nb::arg("log_key").noconvert(), nb::arg("log_added").noconvert(),
               nb::arg("log_decay").noconvert(), nb::arg("due").noconvert());
    module.def("fold_states", &fold_states, nb::arg("conv").noconvert(),
               nb::arg("state").noconvert(), nb::arg("log_conv").noconvert(),
               nb::arg("log_key").noconvert(), nb::arg("log_added").noconvert(),
               nb::arg("log_decay").noconvert(), nb::arg("due").noconvert(), nb::arg("groups"),
               nb::arg("key_dim"), nb::arg("slot"), nb::arg("lane"), nb::arg("path"));
    module.def("gated_norm", &gated_norm, nb::arg("x"), nb::arg("gate"), nb::arg("weight").none(),
               nb::arg("kind"), nb::arg("eps"), nb::arg("groups"));
    module.def("gate", &gate, nb::arg("x"), nb::arg("gate"));
}

}  // namespace paceline
