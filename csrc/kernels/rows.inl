// What is done to one row: quantising, norms, activations, rotary embedding. Every function walks
// the row in 16-lane steps; the last one works on a copy padded with zeros.

namespace paceline {
namespace {

constexpr int MAX_HEAD_GROUPS = MAX_HEAD_DIM / KV_GROUP;
constexpr int NORM_LANES = 4;  // accumulators of a sum of squares

// The first `count` lanes from memory, the others zero; all 16 where count >= 16.
inline f32x16 load_part(const float* p, int count) {
    if (count >= LANES) {
        return load(p);
    }
    alignas(64) float lane[LANES] = {};
    std::memcpy(lane, p, sizeof(float) * static_cast<size_t>(count));
    return load(lane);
}

// All 16 lanes to memory, zeros from the `count`-th on.
inline void store_part(float* p, f32x16 a, int count) {
    store(p, a);
    for (int i = count; i < LANES; ++i) {
        p[i] = 0.0f;
    }
}

// --- quantising ---------------------------------------------------------------------------------

// Quantises one or two steps of 16, the second being zero otherwise, with one scale: the largest
// size / 127. Its reciprocal is at most three roundings off, so that no product rounds to more than
// 127. A NaN or inf makes the scale NaN, and with it all that is ever computed from these inputs:
// x - x is not 0 for those alone, whereas max() loses a NaN.
inline float quantize_group(const float* x, int steps, int8_t* q) {
    const f32x16 a = load(x), b = steps > 1 ? load(x + LANES) : zero();
    if (bits_of(equal(a - a, b - b)) != 0xffff) {
        std::memset(q, 0, STRETCH);
        return __builtin_nanf("");
    }
    float scale = max_lane(max(abs(a), abs(b))) / 127.0f;
    scale = scale < 1e-30f ? 1e-30f : scale;
    const f32x16 inverse = splat(1.0f / scale);
    store_i8(q, round_to_int(a * inverse));
    store_i8(q + LANES, round_to_int(b * inverse));
    return scale;
}

void quantize(const float* x, const QuantRows& out, int row) {
    const int filled = round_up(out.k, LANES), stretches = out.stretches();
    for (int stretch = 0; stretch < stretches; ++stretch) {
        QuantStretch& to = *out.at(stretch, row);
        const int begin = stretch * STRETCH, rest = filled - begin;
        const int steps = (rest < STRETCH ? rest : STRETCH) / LANES;
        const float scale = quantize_group(x + begin, steps, to.q);
        const int32_t low = sum_i8(to.q), high = sum_i8(to.q + LANES);
        to.scale = scale;
        to.sum = scale * static_cast<float>(low + high);
        to.half_sum[0] = scale * static_cast<float>(low);
        to.half_sum[1] = scale * static_cast<float>(high);
        to.start = -CODE_ZERO * (low + high);
        to.half_start[0] = -CODE_ZERO * low;
        to.half_start[1] = -CODE_ZERO * high;
    }
}

// --- norms and activations ----------------------------------------------------------------------

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
    f32x16 squares[NORM_LANES] = {zero(), zero(), zero(), zero()};
    int at = 0;
    for (; at + NORM_LANES * LANES <= n; at += NORM_LANES * LANES) {
        for (int i = 0; i < NORM_LANES; ++i) {
            const f32x16 a = load(x + at + i * LANES);
            squares[i] = fma(a, a, squares[i]);
        }
    }
    for (int i = 0; at < n; at += LANES, ++i) {
        const f32x16 a = load_part(x + at, n - at);
        squares[i] = fma(a, a, squares[i]);
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) /
                       static_cast<float>(n);
    const f32x16 inverse = splat(1.0f / __builtin_sqrtf(mean + eps));
    for (at = 0; at < n; at += LANES) {
        const f32x16 a = load_part(x + at, n - at) * inverse;
        store_part(y + at, a * load_part(weight + at, n - at), n - at);
    }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n,
                float* y) {
    const auto sum_of = [&](auto of) {
        f32x16 sums[NORM_LANES] = {zero(), zero(), zero(), zero()};
        for (int at = 0, i = 0; at < n; at += LANES, i = (i + 1) % NORM_LANES) {
            sums[i] = sums[i] + of(at);
        }
        return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(n);
    };
    const f32x16 mean = splat(sum_of([&](int at) { return load_part(x + at, n - at); }));
    // What pads the last step counts for nothing.
    const float variance = sum_of([&](int at) {
        alignas(64) float lane[LANES];
        store_part(lane, load_part(x + at, n - at) - mean, n - at);
        const f32x16 away = load(lane);
        return away * away;
    });
    const f32x16 inverse = splat(1.0f / __builtin_sqrtf(variance + eps));
    for (int at = 0; at < n; at += LANES) {
        const f32x16 a = (load_part(x + at, n - at) - mean) * inverse;
        const f32x16 scaled = fma(a, load_part(weight + at, n - at), load_part(bias + at, n - at));
        store_part(y + at, scaled, n - at);
    }
}

// x / (1 + e^-x): an overflowing exponential gives 0, -inf and NaN give NaN.
inline f32x16 silu(f32x16 x) { return x / (splat(1.0f) + exp(zero() - x)); }

// x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
inline f32x16 gelu_tanh(f32x16 x) {
    const f32x16 inner = fma(x * x * x, splat(0.044715f), x) * splat(0.7978845608f);
    return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

// x / 2 * (1 + erf(x / sqrt(2)))
inline f32x16 gelu(f32x16 x) {
    return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.7071067812f)));
}

// The square of what is above zero. The order of operands lets a NaN through.
inline f32x16 relu2(f32x16 x) {
    const f32x16 above = max(zero(), x);
    return above * above;
}

template <f32x16 (*ACTIVE)(f32x16)> void gated_by(const float* gate_up, int width, float* y) {
    const float* up = gate_up + width;
    for (int at = 0; at < width; at += LANES) {
        const f32x16 active = ACTIVE(load_part(gate_up + at, width - at));
        store_part(y + at, active * load_part(up + at, width - at), width - at);
    }
}

// The order of operands lets a NaN through.
void gated_clamped(const float* gate_up, int width, float* y) {
    const f32x16 limit = splat(7.0f), one = splat(1.0f);
    for (int at = 0; at < width; at += LANES) {
        const f32x16 gate = min(limit, load_part(gate_up + at, width - at));
        const f32x16 up = load_part(gate_up + width + at, width - at);
        const f32x16 active = gate / (one + exp(gate * splat(-1.702f)));
        store_part(y + at, active * (max(zero() - limit, min(limit, up)) + one), width - at);
    }
}

// beta x + alpha_p x^2 above zero, beta x + alpha_n (e^x - 1 - x) below. Both are computed, for what is
// above zero and for what is below.
inline f32x16 xielu(f32x16 x, const float* learnt) {
    const f32x16 above = max(zero(), x), below = min(zero(), x);
    const f32x16 bent = splat(learnt[1]) * (exp(below) - splat(1.0f) - below);
    return fma(splat(learnt[0]) * above, above, fma(splat(learnt[2]), x, bent));
}

template <typename Active> void each_step(const float* x, int width, float* y, Active active) {
    for (int at = 0; at < width; at += LANES) {
        store_part(y + at, active(load_part(x + at, width - at)), width - at);
    }
}

// `learnt`: alpha_p, alpha_n and beta of xielu.
void activate(const float* x, int width, Activation act, const float* learnt, float* y) {
    switch (act) {
        case Activation::silu:
            return each_step(x, width, y, silu);
        case Activation::gelu_tanh:
            return each_step(x, width, y, gelu_tanh);
        case Activation::gelu:
            return each_step(x, width, y, gelu);
        case Activation::relu2:
            return each_step(x, width, y, relu2);
        case Activation::xielu:
            return each_step(x, width, y, [&](f32x16 a) { return xielu(a, learnt); });
        case Activation::clamped_swiglu:  // it gates
            return;
    }
}

void gated(const float* gate_up, int width, Activation act, float* y) {
    switch (act) {
        case Activation::silu:
            return gated_by<silu>(gate_up, width, y);
        case Activation::gelu_tanh:
            return gated_by<gelu_tanh>(gate_up, width, y);
        case Activation::gelu:
            return gated_by<gelu>(gate_up, width, y);
        case Activation::relu2:
            return gated_by<relu2>(gate_up, width, y);
        case Activation::xielu:  // no family gates with it
            return;
        case Activation::clamped_swiglu:
            return gated_clamped(gate_up, width, y);
    }
}

// Rows of logits follow one another without padding: nothing past the n-th is written.
void softcap(float* x, int n, float cap) {
    for (int at = 0; at < n; at += LANES) {
        const f32x16 y = splat(cap) * tanh(load_part(x + at, n - at) / splat(cap));
        if (at + LANES <= n) {
            store(x + at, y);
        } else {
            alignas(64) float lane[LANES];
            store(lane, y);
            std::memcpy(x + at, lane, sizeof(float) * static_cast<size_t>(n - at));
        }
    }
}

void vector_exp(const float* x, int n, float* y) {
    for (int at = 0; at < n; at += LANES) {
        store_part(y + at, exp(load_part(x + at, n - at)), n - at);
    }
}

void vector_tanh(const float* x, int n, float* y) {
    for (int at = 0; at < n; at += LANES) {
        store_part(y + at, tanh(load_part(x + at, n - at)), n - at);
    }
}

void vector_erf(const float* x, int n, float* y) {
    for (int at = 0; at < n; at += LANES) {
        store_part(y + at, erf(load_part(x + at, n - at)), n - at);
    }
}

void vector_softplus(const float* x, int n, float* y) {
    for (int at = 0; at < n; at += LANES) {
        store_part(y + at, softplus(load_part(x + at, n - at)), n - at);
    }
}

// --- rotary embedding and the cache -------------------------------------------------------------

// y = x cos + swapped(x) sin, where swapped exchanges the halves of the first `width` of `dim`
// elements and the others pass through; the product with cos is rounded, the one with sin fused into
// the sum. cos and sin are padded. x and y do not overlap.
inline void rotate(const float* x, const float* cos, const float* sin, int width, int dim,
                   float* y) {
    const int half = width / 2;
    std::memcpy(y + width, x + width, sizeof(float) * static_cast<size_t>(dim - width));
    if (half % LANES == 0) {
        for (int at = 0; at < half; at += LANES) {
            const f32x16 low = load(x + at), high = load(x + half + at);
            store(y + at, fma(high, load(sin + at), low * load(cos + at)));
            store(y + half + at, fma(low, load(sin + half + at), high * load(cos + half + at)));
        }
        return;
    }
    alignas(64) float swapped[MAX_HEAD_DIM], lane[LANES];
    const size_t half_bytes = sizeof(float) * static_cast<size_t>(half);
    std::memcpy(swapped, x + half, half_bytes);
    std::memcpy(swapped + half, x, half_bytes);
    for (int at = 0; at < width; at += LANES) {
        const int left = width - at;
        const f32x16 product = load_part(x + at, left) * load(cos + at);
        store(lane, fma(load_part(swapped + at, left), load(sin + at), product));
        std::memcpy(y + at, lane, sizeof(float) * static_cast<size_t>(left < LANES ? left : LANES));
    }
}

inline void store_kv(float* y, f32x16 x) { store(y, x); }
inline void store_kv(Bfloat16* y, f32x16 x) { store_bf16(&y->bits, x); }
inline void store_kv(Float16* y, f32x16 x) { store_f16(&y->bits, x); }

// The codes of a KV_GROUP, and its scale.
inline uint16_t quantize_kv(const float* x, Int8* codes) {
    const f32x16 low = load(x), high = load(x + LANES);
    const uint16_t scale = kv_scale(max_lane(max(abs(low), abs(high))));
    const f32x16 divisor = splat(from_bf16(scale));
    const f32x16 first = low / divisor, second = high / divisor;
    if ((bits_of(equal(first, first)) & bits_of(equal(second, second))) != 0xffff) {
        std::memset(codes, 0, KV_GROUP);  // max() loses a NaN
        return kv_scale(__builtin_nanf(""));
    }
    store_i8(codes, round_to_int(first));
    store_i8(codes + LANES, round_to_int(second));
    return scale;
}

// The elements of a KV head of `dim` numbers, which zeros follow.
template <typename E> inline void encode_head(const float* x, int dim, E* y) {
    for (int i = 0; i < dim; i += LANES) {
        store_kv(y + i, load(x + i));
    }
}
inline void encode_head(const float* x, int dim, Int8* y) {
    uint16_t scales[MAX_HEAD_GROUPS];
    for (int i = 0; i < dim; i += KV_GROUP) {
        scales[i / KV_GROUP] = quantize_kv(x + i, y + i);
    }
    std::memcpy(y + dim, scales, static_cast<size_t>(head_elements<Int8>(dim) - dim));
}

// A KV head's `dim` numbers, which zeros follow, to every `step`-th element.
template <typename E> inline void write_cache(E* at, size_t step, const float* x, int dim) {
    alignas(64) E elements[MAX_HEAD_DIM + 2 * MAX_HEAD_GROUPS];
    encode_head(x, dim, elements);
    const size_t count = static_cast<size_t>(head_elements<E>(dim));
    if (step == 1) {
        std::memcpy(at, elements, sizeof(E) * count);
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        at[i * step] = elements[i];
    }
}

// A lane of K has an element in every line of its block and head, and none may be in the caches.
template <typename E> inline void fetch_keys(const E* k, size_t count) {
    constexpr size_t LINE = 64 / sizeof(E);
    for (size_t at = 0; at < count; at += LINE) {
        __builtin_prefetch(k + at, 1);
    }
}

template <typename E>
void rotary_kv_as(const float* qkv, const AttentionShape& shape, const RotaryArgs& rotary, E* k,
                  E* v, int block, int lane, int kv_head, float* q) {
    const int dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    const size_t at = static_cast<size_t>(block) * shape.kv_heads + kv_head;
    const size_t k_tile = static_cast<size_t>(head_elements<E>(dim)) * TILE;
    if (k) {
        k += at * k_tile;
        fetch_keys(k, k_tile);
    }
    v = v ? v + (at * TILE + lane) * head_elements<E>(shape.v_stride) : nullptr;
    alignas(64) float cos[MAX_HEAD_DIM + LANES], sin[MAX_HEAD_DIM + LANES];
    alignas(64) float normed[MAX_HEAD_DIM], turned[MAX_HEAD_DIM];
    alignas(64) float head[MAX_HEAD_DIM + KV_GROUP];
    std::memset(head + dim, 0, sizeof(float) * KV_GROUP);
    std::memset(cos + rotary.rotary_dim, 0, sizeof(float) * LANES);
    std::memset(sin + rotary.rotary_dim, 0, sizeof(float) * LANES);
    std::memcpy(cos, rotary.cos, sizeof(float) * static_cast<size_t>(rotary.rotary_dim));
    std::memcpy(sin, rotary.sin, sizeof(float) * static_cast<size_t>(rotary.rotary_dim));
    const auto turn = [&](int index, const float* norm, float* y) {
        const float* x = qkv + static_cast<size_t>(index) * dim;
        if (norm && rotary.norm_last) {
            rotate(x, cos, sin, rotary.rotary_dim, dim, turned);
            rms_norm(turned, norm, rotary.eps, dim, normed);
            std::memcpy(y, normed, sizeof(float) * static_cast<size_t>(dim));
            return;
        }
        if (norm) {
            rms_norm(x, norm, rotary.eps, dim, normed);
        }
        rotate(norm ? normed : x, cos, sin, rotary.rotary_dim, dim, y);
    };
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        float* y = q + static_cast<size_t>(h) * dim;
        turn(h, rotary.q_norm, y);
        for (int i = 0; rotary.q_scale != 1.0f && i < dim; ++i) {
            y[i] *= rotary.q_scale;
        }
    }
    if (!k) {
        return;
    }
    turn(shape.heads + kv_head, rotary.k_norm, head);
    write_cache(k + lane, TILE, head, dim);
    if (!v) {
        return;
    }
    const int first = shape.heads + (rotary.values_are_keys ? 0 : shape.kv_heads);
    const float* value = qkv + static_cast<size_t>(first + kv_head) * dim;
    if (rotary.v_norm) {
        rms_norm(value, rotary.v_norm, rotary.eps, dim, head);
    } else {
        std::memcpy(head, value, sizeof(float) * static_cast<size_t>(dim));
    }
    write_cache(v, 1, head, shape.v_stride);  // past `dim` the head is zero
}

void rotary_kv(const float* qkv, const AttentionShape& shape, const RotaryArgs& rotary,
               const KvLayer& layer, int block, int lane, int kv_head, float* q) {
    with_elements(layer.type, [&](auto element) {
        using E = decltype(element);
        rotary_kv_as(qkv, shape, rotary, static_cast<E*>(layer.k), static_cast<E*>(layer.v), block,
                     lane, kv_head, q);
    });
}

}  // namespace
}  // namespace paceline
