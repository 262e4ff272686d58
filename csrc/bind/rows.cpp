// Python's view of the row kernels, for tests and for ops called one by one, and of the thread
// pool. Kernels want rows padded with zeros to a multiple of 16; arrays from Python have no
// padding, so that each row passes through a padded buffer here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind/arrays.h"
#include "forward/buffers.h"
#include "threads/crew.h"
#include "kernels/kernels.h"
#include "bind/kv_arrays.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using Indices = Array<const int32_t, 1>;
using Any = nb::ndarray<nb::ndim<4>, nb::c_contig, nb::device::cpu>;

int size_of(size_t size) {
    require(size < (1u << 30), "a dimension is larger than 2**30");
    return static_cast<int>(size);
}

template <typename T>
nb::ndarray<nb::numpy, T> to_numpy(std::unique_ptr<T[]> data, std::initializer_list<size_t> shape) {
    nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(data.release(), shape, owner);
}

template <typename T> std::unique_ptr<T[]> zeros(size_t count) {
    return std::unique_ptr<T[]>(new T[count]());
}

// Every kernel leaves zeros between the end of its row and the next multiple of 16.
void check_padding(const std::vector<float>& row, size_t n) {
    for (size_t i = n; i < row.size(); ++i) {
        if (row[i] != 0.0f) {
            throw std::logic_error("a kernel left something behind the end of its row");
        }
    }
}

// Calls work(x, y) for each row, both padded, and returns the first `out` elements of each y.
template <typename Work> auto each_row(const Rows& x, size_t out, const Work& work) {
    const size_t rows = x.shape(0), in = x.shape(1);
    auto y = zeros<float>(rows * out);
    {
        const nb::gil_scoped_release unlocked;
        std::vector<float> from(round_up(size_of(in), TILE)), to(round_up(size_of(out), TILE));
        for (size_t row = 0; row < rows; ++row) {
            std::memcpy(from.data(), x.data() + row * in, in * sizeof(float));
            std::fill(to.begin(), to.end(), std::numeric_limits<float>::quiet_NaN());
            work(from.data(), to.data());
            check_padding(to, out);
            std::memcpy(y.get() + row * out, to.data(), out * sizeof(float));
        }
    }
    return to_numpy(std::move(y), {rows, out});
}

auto rms_norm(const Rows& x, const Vector& weight, float eps) {
    const size_t n = x.shape(1);
    require(n > 0, "x has no columns");
    require(weight.shape(0) == n, "weight needs one element for each column of x");
    const Kernels& use = kernels();
    return each_row(x, n, [&](const float* from, float* to) {
        use.rms_norm(from, weight.data(), eps, size_of(n), to);
    });
}

auto layer_norm(const Rows& x, const Vector& weight, const Vector& bias, float eps) {
    const size_t n = x.shape(1);
    require(n > 0, "x has no columns");
    require(weight.shape(0) == n && bias.shape(0) == n,
            "weight and bias need one element for each column of x");
    const Kernels& use = kernels();
    return each_row(x, n, [&](const float* from, float* to) {
        use.layer_norm(from, weight.data(), bias.data(), eps, size_of(n), to);
    });
}

auto activate(const Rows& x, const std::string& activation, const std::optional<Vector>& learnt) {
    Activation kind;
    require(find_activation(activation.c_str(), &kind),
            "activation is '" + activation + "'; kernels.h says which there are");
    require(kind != Activation::xielu || (learnt && learnt->shape(0) == 3),
            "xielu needs three learnt numbers");
    const size_t width = x.shape(1);
    const Kernels& use = kernels();
    return each_row(x, width, [&](const float* from, float* to) {
        use.activate(from, size_of(width), kind, learnt ? learnt->data() : nullptr, to);
    });
}

auto gated(const Rows& gate_up, const std::string& activation) {
    require(gate_up.shape(1) % 2 == 0, "gate_up needs an even number of columns: two halves");
    Activation kind;
    require(find_activation(activation.c_str(), &kind) && kind != Activation::xielu,
            "activation is '" + activation + "'; allowed are silu, gelu_tanh, gelu, relu2, "
            "clamped_swiglu");
    const size_t width = gate_up.shape(1) / 2;
    const Kernels& use = kernels();
    return each_row(gate_up, width, [&](const float* from, float* to) {
        use.gated(from, size_of(width), kind, to);
    });
}

auto softcap(const Rows& x, float cap) {
    require(cap > 0.0f, "cap is not positive");
    const size_t rows = x.shape(0), n = x.shape(1);
    auto y = zeros<float>(rows * n);
    std::memcpy(y.get(), x.data(), rows * n * sizeof(float));
    for (size_t row = 0; row < rows; ++row) {  // one after another, without padding
        kernels().softcap(y.get() + row * n, size_of(n), cap);
    }
    return to_numpy(std::move(y), {rows, n});
}

auto vector(const Rows& x, void (*Kernels::*function)(const float*, int, float*)) {
    const size_t n = x.shape(1);
    const auto use = kernels().*function;
    return each_row(x, n, [&](const float* from, float* to) { use(from, size_of(n), to); });
}

// The bytes, and of each 32 inputs the scale and the scaled sum.
nb::tuple quantize(const Rows& x) {
    const size_t rows = x.shape(0), k = x.shape(1);
    require(k > 0, "x has no columns");
    InputBuffer buffer;
    const QuantRows out = buffer.view(size_of(rows), size_of(k)).codes;
    const size_t stretches = static_cast<size_t>(out.stretches()), width = stretches * STRETCH;
    {
        const nb::gil_scoped_release unlocked;
        std::vector<float> from(width);
        for (size_t row = 0; row < rows; ++row) {
            std::memcpy(from.data(), x.data() + row * k, k * sizeof(float));
            kernels().quantize(from.data(), out, size_of(row));
        }
    }
    auto q = zeros<int8_t>(rows * width);
    auto scale = zeros<float>(rows * stretches), sum = zeros<float>(rows * stretches);
    for (size_t row = 0; row < rows; ++row) {
        for (size_t stretch = 0; stretch < stretches; ++stretch) {
            const QuantStretch& from = *out.at(size_of(stretch), size_of(row));
            const size_t to = row * stretches + stretch;
            std::copy_n(from.q, STRETCH, q.get() + to * STRETCH);
            scale[to] = from.scale;
            sum[to] = from.sum;
        }
    }
    return nb::make_tuple(to_numpy(std::move(q), {rows, width}),
                          to_numpy(std::move(scale), {rows, stretches}),
                          to_numpy(std::move(sum), {rows, stretches}));
}

const float* norm_data(const std::optional<Vector>& norm, int head_dim) {
    require(!norm || norm->shape(0) == static_cast<size_t>(head_dim),
            "a norm's weight is not [head_dim]");
    return norm ? norm->data() : nullptr;
}

// Row r of qkv [rows, (heads + 2 kv_heads) * head_dim] at the position of cos[r], sin[r], its key
// and value into slot slots[r] of the caches of a KvLayer. Returns the queries.
auto rotary_kv(const Rows& qkv, const Rows& cos, const Rows& sin,
               const std::optional<Vector>& q_norm, const std::optional<Vector>& k_norm, float eps,
               const Any& k_cache, const Any& v_cache, const Indices& slots) {
    const KvType type = kv_type(k_cache.dtype(), v_cache.dtype());
    const int kv_heads = size_of(k_cache.shape(1)), head_dim = head_dim_of(type, k_cache.shape(2));
    const size_t rows = qkv.shape(0), rotary_dim = cos.shape(1);
    const int v_stride = round_up(head_dim, TILE);
    require(head_dim >= 8 && head_dim <= 256, "head_dim is not in 8..256");
    require(k_cache.shape(3) == TILE, "k_cache is not [blocks, kv_heads, head, 16]");
    require(v_cache.shape(0) == k_cache.shape(0) && v_cache.shape(1) == k_cache.shape(1) &&
                v_cache.shape(2) == TILE &&
                size_of(v_cache.shape(3)) == head_elements(type, v_stride),
            "v_cache is not [blocks, kv_heads, 16, head of head_dim rounded up to 16]");
    const int heads = size_of(qkv.shape(1)) / head_dim - 2 * kv_heads;
    require(heads > 0 && qkv.shape(1) == static_cast<size_t>(heads + 2 * kv_heads) * head_dim,
            "qkv is not [rows, (heads + 2 * kv_heads) * head_dim]");
    require(cos.shape(0) == rows && sin.shape(0) == rows && sin.shape(1) == rotary_dim &&
                rotary_dim % 2 == 0 && rotary_dim <= static_cast<size_t>(head_dim),
            "cos and sin are not [rows, rotary_dim], rotary_dim even and at most head_dim");
    require(slots.shape(0) == rows, "slots is not [rows]");
    for (size_t row = 0; row < rows; ++row) {
        const int slot = slots.data()[row];
        require(slot >= 0 && static_cast<size_t>(slot / TILE) < k_cache.shape(0),
                "a slot is outside the cache");
    }
    const AttentionShape shape{heads, kv_heads, head_dim, v_stride, 1.0f, 0.0f, 0, false, false};
    const KvLayer layer{k_cache.data(), v_cache.data(), type};
    const float* q_weight = norm_data(q_norm, head_dim);
    const float* k_weight = norm_data(k_norm, head_dim);
    const size_t width = static_cast<size_t>(heads) * head_dim;
    auto q = zeros<float>(rows * width);
    for (size_t row = 0; row < rows; ++row) {
        const RotaryArgs rotary{cos.data() + row * rotary_dim, sin.data() + row * rotary_dim,
                                size_of(rotary_dim), q_weight, k_weight, eps};
        const int slot = slots.data()[row];
        for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
            kernels().rotary_kv(qkv.data() + row * qkv.shape(1), shape, rotary, layer, slot / TILE,
                                slot % TILE, kv_head, q.get() + row * width);
        }
    }
    return to_numpy(std::move(q), {rows, width / head_dim, static_cast<size_t>(head_dim)});
}

// Exercises the pool: in each phase every piece adds one to its place and looks at what the phase
// before has left in the next place. Returns how many pieces of all phases found what they should,
// on a thread that the pool may have and in ascending order: phases * pieces.
int64_t pool_stress(int phases, int pieces) {
    const nb::gil_scoped_release unlocked;
    const ThreadPool::Turn turn = pool().take_turn();
    const int size = pool().size();
    std::vector<int> even(pieces, 0), odd(pieces, 0), last(size, -1);
    std::atomic<int64_t> right{0};
    for (int phase = 0; phase < phases; ++phase) {
        std::vector<int>&to = phase % 2 ? odd : even, &from = phase % 2 ? even : odd;
        std::fill(last.begin(), last.end(), -1);
        pool().each(pieces, [&](int piece, int thread) {
            const int times = ++to[piece];
            const bool ascends = thread >= 0 && thread < size && last[thread] < piece;
            last[thread] = piece;
            right.fetch_add(ascends && times == phase / 2 + 1 &&
                            from[(piece + 1) % pieces] == (phase + 1) / 2);
        });
    }
    return right.load();
}

// How many threads of `size` are active after each of these phases: (seconds, lost, own, others).
std::vector<int> crew(int size, const std::vector<std::tuple<double, double, int, int>>& phases) {
    Crew crew(size);
    std::vector<int> active;
    for (const auto& [seconds, lost, own, others] : phases) {
        crew.observe(seconds, lost, own, others);
        active.push_back(crew.active());
    }
    return active;
}

}  // namespace

void bind_rows(nb::module_& module) {
        module.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"));
    module.def("layer_norm", &layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
               nb::arg("eps"));
    module.def("activate", &activate, nb::arg("x"), nb::arg("activation"),
               nb::arg("learnt").none() = nb::none());
    module.def("gated", &gated, nb::arg("gate_up"), nb::arg("activation"));
    module.def("softcap", &softcap, nb::arg("x"), nb::arg("cap"));
    const auto x = nb::arg("x");
    module.def("exp", [](const Rows& rows) { return vector(rows, &Kernels::vector_exp); }, x);
    module.def("tanh", [](const Rows& rows) { return vector(rows, &Kernels::vector_tanh); }, x);
    module.def("erf", [](const Rows& rows) { return vector(rows, &Kernels::vector_erf); }, x);
    module.def("softplus", [](const Rows& rows) { return vector(rows, &Kernels::vector_softplus); },
               x);
    module.def("quantize", &quantize, nb::arg("x"));
    module.def("rotary_kv", &rotary_kv, nb::arg("qkv"), nb::arg("cos"), nb::arg("sin"),
               nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("eps"),
               nb::arg("k_cache").noconvert(), nb::arg("v_cache").noconvert(), nb::arg("slots"));
    module.def("pool_stress", &pool_stress, nb::arg("phases"), nb::arg("pieces"));
    module.def("crew", &crew, nb::arg("size"), nb::arg("phases"));
}

}  // namespace paceline
