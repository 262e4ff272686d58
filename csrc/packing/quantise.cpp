// Floats to blocks, sixteen outputs at a time, one per lane. The scales are those with the least
// squared error that a search finds; no text and no importance of inputs is known here.
#include <cmath>
#include <cstring>

#include "kernels/halves.h"
#include "kernels/kernels.h"
#include "packing/pack.h"
#include "kernels/simd.h"

namespace paceline {
namespace {

constexpr int REFITS = 2;
constexpr int SUPER = 256, GROUPS = 16, GROUP = SUPER / GROUPS;  // inputs of a unit of Q3_K and Q2_K

// To the nearest integer, half to even, of |x| < 2^22.
inline float rounded(float x) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23
    return (x + SHIFT) - SHIFT;
}

// The largest magnitude of a row; infinite if any of its values is not finite.
float largest(const float* row, int k) {
    constexpr uint32_t INFINITE = 0x7f800000;
    uint32_t most = 0;
    for (int i = 0; i < k; ++i) {  // magnitudes compare like their bits
        uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    most = most > INFINITE ? INFINITE : most;
    float value;
    std::memcpy(&value, &most, sizeof value);
    return value;
}

// The lanes rounded to 16-bit floats, which go to `halves`.
f32x16 to_halves(f32x16 x, uint16_t* halves) {
    float lane[LANES];
    store(lane, x);
    for (int i = 0; i < LANES; ++i) {
        halves[i] = f32_to_f16(lane[i]);
        lane[i] = f16_to_f32(halves[i]);
    }
    return load(lane);
}

inline f32x16 quotient(f32x16 above, f32x16 below) {
    const mask16 none = equal(below, zero());
    return select(none, zero(), above / select(none, splat(1.0f), below));
}

// One over a scale; of a scale of zero: zero, which makes every code 0.
inline f32x16 inverse(f32x16 scale) { return quotient(splat(1.0f), scale); }

inline f32x16 nearest(f32x16 x, float least, float most) {
    return to_float(round_to_int(max(min(x, splat(most)), splat(least))));
}

// --- scales alone -------------------------------------------------------------------------------

// Codes that have a sign reach further below zero than above. Candidates for a group's scale put its
// largest magnitude at NEAREST to FURTHEST steps.
struct FourBits {
    static constexpr int COUNT = STRETCH;
    static constexpr float LEAST = -8.0f, MOST = 7.0f, NEAREST = 5.5f, FURTHEST = 9.3f, STEP = 0.35f;
};
struct ThreeBits {
    static constexpr int COUNT = GROUP;
    static constexpr float LEAST = -4.0f, MOST = 3.0f, NEAREST = 2.2f, FURTHEST = 4.7f, STEP = 0.2f;
};

template <typename Bits> inline f32x16 code(f32x16 x, f32x16 inverse_scale) {
    return nearest(x * inverse_scale, Bits::LEAST, Bits::MOST);
}

// Sums over a group of value * code and of code * code: with given codes the best scale is their
// quotient, and explains xc^2 / cc of the group's sum of squares.
struct Fit {
    f32x16 xc, cc;
};

template <typename Bits> inline Fit fit(const f32x16* x, f32x16 inverse_scale) {
    Fit f = {zero(), zero()};
    for (int i = 0; i < Bits::COUNT; ++i) {
        const f32x16 c = code<Bits>(x[i], inverse_scale);
        f.xc = f.xc + x[i] * c;
        f.cc = f.cc + c * c;
    }
    return f;
}

// The scale of each lane's group, of the candidates on either side, whose codes explain most.
template <typename Bits> f32x16 best_scale(const f32x16* x) {
    f32x16 most = zero();
    for (int i = 0; i < Bits::COUNT; ++i) {
        most = max(abs(x[i]), most);
    }
    f32x16 best = zero(), explained = splat(-1.0f);
    for (float reach = Bits::NEAREST; reach < Bits::FURTHEST; reach += Bits::STEP) {
        const f32x16 inv = quotient(splat(reach), most);
        for (const f32x16 signed_inv : {inv, zero() - inv}) {
            const Fit f = fit<Bits>(x, signed_inv);
            const f32x16 scale = quotient(f.xc, f.cc), share = scale * f.xc;
            const mask16 better = less(explained, share);
            explained = select(better, share, explained);
            best = select(better, scale, best);
        }
    }
    return best;
}

f32x16 squared_error(const f32x16* x, f32x16 scale) {
    const f32x16 inv = inverse(scale);
    f32x16 total = zero();
    for (int i = 0; i < STRETCH; ++i) {
        const f32x16 miss = x[i] - code<FourBits>(x[i], inv) * scale;
        total = total + miss * miss;
    }
    return total;
}

// The best scale is refitted to its codes, twice, and what is kept is what has the least squared
// error once it is rounded to 16 bits.
f32x16 best_halves(const f32x16* x, uint16_t* halves) {
    uint16_t trial[LANES];
    f32x16 kept = to_halves(best_scale<FourBits>(x), halves), error = squared_error(x, kept);
    f32x16 scale = kept;
    for (int i = 0; i < REFITS; ++i) {
        const Fit f = fit<FourBits>(x, inverse(scale));
        scale = to_halves(quotient(f.xc, f.cc), trial);
        const f32x16 other = squared_error(x, scale);
        const mask16 better = less(other, error);
        error = select(better, other, error);
        kept = select(better, scale, kept);
        const uint32_t bits = bits_of(better);
        for (int lane = 0; lane < LANES; ++lane) {
            halves[lane] = bits >> lane & 1 ? trial[lane] : halves[lane];
        }
    }
    return kept;
}

// Codes of 16 outputs' group, with their scales, to a Q4_0 block each.
void write_q4_0(const f32x16* x, int outputs, size_t row_bytes, uint8_t* at) {
    uint16_t halves[TILE];
    const f32x16 inv = inverse(best_halves(x, halves));
    int32_t codes[STRETCH][TILE];
    for (int i = 0; i < STRETCH; ++i) {
        store_i32(codes[i], round_to_int(code<FourBits>(x[i], inv)));
    }
    for (int output = 0; output < outputs; ++output, at += row_bytes) {
        std::memcpy(at, halves + output, 2);
        for (int i = 0; i < STRETCH / 2; ++i) {
            const int low = codes[i][output] + 8, high = codes[STRETCH / 2 + i][output] + 8;
            at[2 + i] = static_cast<uint8_t>(low | high << 4);
        }
    }
}

// The low two bits of 256 codes: 32 bytes hold 128 of them, two bits for each 32.
void write_two_bits(const int32_t (*codes)[TILE], int output, uint8_t* to) {
    for (int i = 0; i < SUPER; ++i) {
        const int part = i / 32;
        to[part / 4 * 32 + i % 32] |= static_cast<uint8_t>((codes[i][output] & 3) << (part % 4 * 2));
    }
}

// The group whose scale is the largest has 32 of the unit's steps, and the others the nearest number.
void write_q3_k(const f32x16* x, int outputs, size_t row_bytes, uint8_t* at) {
    f32x16 scale[GROUPS], widest = zero();
    for (int g = 0; g < GROUPS; ++g) {
        scale[g] = best_scale<ThreeBits>(x + g * GROUP);
        widest = select(less(abs(widest), abs(scale[g])), scale[g], widest);
    }
    uint16_t halves[TILE];
    const f32x16 step = to_halves(widest * splat(-1.0f / 32), halves), inv = inverse(step);
    int32_t steps[GROUPS][TILE], codes[SUPER][TILE];
    for (int g = 0; g < GROUPS; ++g) {
        const f32x16 count = nearest(scale[g] * inv, -32.0f, 31.0f), own = inverse(count * step);
        store_i32(steps[g], round_to_int(count));
        for (int i = g * GROUP; i < (g + 1) * GROUP; ++i) {
            store_i32(codes[i], round_to_int(code<ThreeBits>(x[i], own)) + splat_i32(4));
        }
    }
    for (int output = 0; output < outputs; ++output, at += row_bytes) {
        std::memset(at, 0, 110);
        for (int i = 0; i < SUPER; ++i) {
            at[i % 32] |= static_cast<uint8_t>(codes[i][output] >> 2 << (i / 32));
        }
        write_two_bits(codes, output, at + 32);
        for (int g = 0; g < GROUPS; ++g) {
            const int six = steps[g][output] + 32;
            at[96 + g % 8] |= static_cast<uint8_t>((six & 15) << (g / 8 * 4));
            at[104 + g % 4] |= static_cast<uint8_t>(six >> 4 << (g / 4 * 2));
        }
        std::memcpy(at + 108, halves + output, 2);
    }
}

// --- scales and minima --------------------------------------------------------------------------

// What codes 0 to 3 stand for: scale * code + low, where low is not above zero.
struct Line {
    f32x16 scale, low;
    f32x16 code(f32x16 x, f32x16 inverse_scale) const {
        return nearest((x - low) * inverse_scale, 0.0f, 3.0f);
    }
};

// The best line for the codes that another one gives.
Line refitted(const f32x16* x, Line line) {
    const f32x16 inv = inverse(line.scale), count = splat(float(GROUP));
    f32x16 sx = zero(), sc = zero(), xc = zero(), cc = zero();
    for (int i = 0; i < GROUP; ++i) {
        const f32x16 c = line.code(x[i], inv);
        sx = sx + x[i];
        sc = sc + c;
        xc = xc + x[i] * c;
        cc = cc + c * c;
    }
    const f32x16 scale = quotient(count * xc - sc * sx, count * cc - sc * sc);
    const f32x16 low = (sx - scale * sc) / count;
    const mask16 fits = less(low, zero());
    return {max(select(fits, scale, quotient(xc, cc)), zero()), select(fits, low, zero())};
}

f32x16 squared_error(const f32x16* x, Line line) {
    const f32x16 inv = inverse(line.scale);
    f32x16 total = zero();
    for (int i = 0; i < GROUP; ++i) {
        const f32x16 miss = x[i] - (line.code(x[i], inv) * line.scale + line.low);
        total = total + miss * miss;
    }
    return total;
}

// Candidates begin with codes that leave out a part of the group's span, as much at either end.
Line best_line(const f32x16* x) {
    f32x16 low = zero(), high = x[0];
    for (int i = 0; i < GROUP; ++i) {
        low = min(x[i], low);
        high = max(x[i], high);
    }
    const f32x16 span = high - low;
    Line best = {zero(), zero()};
    f32x16 error = splat(INFINITY);
    for (float cut = 0.0f; cut < 0.26f; cut += 0.05f) {
        Line line = {span * splat((1.0f - 2.0f * cut) / 3.0f), min(low + span * splat(cut), zero())};
        for (int i = 0; i < REFITS; ++i) {
            line = refitted(x, line);
        }
        const f32x16 other = squared_error(x, line);
        const mask16 better = less(other, error);
        error = select(better, other, error);
        best = {select(better, line.scale, best.scale), select(better, line.low, best.low)};
    }
    return best;
}

void write_q2_k(const f32x16* x, int outputs, size_t row_bytes, uint8_t* at) {
    Line line[GROUPS];
    f32x16 steepest = zero(), deepest = zero();
    for (int g = 0; g < GROUPS; ++g) {
        line[g] = best_line(x + g * GROUP);
        steepest = max(line[g].scale, steepest);
        deepest = max(zero() - line[g].low, deepest);
    }
    uint16_t d[TILE], m[TILE];
    const f32x16 step = to_halves(steepest / splat(15.0f), d), inv = inverse(step);
    const f32x16 down = to_halves(deepest / splat(15.0f), m), inv_down = inverse(down);
    int32_t scales[GROUPS][TILE], minima[GROUPS][TILE], codes[SUPER][TILE];
    for (int g = 0; g < GROUPS; ++g) {
        const f32x16 scale = nearest(line[g].scale * inv, 0.0f, 15.0f);
        const f32x16 minimum = nearest((zero() - line[g].low) * inv_down, 0.0f, 15.0f);
        store_i32(scales[g], round_to_int(scale));
        store_i32(minima[g], round_to_int(minimum));
        const Line own = {scale * step, zero() - minimum * down};
        const f32x16 own_inv = inverse(own.scale);
        for (int i = g * GROUP; i < (g + 1) * GROUP; ++i) {
            store_i32(codes[i], round_to_int(own.code(x[i], own_inv)));
        }
    }
    for (int output = 0; output < outputs; ++output, at += row_bytes) {
        std::memset(at, 0, 84);
        for (int g = 0; g < GROUPS; ++g) {
            at[g] = static_cast<uint8_t>(scales[g][output] | minima[g][output] << 4);
        }
        write_two_bits(codes, output, at + 16);
        std::memcpy(at + 80, d + output, 2);
        std::memcpy(at + 82, m + output, 2);
    }
}

// --- rows ---------------------------------------------------------------------------------------

// Blocks of UNIT inputs of up to 16 outputs at a time. False where a weight is not finite.
template <int UNIT, typename Write>
bool quantise_tiles(const float* weight, int n, int k, size_t row_bytes, size_t block_bytes,
                    uint8_t* rows, const Write& write) {
    return each_of(tiles_of(n), [=](int tile) {
        const int first = tile * TILE, outputs = n - first < TILE ? n - first : TILE;
        for (int output = 0; output < outputs; ++output) {
            if (!(largest(weight + size_t(first + output) * k, k) < INFINITY)) {
                return false;
            }
        }
        for (int at = 0; at < k; at += UNIT) {
            float lanes[UNIT][TILE] = {};
            for (int output = 0; output < outputs; ++output) {
                const float* row = weight + size_t(first + output) * k + at;
                for (int i = 0; i < UNIT && at + i < k; ++i) {
                    lanes[i][output] = row[i];
                }
            }
            f32x16 x[UNIT];
            for (int i = 0; i < UNIT; ++i) {
                x[i] = load(lanes[i]);
            }
            write(x, outputs, row_bytes, rows + first * row_bytes + size_t(at / UNIT) * block_bytes);
        }
        return true;
    });
}

// The scale is rounded to 16 bits before the codes are made of it.
void write_q8_0(const float* x, uint8_t* at) {
    const float most = largest(x, STRETCH);
    const uint16_t half = f32_to_f16(most / 127.0f);
    const float scale = f16_to_f32(half);
    std::memcpy(at, &half, 2);
    for (int i = 0; i < STRETCH; ++i) {
        const float code = scale > 0.0f ? rounded(x[i] / scale) : 0.0f;
        const float bounded = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        at[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(bounded));
    }
}

bool quantise_q8_0(const float* weight, int n, int k, size_t row_bytes, size_t block_bytes,
                   uint8_t* rows) {
    return each_of(n, [=](int row) {
        const float* w = weight + size_t(row) * k;
        if (!(largest(w, k) < INFINITY)) {
            return false;
        }
        for (int at = 0; at < k; at += STRETCH) {
            float group[STRETCH] = {};
            std::memcpy(group, w + at, sizeof(float) * size_t(k - at < STRETCH ? k - at : STRETCH));
            write_q8_0(group, rows + row * row_bytes + size_t(at / STRETCH) * block_bytes);
        }
        return true;
    });
}

}  // namespace

bool can_quantise(WeightFormat format) {
    const BlockType type = format.block;
    return !format.is_float && (type == BlockType::q8_0 || type == BlockType::q4_0 ||
                                type == BlockType::q3_k || type == BlockType::q2_k);
}

bool quantise(WeightFormat format, const float* weight, int n, int k, uint8_t* rows) {
    const size_t row = raw_row_bytes(format, k), block = size_t(shape_of(format.block).raw_bytes);
    switch (format.block) {
        case BlockType::q8_0:
            return quantise_q8_0(weight, n, k, row, block, rows);
        case BlockType::q4_0:
            return quantise_tiles<STRETCH>(weight, n, k, row, block, rows, write_q4_0);
        case BlockType::q3_k:
            return quantise_tiles<SUPER>(weight, n, k, row, block, rows, write_q3_k);
        default:
            return quantise_tiles<SUPER>(weight, n, k, row, block, rows, write_q2_k);
    }
}

}  // namespace paceline
