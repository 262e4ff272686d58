// Packed linears: packing at load, the classes that hold them, and the machine's roofs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "forward/buffers.h"
#include "kernels/kernels.h"
#include "bind/linear_objects.h"
#include "packing/pack.h"
#include "kernels/simd.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

template <typename T> using Out = nb::ndarray<nb::numpy, T>;
using Bias = std::optional<Vector>;

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

template <typename T> Shape shape_of(const Array<const T, 2>& weight) {
    constexpr size_t TOO_MANY = std::numeric_limits<int>::max();
    return checked(std::min(weight.shape(0), TOO_MANY), std::min(weight.shape(1), TOO_MANY));
}

void check_size(const char* name, size_t got, size_t wanted) {
    if (got != wanted) {
        refuse(std::string(name) + " has " + std::to_string(got) + " elements; this linear needs " +
               std::to_string(wanted));
    }
}

// The format of a name; raises ValueError.
WeightFormat format_of(const std::string& name) {
    WeightFormat format;
    if (!find_format(name.c_str(), &format)) {
        refuse("no format of weights is called '" + name.substr(0, 20) + "'");
    }
    return format;
}

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

using TileBytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object py_pack(const std::string& name, Array<const uint8_t, 2> rows, int64_t k, nb::object given) {
    const WeightFormat format = format_of(name);
    const Shape s = checked(std::min<size_t>(rows.shape(0), MAX_OUTPUTS + 1), k);
    if (rows.shape(1) != raw_row_bytes(format, s.k)) {
        refuse("a row of " + name + " has " + std::to_string(rows.shape(1)) + " bytes; " +
               std::to_string(raw_row_bytes(format, s.k)) + " are needed for " +
               std::to_string(s.k) + " inputs");
    }
    const size_t size = packed_bytes(format, s.n, s.k);
    const nb::object data = given.is_none() ? nb::cast(make_array<uint8_t>({size})) : given;
    TileBytes bytes;
    if (!nb::try_cast(data, bytes, false)) {
        throw nb::type_error("what is packed goes to an array of bytes, uint8 [bytes]");
    }
    check_size("data", bytes.shape(0), size);
    packing("a block's scale is NaN or infinite",
            [&] { return pack_rows(format, rows.data(), s.n, s.k, bytes.data()); });
    return data;
}

auto py_quantise(const std::string& name, Array<const float, 2> weight) {
    const WeightFormat format = format_of(name);
    if (!can_quantise(format)) {
        refuse("floats are quantised to Q8_0, Q4_0, Q3_K or Q2_K, not to " + name);
    }
    const Shape s = shape_of(weight);
    auto rows = make_array<uint8_t>({size_t(s.n), raw_row_bytes(format, s.k)});
    packing("a weight is NaN or infinite; it cannot be quantised",
            [&] { return quantise(format, weight.data(), s.n, s.k, rows.data()); });
    return rows;
}

// --- the class ----------------------------------------------------------------------------------

// Keeps which input each column is of. Raises ValueError unless each input has one column.
const int32_t* add_order(LinearObject& self, const Array<const int32_t, 1>& order, int k) {
    check_size("order", order.shape(0), size_t(k));
    const auto& kept = self.orders.emplace_back(order.data(), order.data() + k);
    std::vector<bool> seen(kept.size(), false);
    for (const int32_t input : kept) {
        const bool is_input = input >= 0 && input < k;
        if (!is_input || seen[size_t(input)]) {
            refuse("an order has each input from 0 to " + std::to_string(k - 1) +
                   " once; this one has " + std::to_string(input) +
                   (is_input ? " twice" : ""));
        }
        seen[size_t(input)] = true;
    }
    self.nbytes += kept.size() * sizeof(int32_t);
    return kept.data();
}

// A part as Python has it: (format, data, outputs), and the order of its inputs if it has one.
struct Part {
    std::string name;
    Array<const uint8_t, 1> data;
    int64_t n;
    std::optional<Array<const int32_t, 1>> order;
};

Part part_of(nb::handle object) {
    const auto tuple = nb::cast<nb::tuple>(object);
    if (tuple.size() != 3 && tuple.size() != 4) {
        refuse("a part is (format, data, outputs) or (format, data, outputs, order)");
    }
    Part part{nb::cast<std::string>(tuple[0]), {}, nb::cast<int64_t>(tuple[2]), {}};
    if (!nb::try_cast(tuple[1], part.data, false)) {
        throw nb::type_error("a part's data is not an array of bytes, uint8 [bytes]");
    }
    if (tuple.size() == 4 && !tuple[3].is_none()) {
        if (!nb::try_cast(tuple[3], part.order.emplace(), false)) {
            throw nb::type_error("a part's order is not an array of int32 [k]");
        }
    }
    return part;
}

// Adds outputs in a format of their own; `bias` is that of the first of them, or null.
void add_part(LinearObject& self, const Part& added, const float* bias, int64_t k) {
    const Shape s = checked(added.n, k);
    const WeightFormat format = format_of(added.name);
    const auto& data = added.data;
    check_size("data", data.shape(0), packed_bytes(format, s.n, s.k));
    const float* kept = nullptr;
    if (bias) {
        std::vector<float>& copy = self.biases.emplace_back(size_t(round_up(s.n, TILE)), 0.0f);
        std::copy_n(bias, s.n, copy.data());
        self.nbytes += copy.size() * sizeof(float);
        kept = copy.data();
    }
    LinearPart part;
    part.is_float = format.is_float;
    part.blocks = {data.data(), kept, format.block, s.n, s.k};
    part.floats = {data.data(), kept, format.floats, s.n, s.k};
    part.order = added.order ? add_order(self, *added.order, s.k) : nullptr;
    self.linear.add(part);
    self.nbytes += data.shape(0);
    self.data.emplace_back(data);
}

void init_linear(LinearObject* place, nb::sequence parts, Bias bias, int64_t k) {
    auto self = std::make_unique<LinearObject>();
    const size_t count = nb::len(parts);
    if (count < 1 || count > Linear::MOST_PARTS) {
        refuse("a linear has 1 to 4 parts, not " + std::to_string(count));
    }
    int64_t outputs = 0;
    for (nb::handle each : parts) {
        const Part part = part_of(each);
        checked(part.n, k);
        if (bias && outputs + part.n > int64_t(bias->shape(0))) {
            refuse("bias has " + std::to_string(bias->shape(0)) + " elements; this linear needs more");
        }
        add_part(*self, part, bias ? bias->data() + outputs : nullptr, k);
        outputs += part.n;
    }
    if (outputs > MAX_OUTPUTS) {
        refuse("a linear has at most " + std::to_string(MAX_OUTPUTS) + " outputs");
    }
    if (bias) {
        check_size("bias", bias->shape(0), size_t(outputs));
    }
    new (place) LinearObject(std::move(*self));
}

auto py_rows(const LinearObject& self, Array<const int32_t, 1> outputs, float multiplier) {
    const size_t count = outputs.shape(0), k = size_t(self.linear.k());
    for (size_t i = 0; i < count; ++i) {
        if (outputs.data()[i] < 0 || outputs.data()[i] >= self.linear.n()) {
            refuse("output " + std::to_string(outputs.data()[i]) + " is outside of the linear's " +
                   std::to_string(self.linear.n()));
        }
    }
    auto y = make_array<float>({count, k});
    nb::gil_scoped_release release;
    const size_t stride = size_t(round_up(self.linear.k(), TILE));
    Buffer<float> row(2 * stride);
    for (size_t i = 0; i < count; ++i) {
        self.linear.gather(outputs.data()[i], multiplier, row.get(), row.get() + stride);
        std::copy_n(row.get(), k, y.data() + i * k);
    }
    return y;
}

// --- running one alone --------------------------------------------------------------------------

// Rows of `k` floats, one kernel call per row, from copies padded with zeros.
void take_rows(const Linear& linear, const float* x, const Inputs& inputs) {
    const ThreadPool::Turn turn = pool().take_turn();
    const int k = linear.k(), stride = round_up(k, STRETCH);
    Buffer<float> copies(size_t(pool().size()) * 2 * stride);
    pool().each(inputs.codes.rows, [&](int row, int thread) {
        float* copy = copies.get() + size_t(thread) * 2 * stride;
        std::copy_n(x + size_t(row) * k, k, copy);
        linear.take(copy, inputs, row, copy + stride);
    });
}

auto py_linear(const LinearObject& self, Array<const float, 2> x) {
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
        InputBuffer buffer;
        const Inputs inputs = buffer.view(rows, linear.k(), linear.num_orders);
        take_rows(linear, x.data(), inputs);
        run_linear(linear, inputs, {y.data(), nullptr, linear.n(), 1.0f});
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
    std::vector<float> values(size_t(rows) * one.k());
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(static_cast<int>(i * 37 % 255) - 127);
    }
    InputBuffer buffer;
    const Inputs x = buffer.view(rows, one.k(), Linear::MOST_PARTS);
    take_rows(one, values.data(), x);
    Buffer<float> y(size_t(rows) * one.n());
    std::vector<double> found;
    for (int pass = 0; pass < passes; ++pass) {
        for (const Linear* linear : linears) {
            found.push_back(seconds_of([&] {
                run_linear(*linear, x, {y.get(), nullptr, one.n(), 1.0f});
            }));
        }
    }
    return found;
}

}  // namespace

void bind_linear(nb::module_& module) {
        module.def("block_formats", [] {
        nb::dict formats;
        for (const BlockShape& shape : BLOCK_SHAPES) {
            formats[shape.name] = nb::make_tuple(shape.unit, shape.raw_bytes);
        }
        return formats;
    }, "Of each block format: inputs of a block, and bytes.");
    module.def("packed_bytes", [](const std::string& name, int64_t n, int64_t k) {
        const Shape s = checked(n, k);
        return packed_bytes(format_of(name), s.n, s.k);
    }, nb::arg("format"), nb::arg("n"), nb::arg("k"));
    module.def("pack", py_pack, nb::arg("format"), nb::arg("rows").noconvert(), nb::arg("k"),
               nb::arg("data").none() = nb::none(),
               "Pack uint8 [n, bytes of an output's weights] as they are, into tiles: into `data`, "
               "uint8 [packed_bytes], or into an array of its own.");
    module.def("quantise", py_quantise, nb::arg("format"), nb::arg("weight").noconvert(),
               "Quantise float32 [n, k] to blocks, uint8 [n, bytes of a row]: Q8_0 or Q4_0.");

    nb::class_<LinearObject>(module, "Linear", "A packed linear.")
        .def("__init__", init_linear, nb::arg("parts"), nb::arg("bias").noconvert().none(),
             nb::arg("k"),
             "Of 1 to 4 parts (format, data uint8, outputs, order): the order, int32 [k], says "
             "which input each column is of; without one, or with None, they follow one another.")
        .def_prop_ro("n", [](const LinearObject& self) { return self.linear.n(); })
        .def_prop_ro("k", [](const LinearObject& self) { return self.linear.k(); })
        .def_prop_ro("nbytes", [](const LinearObject& self) { return self.nbytes; })
        .def_prop_ro("reads", [](const LinearObject& self) {
            const LinearPart& first = self.linear.parts[0];
            nb::object order = nb::none();
            if (first.order) {
                auto copy = make_array<int32_t>({size_t(first.k())});
                std::copy_n(first.order, first.k(), copy.data());
                order = nb::cast(copy);
            }
            return nb::make_tuple(!first.is_float, order);
        }, "Whether the first part takes quantised inputs, and their order, or None.")
        .def("rows", py_rows, nb::arg("outputs").noconvert(), nb::arg("multiplier") = 1.0f,
             "The weights of some outputs as float32 [outputs, k].")
        .def("linear", py_linear, nb::arg("x").noconvert(),
             "float32 [rows, k] to [rows, n]; rows are quantised to 8 bits, with a scale per 32 "
             "inputs.");

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
        const Buffer<int8_t> array(size_t(megabytes) * PIECE);
        std::atomic<int32_t> sink{0};
        std::vector<double> seconds;
        for (int pass = 0; pass < PASSES; ++pass) {
            seconds.push_back(seconds_of([&] {
                pool().each(megabytes, [&](int at, int) {
                    i32x16 sums[4] = {splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)};
                    const int8_t* piece = array.get() + size_t(at) * PIECE;
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
        return double(array.size()) / median(seconds) / 1e9;
    }, nb::arg("megabytes") = 512, "GB/s at which all threads together read memory.");
}

}  // namespace paceline
