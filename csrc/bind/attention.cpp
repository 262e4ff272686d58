// Python bindings of attention (for its tests) and of the KV cache's slots: to move, fill and read
// them over all layers. Checks every shape and index; a kernel checks nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "kernels/halves.h"
#include "kernels/kernels.h"
#include "bind/kv_arrays.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using Cache = KvArray;
using ConstCache = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Slots = Array<const int64_t, 1>;

// --- attention ----------------------------------------------------------------------------------

struct Problem {
    AttentionShape shape;
    KvLayer layer;
    AttentionSpan span;
    std::vector<AttentionRow> rows;
    const float* q;
    int rows_per_item;
};

// All items over the pool, then all rows' merges.
void run_attention(const Problem& p, float* y) {
    const AttentionShape& shape = p.shape;
    const int num_rows = static_cast<int>(p.rows.size());
    int first = std::numeric_limits<int>::max(), last = 0;
    for (const AttentionRow& row : p.rows) {
        first = std::min(first, first_chunk(shape, row.position));
        last = std::max(last, last_chunk(row.position));
    }
    const int chunks = last - first + 1;
    const int stride = partial_stride(shape), row_stride = chunks * stride;
    std::vector<float> partials(static_cast<size_t>(num_rows) * shape.heads * row_stride);
    const int groups = (num_rows + p.rows_per_item - 1) / p.rows_per_item;
    const Kernels& kernel = kernels();
    const size_t partials_of_row = static_cast<size_t>(shape.heads) * row_stride;
    const int q_stride = shape.heads * shape.head_dim;
    pool().each(groups * shape.kv_heads * chunks, [&](int item, int) {
        const int chunk = item % chunks, kv_head = item / chunks % shape.kv_heads;
        const int row = item / chunks / shape.kv_heads * p.rows_per_item;
        kernel.attend(shape, p.layer, p.span, p.rows.data() + row,
                      std::min(p.rows_per_item, num_rows - row),
                      p.q + static_cast<size_t>(row) * q_stride, q_stride, kv_head, first + chunk,
                      partials.data() + row * partials_of_row +
                          static_cast<size_t>(chunk) * stride,
                      row_stride);
    });
    pool().each(num_rows, [&](int row, int) {
        const int position = p.rows[row].position;
        for (int h = 0; h < shape.heads; ++h) {
            kernel.merge(shape,
                         partials.data() + row * partials_of_row +
                             static_cast<size_t>(h) * row_stride,
                         stride, first_chunk(shape, position) - first, last_chunk(position) - first,
                         nullptr,
                         y + static_cast<size_t>(row) * q_stride +
                             static_cast<size_t>(h) * shape.head_dim);
        }
    });
}

// Appends the row's nodes to `nodes`, checked, and returns the largest slot that the row sees.
int64_t check_row(int start, int position, nb::handle path, std::vector<int32_t>& nodes) {
    require(position >= start, "a position is below start");
    if (path.is_none()) {
        return position;
    }
    const auto array = nb::cast<Array<const int32_t, 1>>(path);
    require(array.shape(0) == static_cast<size_t>(position) - start + 1,
            "a path does not hold position - start + 1 nodes");
    for (size_t i = 0; i < array.shape(0); ++i) {
        require(i == 0 ? array(0) == 0 : array(i) > array(i - 1),
                "a path does not ascend from node 0");
        nodes.push_back(array(i));
    }
    return static_cast<int64_t>(start) + nodes.back();
}

auto attend(Array<const float, 3> q, ConstCache k, ConstCache v, Array<const int32_t, 1> blocks,
            int start, Array<const int32_t, 1> positions, nb::list paths, float scale,
            float softcap, int window, int rows_per_item) {
    require(k.ndim() == 4 && v.ndim() == 4 && k.shape(0) == v.shape(0) &&
                k.shape(1) == v.shape(1) && k.shape(3) == TILE && v.shape(2) == TILE,
            "k is not [blocks, kv_heads, head, 16] or v not [blocks, kv_heads, 16, head]");
    const KvType type = kv_type(k.dtype(), v.dtype());
    const int rows = static_cast<int>(q.shape(0)), heads = static_cast<int>(q.shape(1));
    const int head_dim = static_cast<int>(q.shape(2)), kv_heads = static_cast<int>(k.shape(1));
    const int v_stride = round_up(head_dim, TILE);
    require(head_dim <= MAX_HEAD_DIM, "head_dim is above " + std::to_string(MAX_HEAD_DIM));
    require(head_dim > 0 && static_cast<int>(k.shape(2)) == head_elements(type, head_dim),
            "q and k have different head dimensions");
    require(static_cast<int>(v.shape(3)) == head_elements(type, v_stride),
            "v's rows are not heads of head_dim rounded up to 16");
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
            "the query heads are no multiple of the KV heads");
    require(positions.shape(0) == q.shape(0) && paths.size() == q.shape(0),
            "positions and paths do not have one entry per row");
    require(start >= 0 && window >= 0 && softcap >= 0.0f && rows_per_item > 0,
            "start, window or softcap is negative, or rows_per_item not positive");
    Problem problem = {
        {heads, kv_heads, head_dim, v_stride, scale, softcap, window, false, false},
        {const_cast<void*>(k.data()), const_cast<void*>(v.data()), type},
        {blocks.data(), start},
        {},
        q.data(),
        rows_per_item};
    std::vector<int32_t> nodes;
    std::vector<size_t> first_node;
    int64_t last_slot = -1;
    for (int r = 0; r < rows; ++r) {
        first_node.push_back(nodes.size());
        last_slot = std::max(last_slot, check_row(start, positions(r), paths[r], nodes));
    }
    require(last_slot < static_cast<int64_t>(blocks.shape(0)) * TILE,
            "a row sees slots beyond the block table");
    for (size_t i = 0; i < blocks.shape(0); ++i) {
        require(blocks(i) >= 0 && static_cast<size_t>(blocks(i)) < k.shape(0),
                "a block is not in the cache");
    }
    for (int r = 0; r < rows; ++r) {
        problem.rows.push_back(
            {positions(r), paths[r].is_none() ? nullptr : nodes.data() + first_node[r],
             positions(r)});
    }
    float* y = new float[q.size()];
    nb::capsule owner(y, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    if (rows > 0) {
        nb::gil_scoped_release release;
        run_attention(problem, y);
    }
    return nb::ndarray<nb::numpy, float, nb::ndim<3>>(y, {q.shape(0), q.shape(1), q.shape(2)},
                                                      owner);
}

// --- slots of the KV cache ----------------------------------------------------------------------

struct KvShape {
    size_t layers, blocks, kv_heads, key, value;  // elements of a head's key and value
    KvType type;

    size_t head_dim() const { return static_cast<size_t>(head_dim_of(type, key)); }
    size_t v_stride() const { return static_cast<size_t>(head_dim_of(type, value)); }
    // The first element of a key; the next one is TILE elements on.
    size_t k_at(size_t layer, int64_t slot, size_t head) const {
        return head_at(layer, slot, head) * key * TILE + static_cast<size_t>(slot) % TILE;
    }
    // The first element of a value; the next one follows it.
    size_t v_at(size_t layer, int64_t slot, size_t head) const {
        return (head_at(layer, slot, head) * TILE + static_cast<size_t>(slot) % TILE) * value;
    }

  private:
    size_t head_at(size_t layer, int64_t slot, size_t head) const {
        return (layer * blocks + static_cast<size_t>(slot) / TILE) * kv_heads + head;
    }
};

template <typename A> KvShape check_cache(const A& k, const A& v) {
    require(k.ndim() == 5 && v.ndim() == 5 && k.shape(0) == v.shape(0) &&
                k.shape(1) == v.shape(1) && k.shape(2) == v.shape(2) && k.shape(4) == TILE &&
                v.shape(3) == TILE,
            "k is not [layers, blocks, kv_heads, head, 16] or v not [layers, blocks, kv_heads, 16, "
            "head]");
    const KvType type = kv_type(k.dtype(), v.dtype());
    const int v_stride = round_up(head_dim_of(type, k.shape(3)), TILE);
    require(v.shape(4) == 0 || static_cast<int>(v.shape(4)) == head_elements(type, v_stride),
            "v's rows are not heads of head_dim rounded up to 16, and not empty");
    return {k.shape(0), k.shape(1), k.shape(2), k.shape(3), v.shape(4), type};
}

void check_slots(const KvShape& shape, const Slots& slots) {
    for (size_t i = 0; i < slots.shape(0); ++i) {
        require(slots(i) >= 0 && static_cast<size_t>(slots(i)) < shape.blocks * TILE,
                "slot " + std::to_string(slots(i)) + " is not in the cache of " +
                    std::to_string(shape.blocks * TILE) + " slots");
    }
}

// Calls work(layer) for all layers, over the pool.
template <typename F> void each_layer(const KvShape& shape, const F& work) {
    nb::gil_scoped_release release;
    pool().each(static_cast<int>(shape.layers),
                [&](int layer, int) { work(static_cast<size_t>(layer)); });
}

// In order: a target may be a later move's source, but no earlier one's.
template <typename E>
void move_slots(const KvShape& shape, E* k, E* v, const Slots& source, const Slots& target) {
    each_layer(shape, [&](size_t layer) {
        for (size_t i = 0; i < source.shape(0); ++i) {
            for (size_t head = 0; source(i) != target(i) && head < shape.kv_heads; ++head) {
                const E* from = k + shape.k_at(layer, source(i), head);
                E* to = k + shape.k_at(layer, target(i), head);
                for (size_t d = 0; d < shape.key; ++d) {
                    to[d * TILE] = from[d * TILE];
                }
                std::memcpy(v + shape.v_at(layer, target(i), head),
                            v + shape.v_at(layer, source(i), head), shape.value * sizeof(E));
            }
        }
    });
}

void move_kv(Cache k, Cache v, Slots source, Slots target) {
    const KvShape shape = check_cache(k, v);
    check_slots(shape, source);
    check_slots(shape, target);
    require(source.shape(0) == target.shape(0), "source and target have different lengths");
    with_elements(shape.type, [&](auto element) {
        using E = decltype(element);
        move_slots(shape, static_cast<E*>(k.data()), static_cast<E*>(v.data()), source, target);
    });
}

void narrow(float x, float& y) { y = x; }
void narrow(float x, Bfloat16& y) { y.bits = to_bf16(x); }
void narrow(float x, Float16& y) { y.bits = f32_to_f16(x); }
float widen(float x) { return x; }
float widen(Bfloat16 x) { return from_bf16(x.bits); }
float widen(Float16 x) { return f16_to_f32(x.bits); }

// The elements of a head of `width` numbers, of which the first `dim` are `value`.
template <typename E> std::vector<E> constant_head(size_t width, size_t dim, float value) {
    std::vector<E> head(width, E{});
    for (size_t d = 0; d < dim; ++d) {
        narrow(value, head[d]);
    }
    return head;
}
template <> std::vector<Int8> constant_head(size_t width, size_t dim, float value) {
    const uint16_t bits = kv_scale(std::abs(value));
    const float scale = from_bf16(bits);
    const size_t groups = (width + KV_GROUP - 1) / KV_GROUP;
    std::vector<Int8> head(width + 2 * groups, 0);
    std::fill_n(head.begin(), scale == scale ? dim : 0, static_cast<Int8>(std::rint(value / scale)));
    for (size_t group = 0; group < groups; ++group) {
        std::memcpy(head.data() + width + 2 * group, &bits, sizeof bits);
    }
    return head;
}

template <typename E>
void fill_slots(const KvShape& shape, E* k, E* v, const Slots& slots, float value) {
    const auto key = constant_head<E>(shape.head_dim(), shape.head_dim(), value);
    const size_t dim = shape.value > 0 ? shape.head_dim() : 0;
    const auto row = constant_head<E>(shape.v_stride(), dim, value);
    each_layer(shape, [&](size_t layer) {
        for (size_t i = 0; i < slots.shape(0); ++i) {
            for (size_t head = 0; head < shape.kv_heads; ++head) {
                E* keys = k + shape.k_at(layer, slots(i), head);
                for (size_t d = 0; d < shape.key; ++d) {
                    keys[d * TILE] = key[d];
                }
                std::copy(row.begin(), row.end(), v + shape.v_at(layer, slots(i), head));
            }
        }
    });
}

void fill_kv(Cache k, Cache v, Slots slots, float value) {
    const KvShape shape = check_cache(k, v);
    check_slots(shape, slots);
    with_elements(shape.type, [&](auto element) {
        using E = decltype(element);
        fill_slots(shape, static_cast<E*>(k.data()), static_cast<E*>(v.data()), slots, value);
    });
}

// Number `d` of a head of `width`, whose elements are `step` apart.
template <typename E> float number_at(const E* head, size_t step, size_t, size_t d) {
    return widen(head[d * step]);
}
float number_at(const Int8* head, size_t step, size_t width, size_t d) {
    const Int8* bytes = head + (width + d / KV_GROUP * 2) * step;
    const Int8 both[2] = {bytes[0], bytes[step]};
    uint16_t scale;
    std::memcpy(&scale, both, sizeof scale);
    return static_cast<float>(head[d * step]) * from_bf16(scale);
}

template <typename E>
void read_slots(const KvShape& shape, const E* k, const E* v, const Slots& slots, float* keys,
                float* values) {
    each_layer(shape, [&](size_t layer) {
        const size_t head_dim = shape.head_dim(), v_stride = shape.v_stride();
        size_t at = layer * slots.shape(0) * shape.kv_heads * head_dim;
        for (size_t i = 0; i < slots.shape(0); ++i) {
            for (size_t head = 0; head < shape.kv_heads; ++head) {
                const E* from_k = k + shape.k_at(layer, slots(i), head);
                const E* from_v = v + shape.v_at(layer, slots(i), head);
                for (size_t d = 0; d < head_dim; ++d, ++at) {
                    keys[at] = number_at(from_k, TILE, head_dim, d);
                    values[at] = number_at(from_v, 1, v_stride, d);
                }
            }
        }
    });
}

nb::tuple read_kv(ConstCache k, ConstCache v, Slots slots) {
    using Result = nb::ndarray<nb::numpy, float, nb::ndim<4>>;
    const KvShape shape = check_cache(k, v);
    check_slots(shape, slots);
    const size_t size = shape.layers * slots.shape(0) * shape.kv_heads * shape.head_dim();
    const auto release = [](void* p) noexcept { delete[] static_cast<float*>(p); };
    float* keys = new float[size];
    nb::capsule keys_owner(keys, release);
    float* values = new float[size];
    nb::capsule values_owner(values, release);
    with_elements(shape.type, [&](auto element) {
        using E = decltype(element);
        read_slots(shape, static_cast<const E*>(k.data()), static_cast<const E*>(v.data()), slots,
                   keys, values);
    });
    const auto sizes = {shape.layers, slots.shape(0), shape.kv_heads, shape.head_dim()};
    return nb::make_tuple(Result(keys, sizes, keys_owner), Result(values, sizes, values_owner));
}

}  // namespace

void bind_attention(nb::module_& module) {
    module.def("attend", attend, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("blocks"),
               nb::arg("start"), nb::arg("positions"), nb::arg("paths"), nb::arg("scale"),
               nb::arg("softcap") = 0.0f, nb::arg("window") = 0, nb::arg("rows_per_item") = 8,
               "Attention of one span's rows with one layer's cache: [rows, heads, head_dim].");
    module.def("move_kv", move_kv, nb::arg("k"), nb::arg("v"), nb::arg("source"),
               nb::arg("target"), "Copies slots over all layers, in the order given.");
    module.def("fill_kv", fill_kv, nb::arg("k"), nb::arg("v"), nb::arg("slots"), nb::arg("value"),
               "Sets every key and value of the slots, over all layers.");
    module.def("read_kv", read_kv, nb::arg("k"), nb::arg("v"), nb::arg("slots"),
               "Keys and values of the slots, each [layers, slots, kv_heads, head_dim] float32.");
}

}  // namespace paceline
