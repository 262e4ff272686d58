// Linears of float weights: packing at load, the class that holds one, and its timing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "large_pages.h"
#include "pack.h"
#include "pack_float.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

template <typename T, int Dimensions>
using In = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Data = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T> using Out = nb::ndarray<nb::numpy, T>;

template <typename T> Out<T> make_array(std::initializer_list<size_t> shape) {
    size_t count = 1;
    for (const size_t each : shape) {
        count *= each;
    }
    T* data = new T[count];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Out<T>(data, shape, owner);
}

void require(bool condition, const std::string& message) {
    if (!condition) {
        throw nb::value_error(message.c_str());
    }
}

void check_shape(int64_t n, int64_t k) {
    require(n >= 1 && n <= MAX_OUTPUTS && k >= 1 && k <= MAX_INPUTS,
            "a linear of " + std::to_string(n) + " outputs and " + std::to_string(k) +
                " inputs; allowed are 1.." + std::to_string(MAX_OUTPUTS) + " and 1.." +
                std::to_string(MAX_INPUTS));
}

void check_size(const char* name, size_t got, size_t wanted) {
    require(got == wanted, std::string(name) + " has " + std::to_string(got) +
                               " elements; this linear needs " + std::to_string(wanted));
}

template <typename T> auto py_pack_float(In<T, 2> weight) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, T>;
    constexpr size_t TOO_MANY = std::numeric_limits<int>::max();
    check_shape(std::min(weight.shape(0), TOO_MANY), std::min(weight.shape(1), TOO_MANY));
    const int n = static_cast<int>(weight.shape(0)), k = static_cast<int>(weight.shape(1));
    auto tiles = make_array<T>({float_elements(n, k)});
    nb::gil_scoped_release release;
    pack_float(reinterpret_cast<const Bits*>(weight.data()), n, k,
               reinterpret_cast<Bits*>(tiles.data()));
    return tiles;
}

// --- the class ----------------------------------------------------------------------------------

// The weights stay in the caller's array, which may be a read-only map of a file; scale and bias are
// padded copies.
struct FloatLinearObject {
    FloatWeights weights{};
    LargeVector<float> scale, bias;
    Data data;
    size_t nbytes = 0;  // of weights, scales and bias
};

void check_data(const Data& data, const std::string& name, FloatType type) {
    const auto wanted = type == FloatType::f32    ? nb::dtype<float>()
                        : type == FloatType::f8e4m3 ? nb::dtype<uint8_t>()
                                                  : nb::dtype<uint16_t>();
    require(data.dtype() == wanted, "data of type " + name + " is given as " +
                                        (type == FloatType::f32      ? "float32"
                                         : type == FloatType::f8e4m3 ? "uint8"
                                                                     : "uint16"));
}

// Scales [n, stretches] into [tiles, stretches, 16].
void keep_scale(FloatLinearObject& self, const In<float, 2>& scale, std::optional<int> inputs) {
    FloatWeights& w = self.weights;
    require(w.type == FloatType::f8e4m3, "only weights of type float8_e4m3fn have a scale");
    w.scale_inputs = inputs.value_or(round_up(w.k, FLOAT_RUN));
    require(w.scale_inputs > 0 && w.scale_inputs % FLOAT_RUN == 0,
            "a scale for " + std::to_string(w.scale_inputs) + " inputs; a multiple of " +
                std::to_string(FLOAT_RUN) + " is needed");
    const size_t stretches = (size_t(w.k) + w.scale_inputs - 1) / w.scale_inputs;
    require(scale.shape(0) == size_t(w.n) && scale.shape(1) == stretches,
            "scale is [" + std::to_string(scale.shape(0)) + ", " + std::to_string(scale.shape(1)) +
                "]; this linear needs [" + std::to_string(w.n) + ", " + std::to_string(stretches) +
                "]");
    self.scale.assign(size_t(round_up(w.n, TILE)) * stretches, 0.0f);
    for (int output = 0; output < w.n; ++output) {
        float* to = self.scale.data() + output / TILE * stretches * TILE + output % TILE;
        for (size_t i = 0; i < stretches; ++i) {
            to[i * TILE] = scale.data()[output * stretches + i];
        }
    }
    w.scale = self.scale.data();
}

void init_float(FloatLinearObject* place, Data data, const std::string& type,
                std::optional<In<float, 2>> scale, std::optional<In<float, 1>> bias, int64_t n,
                int64_t k, std::optional<int> scale_inputs) {
    check_shape(n, k);
    auto self = std::make_unique<FloatLinearObject>();
    FloatWeights& w = self->weights;
    w.n = static_cast<int>(n);
    w.k = static_cast<int>(k);
    require(find_float_type(type.c_str(), &w.type),
            "weights of type '" + type +
                "'; allowed are float32, float16, bfloat16 and float8_e4m3fn");
    check_data(data, type, w.type);
    check_size("data", data.shape(0), float_elements(w.n, w.k));
    w.data = data.data();
    if (scale) {
        keep_scale(*self, *scale, scale_inputs);
    }
    if (bias) {
        check_size("bias", bias->shape(0), size_t(n));
        self->bias.assign(size_t(round_up(w.n, TILE)), 0.0f);
        std::copy_n(bias->data(), n, self->bias.data());
        w.bias = self->bias.data();
    }
    self->data = data;
    self->nbytes = data.shape(0) * bytes_of(w.type) +
                   (self->scale.size() + self->bias.size()) * sizeof(float);
    new (place) FloatLinearObject(std::move(*self));
}

// --- running one alone --------------------------------------------------------------------------

// Rows of `k` floats, padded with zeros.
struct PaddedRows {
    PaddedRows(const float* x, int count, int k)
        : copy(size_t(count) * round_up(k, TILE)), rows{copy.data(), count, k, round_up(k, TILE)} {
        for (int row = 0; row < count; ++row) {
            std::copy_n(x + size_t(row) * k, k, copy.data() + size_t(row) * rows.stride);
        }
    }
    LargeVector<float> copy;
    FloatRows rows;
};

// All tiles, by the pool's threads.
void run_float(const FloatWeights& w, const FloatRows& x, const LinearOut& out) {
    constexpr int PIECES_PER_THREAD = 4;  // evens out threads that are disturbed
    const int tiles = round_up(w.n, TILE) / TILE;
    const int piece = (tiles - 1) / (pool().size() * PIECES_PER_THREAD) + 1;
    pool().each((tiles + piece - 1) / piece, [&](int i, int) {
        const int begin = i * piece;
        kernels().linear_float(x, w, out, begin, std::min(begin + piece, tiles));
    });
}

auto py_linear(const FloatLinearObject& self, In<float, 2> x) {
    constexpr size_t MAX_BATCH = 1 << 20;
    const FloatWeights& w = self.weights;
    require(x.shape(1) == size_t(w.k), "x has " + std::to_string(x.shape(1)) +
                                           " inputs per row; this linear takes " +
                                           std::to_string(w.k));
    require(x.shape(0) <= MAX_BATCH, "x has " + std::to_string(x.shape(0)) + " rows; at most " +
                                         std::to_string(MAX_BATCH) + " are allowed");
    auto y = make_array<float>({x.shape(0), size_t(w.n)});
    nb::gil_scoped_release release;
    const PaddedRows padded(x.data(), static_cast<int>(x.shape(0)), w.k);
    run_float(w, padded.rows, {y.data(), nullptr, w.n, 1.0f});
    return y;
}

// Rows `ids` of the weight, times `multiplier`.
auto py_gather(const FloatLinearObject& self, In<int32_t, 1> ids, float multiplier) {
    const FloatWeights& w = self.weights;
    const size_t k = size_t(w.k);
    for (size_t i = 0; i < ids.shape(0); ++i) {
        require(ids.data()[i] >= 0 && ids.data()[i] < w.n, "an id is outside the weight");
    }
    auto y = make_array<float>({ids.shape(0), k});
    std::vector<float> row(size_t(round_up(w.k, TILE)));
    for (size_t i = 0; i < ids.shape(0); ++i) {
        kernels().gather_float(w, ids.data()[i], multiplier, row.data());
        std::copy_n(row.data(), k, y.data() + i * k);
    }
    return y;
}

std::vector<double> py_time(const std::vector<const FloatLinearObject*>& linears, int rows,
                            int passes) {
    require(!linears.empty() && rows >= 1 && rows <= 1 << 16 && passes >= 1 && passes <= 1 << 20,
            "nothing to time");
    const FloatWeights& one = linears[0]->weights;
    for (const FloatLinearObject* each : linears) {
        require(each->weights.n == one.n && each->weights.k == one.k,
                "the linears have different shapes");
    }
    nb::gil_scoped_release release;
    std::vector<float> x(size_t(rows) * one.k);
    for (size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<float>(i * 37 % 255) - 127.0f;
    }
    const PaddedRows padded(x.data(), rows, one.k);
    LargeVector<float> y(size_t(rows) * one.n);
    std::vector<double> seconds;
    for (int pass = 0; pass < passes; ++pass) {
        for (const FloatLinearObject* each : linears) {
            const auto began = std::chrono::steady_clock::now();
            run_float(each->weights, padded.rows, {y.data(), nullptr, one.n, 1.0f});
            const auto passed = std::chrono::steady_clock::now() - began;
            seconds.push_back(std::chrono::duration<double>(passed).count());
        }
    }
    return seconds;
}

}  // namespace
}  // namespace paceline

void bind_float(nb::module_& module) {
    using namespace paceline;
    constexpr char PACK[] =
        "Pack float32 [n, k], or the bits of float16 or bfloat16 as uint16, of FP8 as uint8.";
    module.def("pack_float", py_pack_float<float>, nb::arg("weight").noconvert(), PACK);
    module.def("pack_float", py_pack_float<uint16_t>, nb::arg("weight").noconvert(), PACK);
    module.def("pack_float", py_pack_float<uint8_t>, nb::arg("weight").noconvert(), PACK);

    nb::class_<FloatLinearObject>(module, "FloatLinear", "A packed linear of float weights.")
        .def("__init__", init_float, nb::arg("data").noconvert(), nb::arg("type"),
             nb::arg("scale").noconvert().none(), nb::arg("bias").noconvert().none(), nb::arg("n"),
             nb::arg("k"), nb::arg("scale_inputs") = nb::none(),
             "`scale` is float32 [n, stretches of `scale_inputs` inputs]; without that number a "
             "stretch is a whole row.")
        .def_prop_ro("n", [](const FloatLinearObject& self) { return self.weights.n; })
        .def_prop_ro("k", [](const FloatLinearObject& self) { return self.weights.k; })
        .def_prop_ro("nbytes", [](const FloatLinearObject& self) { return self.nbytes; })
        .def("linear", py_linear, nb::arg("x").noconvert(), "float32 [rows, k] to [rows, n].")
        .def("gather", py_gather, nb::arg("ids").noconvert(), nb::arg("multiplier"),
             "float32 [ids, k]: these outputs' weights times `multiplier`.");
    module.def("time_float_linears", py_time, nb::arg("linears"), nb::arg("rows"),
               nb::arg("passes"), "Seconds of each call, going round the linears `passes` times.");
}
