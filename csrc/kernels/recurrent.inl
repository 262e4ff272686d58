// Recurrent layers: see recurrent.h.
#include "kernels/recurrent.h"

namespace paceline {
namespace {
namespace recurrent {

// Tiles that a walk computes side by side, as far as there are registers for their sums.
#if defined(__AVX512F__)
constexpr int TOGETHER = 2;
#else
constexpr int TOGETHER = 1;
#endif
constexpr int FOLDED_TOGETHER = 4;  // rows that one pass adds to a slice

// The first `count` lanes, and no more.
inline void store_some(float* p, f32x16 a, int count) {
    if (count >= LANES) {
        store(p, a);
        return;
    }
    alignas(64) float lane[LANES];
    store(lane, a);
    std::memcpy(p, lane, sizeof(float) * static_cast<size_t>(count));
}

// --- the convolution ----------------------------------------------------------------------------

// Inputs of 16 columns, or of the last few.
struct Column {
    const ConvolvedRows& rows;
    const Convolution& conv;
    int at, left;

    f32x16 load_from(const float* p) const { return load_part(p + at, left); }
    f32x16 held(int index) const {
        return load_from(rows.kept + static_cast<ptrdiff_t>(index) * conv.channels);
    }
    f32x16 input(int32_t entry) const {
        return entry < 0 ? held(-1 - entry) : load_from(rows.x + entry * rows.ld_x);
    }
    void keep(int index, f32x16 a) const {
        store_some(rows.kept + static_cast<ptrdiff_t>(index) * conv.channels + at, a, left);
    }
};

// What lies behind the folded inputs. What is overwritten in ascending order has been read before.
inline void fold_inputs(const Column& c) {
    const ConvolvedRows& r = c.rows;
    if (r.num_folded == 0 && r.committed == r.kept) {
        return;
    }
    const int seen = c.conv.kernel - 1;
    for (int i = 0; i < seen; ++i) {
        const int from = i + r.num_folded;
        const ptrdiff_t row = static_cast<ptrdiff_t>(from) * c.conv.channels;
        c.keep(i, c.load_from(from < seen ? r.committed + row : r.folded[from - seen]));
    }
}

void convolve(const Convolution& conv, const ConvolvedRows& r, int begin, int end) {
    const int seen = conv.kernel - 1;
    for (int at = begin; at < end; at += LANES) {
        const Column c{r, conv, at, end - at};
        fold_inputs(c);
        f32x16 weight[MAX_KERNEL];
        for (int tap = 0; tap < conv.kernel; ++tap) {
            weight[tap] = c.load_from(conv.weight + static_cast<ptrdiff_t>(tap) * conv.channels);
        }
        const f32x16 bias = conv.bias ? c.load_from(conv.bias) : zero();
        for (int row = 0; row < r.rows; ++row) {
            const int32_t* window = r.windows + static_cast<ptrdiff_t>(row) * seen;
            const f32x16 own = c.load_from(r.x + row * r.ld_x);
            f32x16 y = seen > 0 ? c.input(window[0]) * weight[0] : own * weight[0];
            for (int tap = 1; tap < seen; ++tap) {
                y = fma(c.input(window[tap]), weight[tap], y);
            }
            if (seen > 0) {
                y = fma(own, weight[seen], y);
            }
            y = conv.bias ? y + bias : y;
            store_some(r.y + row * r.ld_y + at, conv.silu ? silu(y) : y, c.left);
            if (r.log[row]) {
                store_some(r.log[row] + at, own, c.left);
            }
        }
        for (int i = 0; r.last_window && i < seen; ++i) {
            c.keep(i, c.input(r.last_window[i]));
        }
    }
}

// --- the numbers of a row -----------------------------------------------------------------------

inline float dot(const float* a, const float* b, int n) {
    f32x16 sums[NORM_LANES] = {zero(), zero(), zero(), zero()};
    for (int at = 0, i = 0; at < n; at += LANES, i = (i + 1) % NORM_LANES) {
        sums[i] = fma(load_part(a + at, n - at), load_part(b + at, n - at), sums[i]);
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// x over its length, times `scale`.
inline void make_unit(float* x, int n, float scale) {
    constexpr float EPS = 1e-6f;  // of every model
    const f32x16 inverse = splat(scale / __builtin_sqrtf(dot(x, x, n) + EPS));
    for (int at = 0; at < n; at += LANES) {
        store_some(x + at, load_part(x + at, n - at) * inverse, n - at);
    }
}

inline f32x16 sigmoid(f32x16 x) { return splat(1.0f) / (splat(1.0f) + exp(zero() - x)); }

void numbers(const RecurrentShape& s, const RecurrentNumbers& n, float* query, float* key,
             float* rate, float* decay, float* match) {
    for (int group = 0; group < s.groups; ++group) {
        float *q = query + group * s.key_dim, *k = key + group * s.key_dim;
        if (s.corrects) {
            make_unit(q, s.key_dim, 1.0f / __builtin_sqrtf(static_cast<float>(s.key_dim)));
            make_unit(k, s.key_dim, 1.0f);
        }
        match[group] = dot(q, k, s.key_dim);
    }
    for (int at = 0; at < s.heads; at += LANES) {
        const int left = s.heads - at;
        f32x16 step = softplus(load_part(decay + at, left) + load_part(n.step_bias + at, left));
        if (s.corrects) {
            store_some(rate + at, sigmoid(load_part(rate + at, left)) * splat(n.rate_scale), left);
        } else {  // the order of operands lets a NaN through
            step = max(splat(n.least_step), min(splat(n.most_step), step));
            store_some(rate + at, step, left);
        }
        store_some(decay + at, exp(load_part(n.decay + at, left) * step), left);
    }
}

// --- the walk -----------------------------------------------------------------------------------

// What is added to T tiles of a slice: S = decay S + key added'.
template <int T> struct Addition {
    const float* key;
    float decay;
    f32x16 added[T];
};

// k'S and q'S of T tiles.
template <int T> struct Sums {
    f32x16 by_key[T], by_query[T];
};

// One pass over T tiles with COUNT additions: see WalkStep. It stores and sums up as it is told, and
// k'S for the delta rule alone.
template <int T, int COUNT, bool STORES, bool SUMS, bool CORRECTS>
void pass(const RecurrentShape& shape, const float* from, float* to, const Addition<T>* additions,
          const float* key, const float* query, Sums<T>* sums) {
    const ptrdiff_t tile_floats = static_cast<ptrdiff_t>(shape.tile_floats());
    Addition<T> own[COUNT + 1];  // copies, which no store can change
    for (int i = 0; i < COUNT; ++i) {
        own[i] = additions[i];
    }
    f32x16 by_key[2][T], by_query[2][T];
    for (int i = 0; i < 2; ++i) {
        for (int t = 0; t < T; ++t) {
            by_key[i][t] = by_query[i][t] = zero();
        }
    }
    const auto one = [&](int row, int parity) {
        for (int t = 0; t < T; ++t) {
            const ptrdiff_t at = t * tile_floats + static_cast<ptrdiff_t>(row) * LANES;
            f32x16 s = load(from + at);
            for (int i = 0; i < COUNT; ++i) {
                s = fma(splat(own[i].key[row]), own[i].added[t], s * splat(own[i].decay));
            }
            if (STORES) {
                store(to + at, s);
            }
            if (SUMS) {
                by_query[parity][t] = fma(splat(query[row]), s, by_query[parity][t]);
            }
            if (SUMS && CORRECTS) {
                by_key[parity][t] = fma(splat(key[row]), s, by_key[parity][t]);
            }
        }
    };
    int row = 0;
    for (; row + 2 <= shape.key_dim; row += 2) {
        one(row, 0);
        one(row + 1, 1);
    }
    if (row < shape.key_dim) {
        one(row, 0);
    }
    for (int t = 0; SUMS && t < T; ++t) {
        sums->by_key[t] = by_key[0][t] + by_key[1][t];
        sums->by_query[t] = by_query[0][t] + by_query[1][t];
    }
}

template <int T, int COUNT, bool STORES>
void pass_with(const RecurrentShape& shape, const float* from, float* to,
               const Addition<T>* additions, const float* key, const float* query, Sums<T>* sums) {
    if (!query) {
        pass<T, COUNT, STORES, false, false>(shape, from, to, additions, key, query, sums);
    } else if (shape.corrects) {
        pass<T, COUNT, STORES, true, true>(shape, from, to, additions, key, query, sums);
    } else {
        pass<T, COUNT, STORES, true, false>(shape, from, to, additions, key, query, sums);
    }
}

template <int T>
void pass_any(const RecurrentShape& shape, const float* from, float* to,
              const Addition<T>* additions, int count, const float* key, const float* query,
              Sums<T>* sums) {
    switch (to ? count : -1) {
        case -1: pass_with<T, 0, false>(shape, from, to, additions, key, query, sums); break;
        case 0: pass_with<T, 0, true>(shape, from, to, additions, key, query, sums); break;
        case 1: pass_with<T, 1, true>(shape, from, to, additions, key, query, sums); break;
        case 2: pass_with<T, 2, true>(shape, from, to, additions, key, query, sums); break;
        case 3: pass_with<T, 3, true>(shape, from, to, additions, key, query, sums); break;
        default: pass_with<T, FOLDED_TOGETHER, true>(shape, from, to, additions, key, query, sums);
    }
}

// T tiles of one head.
template <int T> struct Walker {
    const RecurrentShape& shape;
    const RecurrentWalk& walk;
    int head, tile;
    float* stack;

    ptrdiff_t key_at() const { return static_cast<ptrdiff_t>(shape.group_of(head)) * shape.key_dim; }
    ptrdiff_t value_at() const {
        return static_cast<ptrdiff_t>(head) * shape.value_dim + tile * LANES;
    }
    // Columns from a tile on.
    int left(int t) const { return shape.value_dim - (tile + t) * LANES; }

    size_t state_at() const {
        return (static_cast<size_t>(head) * shape.tiles() + tile) * shape.tile_floats();
    }

    float* slice(int index) const {
        if (index == NO_SLICE) {
            return nullptr;
        }
        const size_t room = 2 * shape.tile_floats();
        return index == KEPT ? walk.kept + state_at()
                             : stack + static_cast<size_t>(index - FIRST_BRANCH) * room;
    }

    Addition<T> addition(const LoggedRow& row) const {
        Addition<T> a{row.key + key_at(), row.decay[head], {}};
        for (int t = 0; t < T; ++t) {
            a.added[t] = load_part(row.added + value_at() + t * LANES, left(t));
        }
        return a;
    }

    void finish(const RecurrentRow& row, const Sums<T>& sums) const {
        const f32x16 decay = splat(row.decay[head]), rate = splat(row.rate[head]);
        const f32x16 match = splat(row.match[shape.group_of(head)]);
        for (int t = 0; t < T; ++t) {
            const ptrdiff_t at = value_at() + t * LANES;
            const f32x16 value = load_part(row.value + at, left(t));
            const f32x16 wrong = shape.corrects ? value - decay * sums.by_key[t] : value;
            const f32x16 added = wrong * rate;
            f32x16 y = fma(added, match, decay * sums.by_query[t]);
            y = walk.skip ? fma(value, splat(walk.skip[head]), y) : y;
            store_some(row.added + at, added, left(t));
            store_some(row.y + at, y, left(t));
        }
    }

    void step(const WalkStep& step, const float* from, float* to, const Addition<T>* additions,
              int count) const {
        Sums<T> sums;
        if (step.row < 0) {
            pass_any<T>(shape, from, to, additions, count, nullptr, nullptr, &sums);
            return;
        }
        const RecurrentRow& row = walk.rows[step.row];
        pass_any<T>(shape, from, to, additions, count, row.key + key_at(), row.query + key_at(),
                    &sums);
        finish(row, sums);
    }

    // What was accepted is added a few rows at a time.
    void first(const WalkStep& first) const {
        Addition<T> additions[FOLDED_TOGETHER];
        const float* from = walk.committed + state_at();
        int done = 0, count = 0;
        const auto take = [&] {
            count = walk.num_folded - done;
            count = count < FOLDED_TOGETHER ? count : FOLDED_TOGETHER;
            for (int i = 0; i < count; ++i) {
                additions[i] = addition(walk.folded[done + i]);
            }
            done += count;
        };
        for (take(); done < walk.num_folded; take()) {
            pass_any<T>(shape, from, slice(KEPT), additions, count, nullptr, nullptr, nullptr);
            from = slice(KEPT);
        }
        const bool stores = walk.num_folded > 0 || walk.committed != walk.kept;
        step(first, from, stores ? slice(KEPT) : nullptr, additions, count);
    }

    void run() const {
        first(walk.steps[0]);
        for (int i = 1; i < walk.num_steps; ++i) {
            const WalkStep& next = walk.steps[i];
            const float* from = slice(next.from);
            if (next.parent < 0) {
                step(next, from, slice(next.to), nullptr, 0);
                continue;
            }
            const RecurrentRow& parent = walk.rows[next.parent];
            const Addition<T> a = addition({parent.key, parent.added, parent.decay});
            step(next, from, slice(next.to), &a, 1);
        }
    }
};

void walk(const RecurrentShape& shape, const RecurrentWalk& walk, int head, int tile_begin,
          int tile_end, float* stack) {
    int tile = tile_begin;
    for (; TOGETHER > 1 && tile + TOGETHER <= tile_end; tile += TOGETHER) {
        Walker<TOGETHER>{shape, walk, head, tile, stack}.run();
    }
    for (; tile < tile_end; ++tile) {
        Walker<1>{shape, walk, head, tile, stack}.run();
    }
}

// --- gates --------------------------------------------------------------------------------------

// The RMS norm of x, in place where y is x.
inline void norm_part(const float* x, const float* weight, float eps, int n, float* y) {
    const float mean = dot(x, x, n) / static_cast<float>(n);
    const f32x16 inverse = splat(1.0f / __builtin_sqrtf(mean + eps));
    for (int at = 0; at < n; at += LANES) {
        const int left = n - at;
        const f32x16 normed = load_part(x + at, left) * inverse * load_part(weight + at, left);
        store_some(y + at, normed, left);
    }
}

void gated_norm(const float* x, const float* by, const float* weight, GatedNorm kind, float eps,
                int n, int groups, float* y) {
    const int size = n / groups;
    if (kind == GatedNorm::before_gate) {
        for (int at = 0; at < n; at += size) {
            norm_part(x + at, weight + at, eps, size, y + at);
        }
        x = y;
    }
    for (int at = 0; at < n; at += LANES) {
        store_part(y + at, load_part(x + at, n - at) * silu(load_part(by + at, n - at)), n - at);
    }
    for (int at = 0; kind == GatedNorm::after_gate && at < n; at += size) {
        norm_part(y + at, weight + at, eps, size, y + at);
    }
}

void gate(const float* x, const float* by, int n, float* y) {
    for (int at = 0; at < n; at += LANES) {
        const f32x16 weighed = load_part(x + at, n - at) * sigmoid(load_part(by + at, n - at));
        store_some(y + at, weighed, n - at);
    }
}

}  // namespace recurrent

const RecurrentKernels recurrent_kernels = {
    recurrent::convolve, recurrent::numbers, recurrent::walk, recurrent::gated_norm,
    recurrent::gate,
};

}  // namespace
}  // namespace paceline
