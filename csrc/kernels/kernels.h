// The kernels of one instruction-set level, and the data they work on. Knows no threads and no
// Python: a kernel computes the rows or output tiles that it is given, on the calling thread.
//
// Every kernel treats each row by one fixed program, so that a row's bits depend neither on the
// other rows nor on how the work was cut. Row buffers are float32 with a stride that is a multiple
// of 16; what lies between a row's end and the next multiple of 16 is zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_types.h"

namespace paceline {

constexpr int TILE = 16;         // outputs of a weight tile, tokens of a KV block, lanes of a vector
constexpr int QUAD = 4;          // bytes of one dot-product lane
constexpr int KEY_CHUNK = 512;   // keys of one partial attention result; fixed, lest bits depend on it

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// A row's 32 inputs of a stretch, quantised to -127..127, with their scale. Inputs past the k-th are
// zero. What depends on sums of q is kept ready for the linears. It is a cache line, so that threads
// that quantise neighbouring rows do not fight for lines.
struct alignas(64) QuantStretch {
    int8_t q[STRETCH];
    float scale;
    float sum;              // scale * sum of q
    int32_t start;          // -CODE_ZERO * sum of q
    float half_sum[2];      // the same of every 16 inputs
    int32_t half_start[2];
};

// Quantised activations, stretch by stretch, so that what several rows have of one lies together.
struct QuantRows {
    QuantStretch* data;  // [stretches, stride]
    int rows, k;
    int stride;  // rows of the memory, of which these are some

    QuantStretch* at(int stretch, int row) const { return data + ptrdiff_t(stretch) * stride + row; }

    int stretches() const { return (k + STRETCH - 1) / STRETCH; }
};

// Quantised weights in tiles of 16 outputs: see block_types.h. Codes of four bits lie as 4 vectors
// per stretch, byte [i, output, lane] with input 4 i + lane in its low and 16 + 4 i + lane in its
// high nibble. Two bits: 2 vectors, byte [i, output, lane] with inputs 16 i + 4 j + lane from bit
// 2 j on. One bit: 1 vector, byte [output, lane] with input 4 j + lane in bit j. Eight bits: 8
// vectors, byte [i, output, lane] with input 4 i + lane. Codes of 3, 5 and 6 bits are their lower 2
// or 4 bits, then the others.
struct BlockWeights {
    const uint8_t* data;
    const float* bias;  // [tiles * 16] or null
    BlockType type;
    int n, k;
};

// Rows of float32 inputs.
struct FloatRows {
    float* x;  // [rows, stride]; zero from the k-th to the next multiple of 16
    int rows, k, stride;
};

enum class FloatType : uint8_t { f32, f16, bf16, f8e4m3 };
constexpr int bytes_of(FloatType type) {
    return type == FloatType::f32 ? 4 : type == FloatType::f8e4m3 ? 1 : 2;
}
constexpr int FLOAT_RUN = 32;      // inputs that are summed up before the sum is added to the others
constexpr int SCALE_INPUTS = 128;  // of an FP8 weight that share a scale

// Weights that stay the floats they are: y[n] = sum_k w[n, k] x[k] + bias[n]. A tile is
// [k_padded, 16], its padding zero, followed by float32 scales [k / SCALE_INPUTS, 16] of FP8 weights.
struct FloatWeights {
    const uint8_t* data;
    const float* bias;  // [tiles * 16] or null
    FloatType type;
    int n, k;           // real outputs and inputs; k_padded = round_up(k, TILE)

    size_t code_bytes() const { return size_t(round_up(k, TILE)) * TILE * bytes_of(type); }
    ptrdiff_t tile_bytes() const {
        const int scales = type == FloatType::f8e4m3 ? (k + SCALE_INPUTS - 1) / SCALE_INPUTS : 0;
        return ptrdiff_t(code_bytes() + size_t(scales) * TILE * sizeof(float));
    }
    const uint8_t* tile(int index) const { return data + index * tile_bytes(); }
    // Of the outputs of a tile, for the inputs from `input` on.
    const uint8_t* scales(int index, int input) const {
        return tile(index) + code_bytes() + size_t(input / SCALE_INPUTS) * TILE * sizeof(float);
    }
};

// Memory that will be read next. A quantised linear fetches it meanwhile, since with several rows it
// computes for longer than it reads.
struct NextRead {
    const uint8_t* at = nullptr;
    ptrdiff_t bytes = 0;
};

// Where a linear writes: y = alpha * (product + bias), added to `residual` if there is one.
struct LinearOut {
    float* y;               // [rows, ld]
    const float* residual;  // [rows, ld] or null; may be y itself
    int ld;                 // only the n real outputs of a row are written
    float alpha;            // 1 multiplies nothing
    NextRead next{};
};

// The clamped SwiGLU is that of gpt-oss: x / (1 + e^-1.702x) of min(gate, 7), times up + 1, with up
// kept within -7..7.
enum class Activation : int {
    silu = 0, gelu_tanh = 1, gelu = 2, relu2 = 3, xielu = 4, clamped_swiglu = 5
};
// The activation of a name, such as "silu". False where there is none.
bool find_activation(const char* name, Activation* found);

// How the numbers of keys and values are held. A head of int8 is its codes, -127..127, and after them
// the bfloat16 scale of each KV_GROUP of codes, two bytes each in the processor's order; a number is
// code * scale, which is exact in float32. A NaN or inf makes the scale of its group NaN.
enum class KvType : int { float32, bfloat16, float16, int8 };
constexpr int KV_GROUP = 32;
constexpr int QUERIES = 36;        // vectors that are attended together: whole blocks on every level
constexpr int MAX_HEAD_DIM = 576;  // of a key: that of DeepSeek's latent attention
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
using Int8 = int8_t;
constexpr KvType type_of(float) { return KvType::float32; }
constexpr KvType type_of(Bfloat16) { return KvType::bfloat16; }
constexpr KvType type_of(Float16) { return KvType::float16; }
constexpr KvType type_of(Int8) { return KvType::int8; }

// Elements of a head of `dim` numbers.
constexpr int head_elements(KvType type, int dim) {
    return type == KvType::int8 ? dim + 2 * ((dim + KV_GROUP - 1) / KV_GROUP) : dim;
}
template <typename E> constexpr int head_elements(int dim) {
    return head_elements(type_of(E{}), dim);
}
// Calls f with an element of the type.
template <typename F> auto with_elements(KvType type, const F& f) {
    switch (type) {
        case KvType::bfloat16: return f(Bfloat16{});
        case KvType::float16: return f(Float16{});
        case KvType::int8: return f(Int8{});
        default: return f(float{});
    }
}

// Keys and values of one layer. K is [blocks, kv_heads, head_elements(head_dim), 16]: lanes run over
// tokens. V is [blocks, kv_heads, 16, head_elements(v_stride)], v_stride = head_dim rounded up to 16;
// the numbers past head_dim are zero. Where `v` is null, a key is its value too; where both are, there
// is nothing to write to.
struct KvLayer {
    void* k;
    void* v;
    KvType type;
};

struct AttentionShape {
    int heads, kv_heads, head_dim, v_stride;
    float scale;    // of the scores
    float softcap;  // cap * tanh(score / cap); 0: none
    int window;     // a key at distance >= window is not seen; 0: no window
    bool ahead;     // rows see up to their `last` position instead of their own
    bool chunks;    // of the windows that the text is cut into, rows see their own

    // The first position that a row at `position` sees.
    int first_seen(int position) const {
        if (window <= 0 || position < window) {
            return 0;
        }
        return chunks ? position / window * window : position - window + 1;
    }
};

// One request's rows in the batch. Node i of its span lies in the logical slot start + i.
struct AttentionSpan {
    const int32_t* blocks;  // block table: slot s is lane s % 16 of block blocks[s / 16]
    int start;              // logical position of node 0
};

// What one row sees: all positions up to its own, or where layers look ahead to the last one of its
// block. Below span.start that is the slot of the same number; from there on the slot of its
// ancestor at that depth.
struct AttentionRow {
    int position;
    const int32_t* path;  // [position - start + 1] nodes from node 0 to the row's own; null: 0, 1, ...
    int last;             // its own position, or that of its block's last row, which has no path

    int last_seen(const AttentionShape& shape) const { return shape.ahead ? last : position; }
};

// A partial result of one row and head over the keys of one chunk: [max, sum, 14 unused,
// values[v_stride]].
inline int partial_stride(const AttentionShape& s) { return TILE + s.v_stride; }

// The chunks of which a row at `position` sees something are first_chunk..last_chunk of what it sees
// last.
inline int first_chunk(const AttentionShape& s, int position) {
    return s.first_seen(position) / KEY_CHUNK;
}
inline int last_chunk(int last_seen) { return last_seen / KEY_CHUNK; }

struct RotaryArgs {
    const float* cos;      // [rotary_dim] of this position, both halves
    const float* sin;      // [rotary_dim], the first half negated
    int rotary_dim;        // at most head_dim; the rest passes through
    const float* q_norm;   // [head_dim] RMS-norm weight of each query head, or null
    const float* k_norm;
    float eps;
    bool norm_last = false;  // the norms come after the rotation
    float q_scale = 1.0f;    // of the queries, after both
    const float* v_norm = nullptr;  // [head_dim], of each value head, or null
    bool values_are_keys = false;   // values are what keys are before norm and rotation
};

struct Kernels {
    const char* isa;
    bool (*supported)();  // whether this CPU has the level's instructions

    // --- linear: tiles [tile_begin, tile_end) of all rows
    void (*linear_blocks)(const QuantRows&, const BlockWeights&, const LinearOut&, int tile_begin,
                          int tile_end);
    void (*linear_float)(const FloatRows&, const FloatWeights&, const LinearOut&, int tile_begin,
                         int tile_end);

    // --- rows; x and y are one row each, n its real elements
    void (*quantize)(const float* x, const QuantRows& out, int row);
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);
    // The deviations from the mean over their root mean square, times weight[n], plus bias[n].
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n,
                       float* y);
    // y = activation(gate_up[:width]) * gate_up[width:2 * width]; the clamped SwiGLU is its own rule
    void (*gated)(const float* gate_up, int width, Activation, float* y);
    // y = activation(x). `learnt` is what xielu has beyond its input: see rows.inl.
    void (*activate)(const float* x, int width, Activation, const float* learnt, float* y);
    void (*softcap)(float* x, int n, float cap);  // in place; nothing past the n-th is written
    void (*vector_exp)(const float* x, int n, float* y);
    void (*vector_tanh)(const float* x, int n, float* y);
    void (*vector_erf)(const float* x, int n, float* y);
    void (*vector_softplus)(const float* x, int n, float* y);
    // One output's weights, times `multiplier`: y[k].
    void (*gather_blocks)(const BlockWeights&, int output, float multiplier, float* y);
    void (*gather_float)(const FloatWeights&, int output, float multiplier, float* y);
    // One KV head of one row of the fused qkv, with its query heads: norms, rotary; queries into
    // `q` [heads, head_dim], key and value into the slot. Without a KvLayer's arrays, queries alone.
    void (*rotary_kv)(const float* qkv, const AttentionShape&, const RotaryArgs&, const KvLayer&,
                      int block, int lane, int kv_head, float* q);

    // --- attention of `count` consecutive rows of one span with one KV head over one key chunk.
    // q: row r's query heads at q + r * q_stride, [heads, head_dim]. Partial results of row r and
    // query head h go to partial + ((r * heads) + h) * row_stride.
    // Rows that see nothing of the chunk are left alone.
    void (*attend)(const AttentionShape&, const KvLayer&, const AttentionSpan&,
                   const AttentionRow* rows, int count, const float* q, int q_stride, int kv_head,
                   int chunk, float* partial, int row_stride);
    // Partials of chunks first..last of one row and head, chunk c's at partials + c * stride, to
    // [head_dim] values. `sink`, where it is not null, is the score of a key without a value.
    void (*merge)(const AttentionShape&, const float* partials, int stride, int first, int last,
                  const float* sink, float* y);

    // --- sampling: see sampler.h
    const struct SamplerKernels* sampler;

    // --- recurrent layers: see recurrent.h
    const struct RecurrentKernels* recurrent;
};

// The level in use, chosen once: PACELINE_CPU_ISA, or the best that this CPU has.
const Kernels& kernels();
// All levels that this build has; `count` of them, best first.
const Kernels* const* all_levels(int* count);
// Choose another level (tests). False where the level is unknown or the CPU lacks it.
bool set_level(const char* isa);

}  // namespace paceline
