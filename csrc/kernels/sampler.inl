// The sampler's kernels. A row is cut into blocks of 64 tokens whose maxima are taken first; what
// follows visits only the blocks that can matter. See docs/losslessness.md for the rule.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>

#include "kernels/sampler.h"

namespace paceline {
namespace {
namespace sampling {

constexpr int BLOCK = SAMPLER_BLOCK;
constexpr float INFINITE = __builtin_inff();
constexpr double LOG2_E = 0x1.71547652b82fep+0;

// --- vectors of 64-bit lanes --------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int WIDTH = 8;
#elif defined(__AVX2__)
constexpr int WIDTH = 4;
#else
constexpr int WIDTH = 2;
#endif
constexpr int PARTS = LANES / WIDTH;

typedef uint64_t u64w __attribute__((vector_size(8 * WIDTH)));
typedef double f64w __attribute__((vector_size(8 * WIDTH)));

inline u64w splat_u64(uint64_t a) { return u64w{} + a; }
inline f64w splat_f64(double a) { return f64w{} + a; }

inline f64w to_double(const float* p) {
#if defined(__AVX512F__)
    return (f64w)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif defined(__AVX2__)
    return (f64w)_mm256_cvtps_pd(_mm_loadu_ps(p));
#else
    return f64w{static_cast<double>(p[0]), static_cast<double>(p[1])};
#endif
}

// Products of the lanes' low words.
inline u64w low_product(u64w a, u64w b) {
#if defined(__AVX512F__)
    return (u64w)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (u64w)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(PACELINE_PLAIN)
    return (u64w)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__ARM_NEON) && !defined(PACELINE_PLAIN)
    return (u64w)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

// Stores a0 b0 a2 b2 ... and then a1 b1 a3 b3 ...
inline void store_interleaved(uint32_t* p, u64w a, u64w b) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(p, _mm512_unpacklo_epi64((__m512i)a, (__m512i)b));
    _mm512_storeu_si512(p + 16, _mm512_unpackhi_epi64((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
    const __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), even);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), odd);
#else
    const uint64_t words[4] = {a[0], b[0], a[1], b[1]};
    for (int i = 0; i < 4; ++i) {
        p[2 * i] = static_cast<uint32_t>(words[i]);
        p[2 * i + 1] = static_cast<uint32_t>(words[i] >> 32);
    }
#endif
}

// The largest lane; there is no NaN. In registers, because it is taken once per block.
inline float largest(f32x16 a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(a.v);
#elif defined(__AVX2__)
    const __m256 half = _mm256_max_ps(a.lo, a.hi);
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
    return max_lane(a);
#endif
}

// --- noise --------------------------------------------------------------------------------------

constexpr uint64_t M0 = 0xD2511F53, M1 = 0xCD9E8D57, LOW = 0xffffffff;
constexpr int ROUNDS = 10;

// Philox4x32-10 (Salmon et al., SC 2011) for all tokens of one row. Position and sample are the
// same for all of them, so in the first two rounds most words are, too: those are taken once.
struct Noise {
    u64w k0[ROUNDS], k1[ROUNDS];
    u64w first, c0, c1, c3;

    explicit Noise(const NoiseKey& key) {
        uint64_t low[ROUNDS], high[ROUNDS];
        for (int i = 0; i < ROUNDS; ++i) {
            low[i] = (key.seed + i * uint64_t{0x9E3779B9}) & LOW;
            high[i] = ((key.seed >> 32) + i * uint64_t{0xBB67AE85}) & LOW;
            k0[i] = splat_u64(low[i]);
            k1[i] = splat_u64(high[i]);
        }
        const uint64_t p0 = M0 * key.position, p1 = M1 * key.sample;
        const uint64_t q1 = M1 * ((p0 >> 32) ^ high[0]);  // the second round's
        first = splat_u64((p1 >> 32) ^ low[0]);
        c0 = splat_u64((q1 >> 32) ^ (p1 & LOW) ^ low[1]);
        c1 = splat_u64(q1);
        c3 = splat_u64((p0 & LOW) ^ high[1]);
    }

    // x of tokens 64 * block ..; high words of the lanes are garbage that no product reads.
    void words(int block, uint32_t* x) const {
        constexpr int BESIDE = 2;  // chains of dependent operations at a time
        u64w number = splat_u64(static_cast<uint64_t>(block) * (BLOCK / 4));
        for (int i = 0; i < WIDTH; ++i) {
            number[i] += (i % 2) * (WIDTH / 2) + i / 2;  // the order of store_interleaved
        }
        for (int at = 0; at < BLOCK / 4; at += BESIDE * WIDTH) {
            u64w a[BESIDE], b[BESIDE], c[BESIDE], d[BESIDE];
            for (int i = 0; i < BESIDE; ++i) {
                const u64w p0 = low_product((number + (at + i * WIDTH)) ^ first, splat_u64(M0));
                a[i] = c0, b[i] = c1, c[i] = (p0 >> 32) ^ c3, d[i] = p0;
            }
            for (int round = 2; round < ROUNDS; ++round) {
                for (int i = 0; i < BESIDE; ++i) {
                    const u64w p0 = low_product(a[i], splat_u64(M0));
                    const u64w p1 = low_product(c[i], splat_u64(M1));
                    a[i] = (p1 >> 32) ^ b[i] ^ k0[round];
                    c[i] = (p0 >> 32) ^ d[i] ^ k1[round];
                    b[i] = p1, d[i] = p0;
                }
            }
            for (int i = 0; i < BESIDE; ++i) {
                store_interleaved(x + 4 * (at + i * WIDTH), (a[i] & LOW) | (b[i] << 32),
                                  (c[i] & LOW) | (d[i] << 32));
            }
        }
    }
};

inline double gumbel(uint32_t x) {
    return -__builtin_log(-__builtin_log((static_cast<double>(x) + 0.5) * 0x1p-32));
}

// --- weights ------------------------------------------------------------------------------------

// Rounded once where the level has the instruction; weights are compared to a sum only.
inline f64w fused(f64w a, f64w b, double c) {
#if defined(__AVX512F__)
    return (f64w)_mm512_fmadd_pd((__m512d)a, (__m512d)b, _mm512_set1_pd(c));
#elif defined(__AVX2__)
    return (f64w)_mm256_fmadd_pd((__m256d)a, (__m256d)b, _mm256_set1_pd(c));
#else
    return a * b + c;
#endif
}

// 2^t for -1020 <= t <= 0, to about 6e-16; exactly 1 at 0.
inline f64w exp2_of(f64w t) {
    const f64w magic = splat_f64(0x1.8p52), shifted = t + magic;
    const f64w f = t - (shifted - magic);  // in -1/2..1/2
    // (2^f - 1) / f, interpolated at the Chebyshev nodes
    f64w q = splat_f64(0x1.e5e9f548e5725p-28);
    q = fused(q, f, 0x1.b6571de2f2351p-24);
    q = fused(q, f, 0x1.62bfe46117445p-20);
    q = fused(q, f, 0x1.ffcb76789860fp-17);
    q = fused(q, f, 0x1.4309130378460p-13);
    q = fused(q, f, 0x1.5d87fe908f88ap-10);
    q = fused(q, f, 0x1.3b2ab6fba385fp-7);
    q = fused(q, f, 0x1.c6b08d7044119p-5);
    q = fused(q, f, 0x1.ebfbdff82c590p-3);
    q = fused(q, f, 0x1.62e42fefa39f7p-1);
    return (f64w)((u64w)fused(q, f, 1.0) + ((u64w)shifted << 52));
}

// 2^t for t <= 0, to about 5e-6; what is below 2^-120, or NaN, is that.
inline f32x16 exp2_roughly(f32x16 t) {
    t = max(t, splat(-120.0f));
    const f32x16 magic = splat(EXPONENT_MAGIC), shifted = t + magic;
    const f32x16 f = t - (shifted - magic);  // in -1/2..1/2
    // 2^f, interpolated at the Chebyshev nodes
    f32x16 q = splat(0x1.3cbf6p-7f);
    q = fma(q, f, splat(0x1.ca1ce2p-5f));
    q = fma(q, f, splat(0x1.ebfa4cp-3f));
    q = fma(q, f, splat(0x1.62e0c2p-1f));
    q = fma(q, f, splat(1.0f));
    return q * as_float(shift_left<23>(as_int(shifted)));
}

// exp((z - peak) / T) of 16 tokens at a time; what is below 2^-1000 is that.
struct Weights {
    double peak, scale;  // scale: log2(e) / T
    float least;

    Weights(float peak_, double temperature)
        : peak(peak_), scale(LOG2_E / temperature),
          least(static_cast<float>(peak_ - 1000.0 / scale)) {
        least = least > -FLT_MAX ? least : -FLT_MAX;
    }
    void of(const float* z, double* w) const {
        float above[LANES];
        store(above, max(load(z), splat(least)));
        for (int i = 0; i < PARTS; ++i) {
            const f64w part = exp2_of((to_double(above + i * WIDTH) - peak) * scale);
            std::memcpy(w + i * WIDTH, &part, sizeof part);
        }
    }
};

// Sixteen running sums, and their fixed tree.
struct Sums {
    f64w part[PARTS] = {};

    void add(const double* w) {
        for (int i = 0; i < PARTS; ++i) {
            f64w more;
            std::memcpy(&more, w + i * WIDTH, sizeof more);
            part[i] += more;
        }
    }
    void add(f32x16 a) {
        float lane[LANES];
        store(lane, a);
        for (int i = 0; i < PARTS; ++i) {
            part[i] += to_double(lane + i * WIDTH);
        }
    }
    double total() const {
        double lane[LANES];
        std::memcpy(lane, part, sizeof lane);
        for (int half = LANES / 2; half > 0; half /= 2) {
            for (int i = 0; i < half; ++i) {
                lane[i] += lane[i + half];
            }
        }
        return lane[0];
    }
};

// --- rows ---------------------------------------------------------------------------------------

// A row as whole blocks; the last one is a copy that ends in -inf.
struct Row {
    const float* z;
    int vocab, blocks, whole;
    float* block_max;
    float peak = -INFINITE;
    float tail[BLOCK];

    Row(const float* z_, int vocab_, float* block_max_)
        : z(z_), vocab(vocab_), blocks(sampler_blocks(vocab_)), whole(vocab_ / BLOCK),
          block_max(block_max_) {
        for (int i = 0; whole < blocks && i < BLOCK; ++i) {
            const int id = whole * BLOCK + i;
            tail[i] = id < vocab ? z[id] : -INFINITE;
        }
        for (int b = 0; b < blocks; ++b) {
            block_max[b] = max_of(block(b));
            peak = block_max[b] > peak ? block_max[b] : peak;
        }
    }

    const float* block(int b) const { return b < whole ? z + b * BLOCK : tail; }
    bool valid() const { return peak > -INFINITE && peak < INFINITE; }

    // Counts NaN as infinity.
    static float max_of(const float* z) {
        f32x16 best = load(z), odd = best * zero();  // becomes NaN by NaN, and by either infinity
        for (int i = LANES; i < BLOCK; i += LANES) {
            const f32x16 v = load(z + i);
            best = max(best, v);
            odd = fma(v, zero(), odd);
        }
        if (bits_of(equal(odd, odd)) == 0xffff) {
            return largest(best);
        }
        best = splat(-INFINITE);
        for (int i = 0; i < BLOCK; i += LANES) {
            const f32x16 v = load(z + i);
            best = max(best, select(equal(v, v), v, splat(INFINITE)));
        }
        return largest(best);
    }

    int argmax() const {
        int b = 0;
        while (block_max[b] != peak) {
            ++b;
        }
        const float* values = block(b);
        int i = 0;
        while (values[i] != peak) {
            ++i;
        }
        return b * BLOCK + i;
    }

    int first_invalid() const {
        int infinite = -1;
        for (int i = 0; i < vocab; ++i) {
            if (z[i] != z[i]) {
                return i;
            }
            if (infinite < 0 && z[i] == INFINITE) {
                infinite = i;
            }
        }
        return infinite < 0 ? 0 : infinite;
    }
};

// The last token that stays, in the order of falling logits and rising ids. -inf never stays.
struct Cut {
    float value = -FLT_MAX;
    int id = INT_MAX;

    bool keeps(float z, int at) const { return z > value || (z == value && at <= id); }
    bool is_open() const { return value == -FLT_MAX && id == INT_MAX; }
};

// Tokens that the cut keeps, by rising id, with weight 1. Returns how many.
int gather(const Row& row, const Cut& cut, Candidate* list) {
    int count = 0;
    const f32x16 bound = splat(cut.value);
    for (int b = 0; b < row.blocks; ++b) {
        if (row.block_max[b] < cut.value) {
            continue;
        }
        const float* z = row.block(b);
        for (int i = 0; i < BLOCK; i += LANES) {
            uint32_t bits = ~bits_of(less(load(z + i), bound)) & 0xffff;
            for (; bits; bits &= bits - 1) {
                const int at = i + __builtin_ctz(bits);
                if (cut.keeps(z[at], b * BLOCK + at)) {
                    list[count++] = {z[at], b * BLOCK + at, 1.0};
                }
            }
        }
    }
    return count;
}

// An integer that is ordered as the floats are; both zeros are one.
inline uint32_t order_key(float z) {
    z += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &z, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// The entry at which the running weight, in order of falling logits and rising place, reaches
// `target`; the last one if none does. `target` becomes what is left of it at that entry. Radix
// selection: digit by digit of the key, keeping only the entries that share the chosen one's
// digits. Overwrites the list.
Candidate reach(Candidate* list, int count, double& target) {
    uint32_t differing = 0;
    for (int i = 1; i < count; ++i) {
        differing |= order_key(list[i].z) ^ order_key(list[0].z);
    }
    for (int shift = 24; count > 1 && shift >= 0; shift -= 8) {
        if (!(differing >> shift)) {
            continue;  // one digit for all
        }
        double histogram[256] = {};
        for (int i = 0; i < count; ++i) {
            histogram[order_key(list[i].z) >> shift & 255] += list[i].weight;
        }
        uint32_t digit = 0;
        double before = 0.0, passed = 0.0;
        for (int d = 255; d >= 0 && passed < target; --d) {
            if (histogram[d] > 0.0) {
                digit = d;
                before = passed;
                passed += histogram[d];
            }
        }
        target -= before;
        int kept = 0;
        for (int i = 0; i < count; ++i) {
            if ((order_key(list[i].z) >> shift & 255) == digit) {
                list[kept++] = list[i];
            }
        }
        count = kept;
    }
    int i = 0;
    for (; i + 1 < count && list[i].weight < target; ++i) {
        target -= list[i].weight;
    }
    return list[i];
}

// A value that at least k tokens reach, and not many more: the k-th highest maximum of a block.
float kth_maximum(const Row& row, int k, Candidate* list) {
    if (k > row.blocks) {
        return -FLT_MAX;
    }
    for (int b = 0; b < row.blocks; ++b) {
        list[b] = {row.block_max[b], b, 1.0};
    }
    double place = k;
    const float value = reach(list, row.blocks, place).z;
    return value > -FLT_MAX ? value : -FLT_MAX;
}

// --- filters ------------------------------------------------------------------------------------

Cut top_k_cut(const Row& row, int k, Candidate* list) {
    Cut cut;
    cut.value = kth_maximum(row, k, list);
    const int count = gather(row, cut, list);
    if (count <= k) {
        return cut;
    }
    double place = k;
    const Candidate last = reach(list, count, place);
    return {last.z, last.id};
}

// Top-p of what an earlier cut left.
Cut top_p_of_kept(const Row& row, const SamplerFilter& filter, const Cut& cut, Candidate* list) {
    const int count = gather(row, cut, list);
    const Weights weights(row.peak, filter.temperature);
    Sums sums;
    for (int at = 0; at < count; at += LANES) {
        float z[LANES];
        double w[LANES];
        for (int i = 0; i < LANES; ++i) {
            z[i] = at + i < count ? list[at + i].z : -INFINITE;
        }
        weights.of(z, w);
        sums.add(w);
        for (int i = 0; i < LANES && at + i < count; ++i) {
            list[at + i].weight = w[i];
        }
    }
    double target = filter.top_p * sums.total();
    const Candidate last = reach(list, count, target);
    return {last.z, last.id};
}

// Top-p of a whole row: weights are summed into buckets of equal width by distance from the peak,
// and only the bucket at the edge is looked at token by token.
//
// A weight below (1 - p) / vocab cannot stay: even if all tokens from there on had it, they would
// not weigh 1 - p of the total, which is at least the peak's 1. So the buckets end there, and of
// what lies beyond only the sum is needed: first roughly, which nearly always settles the edge, and
// exactly where it does not.
struct Buckets {
    static constexpr int COUNT = 1024;
    // How far the rough sum can be off, of itself: an exponent of up to 120 is rounded three times,
    // to 24 bits. And the roundings of the other sums, of the total.
    static constexpr double FAR_ERROR = 0x1p-15, SUM_ERROR = 0x1p-40;
    static constexpr uint32_t ALL = (1 << LANES) - 1;
    const Row& row;
    const Weights weights;
    const double top_p;
    float per_logit, scale;
    double weight[COUNT] = {};
    // Of the tokens that have a bucket, and of the others, roughly.
    double total_near = 0.0, total_far = 0.0;

    Buckets(const Row& row_, const SamplerFilter& filter)
        : row(row_), weights(row_.peak, filter.temperature), top_p(filter.top_p) {
        double nats = -__builtin_log((1.0 - filter.top_p) / row.vocab);
        nats = nats < 1.0 ? 1.0 : nats;
        per_logit = static_cast<float>((COUNT - 1) / (nats * filter.temperature));
        scale = static_cast<float>(weights.scale);
        fill();
    }

    f32x16 index_of(f32x16 z) const {
        const f32x16 at = min((splat(row.peak) - z) * splat(per_logit), splat(COUNT));
        return to_float(round_to_int(at));
    }
    static uint32_t near_bits(f32x16 index) { return bits_of(less(index, splat(COUNT))); }
    // Whether all tokens of a block lie beyond a bucket.
    bool is_beyond(int b, int bucket) const {
        return (row.peak - row.block_max[b]) * per_logit > bucket + 0.5f;
    }

    void fill() {
        Sums far;
        for (int b = 0; b < row.blocks; ++b) {
            const float* z = row.block(b);
            const uint64_t near = is_beyond(b, COUNT - 1) ? 0 : add_near(z);
            if (near == ~uint64_t{0}) {
                continue;
            }
            f32x16 rough = zero();
            for (int i = 0; i < BLOCK; i += LANES) {
                f32x16 w = exp2_roughly((load(z + i) - splat(row.peak)) * splat(scale));
                if (const auto bits = static_cast<uint32_t>(near >> i & ALL)) {
                    w = select(mask_from_bits(bits), zero(), w);
                }
                rough = rough + w;
            }
            far.add(rough);
        }
        total_far = far.total();
        for (int i = 0; i < COUNT; ++i) {
            total_near += weight[i];
        }
    }

    // Puts the tokens of a block into their buckets; returns the bits of those that have one.
    uint64_t add_near(const float* z) {
        uint64_t near = 0;
        double w[BLOCK];
        int32_t at[BLOCK];
        for (int i = 0; i < BLOCK; i += LANES) {
            const f32x16 index = index_of(load(z + i));
            if (const uint64_t bits = near_bits(index)) {
                near |= bits << i;
                weights.of(z + i, w + i);
                store_i32(at + i, round_to_int(index));
            }
        }
        if (near == ~uint64_t{0}) {
            for (int i = 0; i < BLOCK; ++i) {
                weight[at[i]] += w[i];
            }
            return near;
        }
        for (uint64_t bits = near; bits; bits &= bits - 1) {
            const int i = __builtin_ctzll(bits);
            weight[at[i]] += w[i];
        }
        return near;
    }

    double far_exactly() const {
        Sums far;
        for (int b = 0; b < row.blocks; ++b) {
            const float* z = row.block(b);
            for (int i = 0; i < BLOCK; i += LANES) {
                const uint32_t bits = near_bits(index_of(load(z + i)));
                if (bits == ALL) {
                    continue;
                }
                double w[LANES];
                weights.of(z + i, w);
                for (int j = 0; j < LANES; ++j) {
                    w[j] = bits >> j & 1 ? 0.0 : w[j];
                }
                far.add(w);
            }
        }
        return far.total();
    }

    int gather_bucket(int bucket, Candidate* list) const {
        int count = 0;
        for (int b = 0; b < row.blocks; ++b) {
            if (is_beyond(b, bucket)) {
                continue;
            }
            const float* z = row.block(b);
            for (int i = 0; i < BLOCK; i += LANES) {
                uint32_t bits = bits_of(equal(index_of(load(z + i)), splat(bucket)));
                if (!bits) {
                    continue;
                }
                double w[LANES];
                weights.of(z + i, w);
                for (; bits; bits &= bits - 1) {
                    const int j = __builtin_ctz(bits);
                    list[count++] = {z[i + j], b * BLOCK + i + j, w[j]};
                }
            }
        }
        return count;
    }

    // The last token that stays; `left` is what it needs of its own weight to reach the target.
    Candidate last(double total, Candidate* list, double& left) const {
        const double target = top_p * total;
        double before = 0.0, passed = 0.0;
        int bucket = 0;
        for (int i = 0; i < COUNT && passed < target; ++i) {
            if (weight[i] > 0.0) {
                bucket = i;
                before = passed;
                passed += weight[i];
            }
        }
        left = target - before;
        return reach(list, gather_bucket(bucket, list), left);
    }

    Cut cut(Candidate* list) const {
        const double slack = total_far * FAR_ERROR + (total_near + total_far) * SUM_ERROR;
        double left;
        Candidate found = last(total_near + total_far, list, left);
        if (left <= slack || left > found.weight - slack) {
            found = last(total_near + far_exactly(), list, left);
        }
        return {found.z, found.id};
    }
};

// The lowest float whose quotient by T is at least the peak's plus log(min_p).
Cut min_p_cut(const Row& row, const SamplerFilter& filter) {
    const double T = filter.temperature, bound = row.peak / T + filter.log_min_p;
    float z = static_cast<float>(bound * T);
    z = z < -FLT_MAX ? -FLT_MAX : z > row.peak ? row.peak : z;
    while (z > -FLT_MAX && z / T >= bound) {
        z = __builtin_nextafterf(z, -INFINITE);
    }
    while (z / T < bound && z < row.peak) {
        z = __builtin_nextafterf(z, INFINITE);
    }
    return {z, INT_MAX};
}

Cut cut_of(const Row& row, const SamplerFilter& filter, Candidate* list) {
    Cut cut;
    if (filter.top_k > 0 && filter.top_k < row.vocab) {
        cut = top_k_cut(row, filter.top_k, list);
    }
    if (filter.top_p < 1.0) {
        if (cut.is_open()) {
            cut = Buckets(row, filter).cut(list);
        } else {
            cut = top_p_of_kept(row, filter, cut, list);
        }
    }
    if (filter.log_min_p > -INFINITE) {
        const Cut other = min_p_cut(row, filter);
        cut = other.value > cut.value ? other : cut;
    }
    return cut;
}

// --- the best -----------------------------------------------------------------------------------

// The k best scores in order. Ids must come in rising order, so that equal scores are, too.
struct Best {
    int k;
    int64_t* ids;
    double* scores;
    int count = 0;

    bool is_full() const { return count == k; }
    double last() const { return scores[k - 1]; }

    void add(int id, double score) {
        if (is_full() && !(score > last())) {
            return;
        }
        int at = is_full() ? k - 1 : count++;
        for (; at > 0 && score > scores[at - 1]; --at) {
            ids[at] = ids[at - 1];
            scores[at] = scores[at - 1];
        }
        ids[at] = id;
        scores[at] = score;
    }
};

// Which x can still make one of the best, without a logarithm.
//
// Let v = (2^32 - x - 1/2) = 2^32 (1 - u). Since -log(u) >= 1 - u, a token reaches a score of
// `bound` only if log2(v) <= 32 + log2(e) (z/T - bound). A float's bits as an integer, over 2^23
// and less 127, are at most its log2. The slack covers the roundings to float32.
struct Chance {
    static constexpr float UNIT = 0x1p23f;
    static constexpr double SLACK = 0.002;
    static constexpr float LEAST = 126 * UNIT;  // the bits of v = 1/2
    float peak, slope, offset = INFINITE;
    double peak_score;

    Chance(const Row& row, double temperature)
        : peak(row.peak), slope(static_cast<float>(LOG2_E / temperature * UNIT)),
          peak_score(row.peak / temperature) {}

    void raise(double bound) {
        const double log2_v = 32 + SLACK + LOG2_E * (peak_score - bound);
        const float lower = static_cast<float>((127 + log2_v) * UNIT);
        offset = lower < offset ? lower : offset;
    }
    bool none(float z) const { return (z - peak) * slope + offset <= LEAST; }

    uint32_t bits(const float* z, const uint32_t* x) const {
        const i32x16 words = load_i32(reinterpret_cast<const int32_t*>(x));
        // 2^32 - x where that is below 2^31, and 2^31 elsewhere
        const f32x16 above = to_float(splat_i32(0) - words);
        const f32x16 v = select(less(zero(), above), above, splat(0x1p31f)) - splat(0.5f);
        const f32x16 most = (load(z) - splat(peak)) * splat(slope) + splat(offset);
        return bits_of(less(to_float(as_int(v)), most));
    }
};

// The noise of a row's columns: by their tokens, which ascend.
struct ColumnNoise {
    const Noise noise;
    const int64_t* tokens;  // of the columns; null where column i is token i

    void words(int block, int columns, uint32_t* x) const {
        if (!tokens) {
            noise.words(block, x);
            return;
        }
        uint32_t made[BLOCK];
        int64_t known = -1;
        const int first = block * BLOCK, count = std::min(BLOCK, columns - first);
        for (int i = 0; i < count; ++i) {
            const int64_t token = tokens[first + i];
            if (token / BLOCK != known) {
                known = token / BLOCK;
                noise.words(static_cast<int>(known), made);
            }
            x[i] = made[token % BLOCK];
        }
        std::fill(x + count, x + BLOCK, 0);
    }
};

void best_perturbed(const Row& row, double temperature, const Cut& cut, const ColumnNoise& noise,
                    Best& best) {
    Chance chance(row, temperature);
    uint32_t x[BLOCK];
    if (best.k == 1) {  // the highest logit always stays: no need to win against less
        const int id = row.argmax();
        noise.words(id / BLOCK, row.vocab, x);
        chance.raise(row.peak / temperature + gumbel(x[id % BLOCK]));
    }
    for (int b = 0; b < row.blocks; ++b) {
        if (row.block_max[b] < cut.value || chance.none(row.block_max[b])) {
            continue;
        }
        const float* z = row.block(b);
        noise.words(b, row.vocab, x);
        for (int i = 0; i < BLOCK; i += LANES) {
            uint32_t bits = chance.bits(z + i, x + i);
            if (!bits) {
                continue;
            }
            for (; bits; bits &= bits - 1) {
                const int at = i + __builtin_ctz(bits), id = b * BLOCK + at;
                if (cut.keeps(z[at], id)) {
                    best.add(id, z[at] / temperature + gumbel(x[at]));
                }
            }
            if (best.is_full()) {
                chance.raise(best.last());
            }
        }
    }
}

// --- the table ----------------------------------------------------------------------------------

bool argmax(const float* z, int vocab, const SamplerScratch& scratch, int64_t* id) {
    const Row row(z, vocab, scratch.block_max);
    *id = row.valid() ? row.argmax() : row.first_invalid();
    return row.valid();
}

int top(const float* z, int vocab, int k, const SamplerScratch& scratch, int64_t* ids,
        double* scores) {
    const Row row(z, vocab, scratch.block_max);
    if (!row.valid()) {
        return -1;
    }
    Cut cut;
    cut.value = kth_maximum(row, k, scratch.list);
    const int count = gather(row, cut, scratch.list);
    Best best{k, ids, scores};
    for (int i = 0; i < count; ++i) {
        best.add(scratch.list[i].id, scratch.list[i].z);
    }
    for (int id = 0; id < vocab && !best.is_full(); ++id) {
        if (z[id] == -INFINITE) {
            best.add(id, z[id]);
        }
    }
    return best.count;
}

int perturbed_top(const float* z, int vocab, const int64_t* tokens, const SamplerFilter& filter,
                  const NoiseKey& key, int k, const SamplerScratch& scratch, int64_t* ids,
                  double* scores) {
    const Row row(z, vocab, scratch.block_max);
    if (!row.valid()) {
        return -1;
    }
    Best best{k, ids, scores};
    const Cut cut = cut_of(row, filter, scratch.list);
    best_perturbed(row, filter.temperature, cut, {Noise(key), tokens}, best);
    return best.count;
}

void log_softmax(const float* z, int vocab, const SamplerScratch& scratch, float* __restrict y) {
    const Row row(z, vocab, scratch.block_max);
    double offset = __builtin_nan("");
    if (row.valid()) {
        const Weights weights(row.peak, 1.0);
        Sums sums;
        for (int at = 0; at < row.blocks * BLOCK; at += LANES) {
            double w[LANES];
            weights.of(row.block(at / BLOCK) + at % BLOCK, w);
            sums.add(w);
        }
        offset = row.peak + __builtin_log(sums.total());
    }
    for (int i = 0; i < vocab; ++i) {
        y[i] = static_cast<float>(z[i] - offset);
    }
}

int count_above(const float* z, int vocab, float bound) {
    int count = 0;
    for (int i = 0; i < vocab; ++i) {
        count += z[i] > bound;
    }
    return count;
}

void noise_words(const NoiseKey& key, int block, uint32_t* x) { Noise(key).words(block, x); }

}  // namespace sampling

const SamplerKernels sampler_kernels = {
    sampling::argmax,      sampling::top,         sampling::perturbed_top,
    sampling::log_softmax, sampling::count_above, sampling::noise_words,
};

}  // namespace
}  // namespace paceline
