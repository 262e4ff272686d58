// Packed linears: packing at load, the classes that hold them, and the machine's roofs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "linear_objects.h"
#include "pack.h"
#include "simd.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

template <typename T, int Dimensions>
using In = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
template <typename T> using Out = nb::ndarray<nb::numpy, T>;
using Bias = std::optional<In<float, 1>>;

template <typename T> Out<T> make_array(std::initializer_list<size_t> shape) {
    size_t count = 1;
    for (const size_t each : shape) {
        count *= each;
    }
    T* data = new T[count];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Out<T>(data, shape, owner);
}

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

struct Shape {
    int n, k;
};

Shape checked(int64_t n, int64_t k) {
    if (n < 1 || n > MAX_OUTPUTS || k < 1 || k > MAX_INPUTS) {
        refuse("a linear of " + std::to_string(n) + " outputs and " + std::to_string(k) +
               " inputs; allowed are 1.." + std::to_string(MAX_OUTPUTS) + " and 1.." +
               std::to_string(MAX_INPUTS));
    }
    return {static_cast<int>(n), static_cast<int>(k)};
}

template <typename T> Shape shape_of(const In<T, 2>& weight) {
    constexpr size_t TOO_MANY = std::numeric_limits<int>::max();
    return checked(std::min(weight.shape(0), TOO_MANY), std::min(weight.shape(1), TOO_MANY));
}

void check_size(const char* name, size_t got, size_t wanted) {
    if (got != wanted) {
        refuse(std::string(name) + " has " + std::to_string(got) + " elements; this linear needs " +
               std::to_string(wanted));
    }
}

size_t padded_outputs(Shape shape) { return size_t(round_up(shape.n, TILE)); }

// Runs `work` without the interpreter's lock; raises ValueError(message) where it returns false.
template <typename Work> void packing(const char* message, Work work) {
    bool good;
    {
        nb::gil_scoped_release release;
        good = work();
    }
    if (!good) {
        refuse(message);
    }
}

constexpr char NOT_FINITE[] = "a weight is NaN or infinite; it cannot be quantised";

auto py_pack_int8(In<float, 2> weight) {
    const Shape s = shape_of(weight);
    auto data = make_array<int8_t>({int8_bytes(s.n, s.k)});
    auto scale = make_array<float>({padded_outputs(s)});
    packing(NOT_FINITE, [&] {
        return pack_int8(weight.data(), s.n, s.k, data.data(), scale.data());
    });
    return std::make_pair(std::move(data), std::move(scale));
}

auto py_pack_int8_rows(In<int8_t, 2> q) {
    const Shape s = shape_of(q);
    auto data = make_array<int8_t>({int8_bytes(s.n, s.k)});
    packing("a quantised weight is -128; allowed are -127..127",
            [&] { return pack_int8_rows(q.data(), s.n, s.k, data.data()); });
    return data;
}

auto py_unpack_int8(In<int8_t, 1> data, int64_t n, int64_t k) {
    const Shape s = checked(n, k);
    check_size("data", data.shape(0), int8_bytes(s.n, s.k));
    auto q = make_array<int8_t>({size_t(s.n), size_t(s.k)});
    nb::gil_scoped_release release;
    unpack_int8(data.data(), s.n, s.k, q.data());
    return q;
}

auto py_pack_int4(In<float, 2> weight) {
    const Shape s = shape_of(weight);
    auto data = make_array<uint8_t>({int4_bytes(s.n, s.k)});
    packing(NOT_FINITE, [&] { return pack_int4(weight.data(), s.n, s.k, data.data()); });
    return data;
}

auto py_pack_q4_0(In<uint8_t, 2> blocks) {
    constexpr size_t BLOCK = 2 + GROUP / 2;
    if (blocks.shape(1) % BLOCK) {
        refuse("a row of Q4_0 blocks has " + std::to_string(blocks.shape(1)) +
               " bytes; a multiple of " + std::to_string(BLOCK) + " is needed");
    }
    constexpr size_t TOO_MANY = std::numeric_limits<int>::max();
    const Shape s = checked(std::min(blocks.shape(0), TOO_MANY),
                            std::min(blocks.shape(1), TOO_MANY) / BLOCK * GROUP);
    auto data = make_array<uint8_t>({int4_bytes(s.n, s.k)});
    packing("a scale of a Q4_0 block is NaN or infinite",
            [&] { return pack_q4_0(blocks.data(), s.n, s.k, data.data()); });
    return data;
}

auto py_unpack_int4(In<uint8_t, 1> data, int64_t n, int64_t k) {
    const Shape s = checked(n, k);
    check_size("data", data.shape(0), int4_bytes(s.n, s.k));
    auto weight = make_array<float>({size_t(s.n), size_t(s.k)});
    nb::gil_scoped_release release;
    unpack_int4(data.data(), s.n, s.k, weight.data());
    return weight;
}

// --- the classes --------------------------------------------------------------------------------

struct Int8LinearObject : LinearObject {};
struct Int4LinearObject : LinearObject {};

const float* keep_bias(LinearObject& self, const Bias& bias, Shape s) {
    if (!bias) {
        return nullptr;
    }
    check_size("bias", bias->shape(0), size_t(s.n));
    self.bias.assign(padded_outputs(s), 0.0f);
    std::copy_n(bias->data(), s.n, self.bias.data());
    return self.bias.data();
}

void init_int8(Int8LinearObject* place, In<int8_t, 1> data, In<float, 1> scale, Bias bias,
               int64_t n, int64_t k) {
    const Shape s = checked(n, k);
    check_size("data", data.shape(0), int8_bytes(s.n, s.k));
    check_size("scale", scale.shape(0), padded_outputs(s));
    auto self = std::make_unique<Int8LinearObject>();
    self->scale.assign(scale.data(), scale.data() + scale.shape(0));
    const float* kept = keep_bias(*self, bias, s);
    self->linear.int8 = {data.data(), self->scale.data(), kept, s.n, s.k};
    self->data = nb::ndarray<nb::ro>(data);
    self->nbytes = data.shape(0) + (self->scale.size() + self->bias.size()) * sizeof(float);
    new (place) Int8LinearObject(std::move(*self));
}

void init_int4(Int4LinearObject* place, In<uint8_t, 1> data, Bias bias, int64_t n, int64_t k) {
    const Shape s = checked(n, k);
    check_size("data", data.shape(0), int4_bytes(s.n, s.k));
    auto self = std::make_unique<Int4LinearObject>();
    const float* kept = keep_bias(*self, bias, s);
    self->linear.is_int4 = true;
    self->linear.int4 = {data.data(), kept, s.n, s.k};
    self->data = nb::ndarray<nb::ro>(data);
    self->nbytes = data.shape(0) + self->bias.size() * sizeof(float);
    new (place) Int4LinearObject(std::move(*self));
}

// --- running one alone --------------------------------------------------------------------------

template <typename T> struct Aligned {
    explicit Aligned(size_t count) : size(count) {
        constexpr size_t LINE = 64;
        const size_t bytes = (count * sizeof(T) + LINE - 1) / LINE * LINE;
        data = static_cast<T*>(std::aligned_alloc(LINE, std::max(bytes, LINE)));
        if (!data) {
            throw std::bad_alloc();
        }
        std::memset(data, 0, bytes);
    }
    ~Aligned() { std::free(data); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    T* data;
    size_t size;
};

// Room for quantised rows.
struct QuantBuffers {
    QuantBuffers(int rows, int k)
        : stride(round_up(k, K_MULTIPLE)), scales(size_t(rows) * scale_groups_of(k)),
          q(size_t(rows) * stride), scale(scales), scale_sums(scales),
          group_sums(size_t(rows) * (stride / GROUP)),
          rows{q.data, scale.data, scale_sums.data, group_sums.data, rows, k, stride,
               scale_groups_of(k)} {}
    int stride;
    size_t scales;
    Aligned<int8_t> q;
    Aligned<float> scale;
    Aligned<int32_t> scale_sums, group_sums;
    QuantRows rows;
};

// Quantises rows of `k` floats, one kernel call per row, from copies padded with zeros.
void quantize_rows(const float* x, const QuantRows& out) {
    const ThreadPool::Turn turn = pool().take_turn();
    Aligned<float> copies(size_t(pool().size()) * out.stride);
    pool().each(out.rows, [&](int row, int thread) {
        float* copy = copies.data + size_t(thread) * out.stride;
        std::copy_n(x + size_t(row) * out.k, out.k, copy);
        kernels().quantize(copy, out, row);
    });
}

auto py_linear(const LinearObject& self, In<float, 2> x) {
    constexpr size_t MAX_BATCH = 1 << 20;
    const Linear& linear = self.linear;
    if (x.shape(1) != size_t(linear.k())) {
        refuse("x has " + std::to_string(x.shape(1)) + " inputs per row; this linear takes " +
               std::to_string(linear.k()));
    }
    if (x.shape(0) > MAX_BATCH) {
        refuse("x has " + std::to_string(x.shape(0)) + " rows; at most " +
               std::to_string(MAX_BATCH) + " are allowed");
    }
    const int rows = static_cast<int>(x.shape(0));
    auto y = make_array<float>({size_t(rows), size_t(linear.n())});
    if (rows) {
        nb::gil_scoped_release release;
        QuantBuffers buffers(rows, linear.k());
        quantize_rows(x.data(), buffers.rows);
        run_linear(linear, buffers.rows, {y.data(), nullptr, linear.n(), 1.0f});
    }
    return y;
}

// --- measuring ----------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

double seconds_of(const std::function<void()>& work) {
    const auto began = Clock::now();
    work();
    return std::chrono::duration<double>(Clock::now() - began).count();
}

// Seconds per call of each linear in turn, `passes` times over: more linears than the caches hold
// show what memory costs. `rows` rows are quantised beforehand.
std::vector<double> times(const std::vector<const Linear*>& linears, int rows, int passes) {
    const Linear& one = *linears[0];
    QuantBuffers buffers(rows, one.k());
    for (size_t i = 0; i < buffers.q.size; ++i) {
        buffers.q.data[i] = static_cast<int8_t>(i * 37 % 255 - 127);
    }
    std::fill_n(buffers.scale.data, buffers.scales, 0.01f);
    Aligned<float> y(size_t(rows) * one.n());
    std::vector<double> found;
    for (int pass = 0; pass < passes; ++pass) {
        for (const Linear* linear : linears) {
            found.push_back(seconds_of([&] {
                run_linear(*linear, buffers.rows, {y.data, nullptr, one.n(), 1.0f});
            }));
        }
    }
    return found;
}

}  // namespace
}  // namespace paceline

void bind_linear(nb::module_& module) {
    using namespace paceline;
    module.def("pack_int8", py_pack_int8, nb::arg("weight").noconvert(),
               "Quantise float32 [n, k] to (int8 data, float32 scale [tiles * 16]).");
    module.def("pack_int8_rows", py_pack_int8_rows, nb::arg("q").noconvert(),
               "Pack int8 [n, k] of -127..127.");
    module.def("unpack_int8", py_unpack_int8, nb::arg("data").noconvert(), nb::arg("n"),
               nb::arg("k"), "The int8 [n, k] of packed data.");
    module.def("pack_int4", py_pack_int4, nb::arg("weight").noconvert(),
               "Quantise float32 [n, k] to 4 bits with a scale per 32 inputs.");
    module.def("pack_q4_0", py_pack_q4_0, nb::arg("blocks").noconvert(),
               "Pack GGUF Q4_0 blocks, uint8 [n, k / 32 * 18], as they are.");
    module.def("unpack_int4", py_unpack_int4, nb::arg("data").noconvert(), nb::arg("n"),
               nb::arg("k"), "The float32 [n, k] that packed 4-bit data stands for.");

    nb::class_<LinearObject>(module, "Linear", "A packed linear of either kind.")
        .def_prop_ro("n", [](const LinearObject& self) { return self.linear.n(); })
        .def_prop_ro("k", [](const LinearObject& self) { return self.linear.k(); })
        .def_prop_ro("nbytes", [](const LinearObject& self) { return self.nbytes; })
        .def("linear", py_linear, nb::arg("x").noconvert(),
             "float32 [rows, k] to [rows, n]; rows are quantised to 8 bits, with a scale per 128 "
             "inputs.");
    nb::class_<Int8LinearObject, LinearObject>(module, "Int8Linear")
        .def("__init__", init_int8, nb::arg("data").noconvert(), nb::arg("scale").noconvert(),
             nb::arg("bias").noconvert().none(), nb::arg("n"), nb::arg("k"));
    nb::class_<Int4LinearObject, LinearObject>(module, "Int4Linear")
        .def("__init__", init_int4, nb::arg("data").noconvert(), nb::arg("bias").noconvert().none(),
             nb::arg("n"), nb::arg("k"));

    module.def("time_linears", [](nb::list objects, int rows, int passes) {
        std::vector<const Linear*> linears;
        for (nb::handle each : objects) {
            linears.push_back(&linear_of(each));
            if (linears[0]->n() != linears.back()->n() || linears[0]->k() != linears.back()->k()) {
                refuse("the linears have different shapes");
            }
        }
        if (linears.empty() || rows < 1 || rows > 1 << 16 || passes < 1 || passes > 1 << 20) {
            refuse("nothing to time");
        }
        std::vector<double> found;
        {
            nb::gil_scoped_release release;
            found = times(linears, rows, passes);
        }
        nb::list seconds;
        for (const double each : found) {
            seconds.append(each);
        }
        return seconds;
    }, nb::arg("linears"), nb::arg("rows"), nb::arg("passes"),
       "Seconds of each call, going round the linears `passes` times.");
    module.def("bandwidth", [](int megabytes) {
        if (megabytes < 1 || megabytes > 1 << 16) {
            refuse("megabytes is not in 1..65536");
        }
        nb::gil_scoped_release release;
        constexpr int PASSES = 9, PIECE = 1 << 20, STEP = 64;
        Aligned<int8_t> array(size_t(megabytes) * PIECE);
        std::atomic<int32_t> sink{0};
        std::vector<double> seconds;
        for (int pass = 0; pass < PASSES; ++pass) {
            seconds.push_back(seconds_of([&] {
                pool().each(megabytes, [&](int at, int) {
                    i32x16 sums[4] = {splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)};
                    const int8_t* piece = array.data + size_t(at) * PIECE;
                    for (int i = 0; i < PIECE; i += 4 * STEP) {
                        for (int j = 0; j < 4; ++j) {
                            const int8_t* from = piece + i + j * STEP;
                            sums[j] =
                                sums[j] + load_i32(reinterpret_cast<const int32_t*>(from));
                        }
                    }
                    int32_t lane[LANES];
                    store_i32(lane, sums[0] + sums[1] + sums[2] + sums[3]);
                    sink.fetch_add(lane[0] + lane[7]);
                });
            }));
        }
        return double(array.size) / median(seconds) / 1e9;
    }, nb::arg("megabytes") = 512, "GB/s at which all threads together read memory.");
}
