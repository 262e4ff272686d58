#include "pack.h"

#include <atomic>
#include <cmath>

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace paceline {
namespace {

constexpr int BLOCK_BYTES = 2 + GROUP / 2;  // of a GGUF Q4_0 block: a 16-bit float, 32 nibbles
constexpr int REFITS = 2;

int tiles_of(int n) { return (n + TILE - 1) / TILE; }
int padded(int k) { return round_up(k, K_MULTIPLE); }

// Calls piece(tile) for every tile; true if all of them returned true.
template <typename Piece> bool each_tile(int n, Piece piece) {
    std::atomic<bool> good{true};
    pool().each(tiles_of(n), [&](int tile, int) {
        if (!piece(tile)) {
            good.store(false);
        }
    });
    return good.load();
}

// --- 8 bits -------------------------------------------------------------------------------------

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

// --- 4 bits -------------------------------------------------------------------------------------

uint16_t to_f16(float x) {  // to nearest, half to even, of a finite x; beyond the largest: that
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x477fe000) {  // 65504
        return static_cast<uint16_t>(sign | 0x7bff);
    }
    if (bits < 0x38800000) {  // subnormal: a multiple of 2^-24
        float size;
        std::memcpy(&size, &bits, sizeof size);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(rounded(size * 0x1p24f)));
    }
    const uint32_t half = bits - 0x38000000;
    return static_cast<uint16_t>(sign | (half + 0xfff + (half >> 13 & 1)) >> 13);
}

float from_f16(uint16_t h) {
    const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    float size;
    if (exponent == 31) {
        size = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        size = static_cast<float>(mantissa) * 0x1p-24f;
    } else {
        const uint32_t bits = (exponent + 112) << 23 | mantissa << 13;
        std::memcpy(&size, &bits, sizeof size);
    }
    return h & 0x8000 ? -size : size;
}

// The lanes rounded to 16-bit floats, which go to `halves`.
f32x16 to_halves(f32x16 x, uint16_t* halves) {
    float lane[LANES];
    store(lane, x);
    for (int i = 0; i < LANES; ++i) {
        halves[i] = to_f16(lane[i]);
        lane[i] = from_f16(halves[i]);
    }
    return load(lane);
}

// One over a scale; of a scale of zero: zero, which makes every code 0.
inline f32x16 inverse(f32x16 scale) {
    const f32x16 one = splat(1.0f);
    const mask16 none = equal(scale, zero());
    return select(none, zero(), one / select(none, one, scale));
}

inline f32x16 code(f32x16 x, f32x16 inverse_scale) {
    const f32x16 bounded = max(min(x * inverse_scale, splat(7.0f)), splat(-8.0f));
    return to_float(round_to_int(bounded));
}

// Sums over a group of value * code and of code * code: with given codes the best scale is their
// quotient, and explains xc^2 / cc of the group's sum of squares.
struct Fit {
    f32x16 xc, cc;
};

inline Fit fit(const f32x16* x, f32x16 inverse_scale) {
    Fit f = {zero(), zero()};
    for (int i = 0; i < GROUP; ++i) {
        const f32x16 c = code(x[i], inverse_scale);
        f.xc = f.xc + x[i] * c;
        f.cc = f.cc + c * c;
    }
    return f;
}

inline f32x16 quotient(f32x16 above, f32x16 below) {
    const mask16 none = equal(below, zero());
    return select(none, zero(), above / select(none, splat(1.0f), below));
}

f32x16 squared_error(const f32x16* x, f32x16 scale) {
    const f32x16 inv = inverse(scale);
    f32x16 total = zero();
    for (int i = 0; i < GROUP; ++i) {
        const f32x16 miss = x[i] - code(x[i], inv) * scale;
        total = total + miss * miss;
    }
    return total;
}

// Scales of 16 groups of 32 values, one group per lane; x is [32] vectors of lanes. Candidates put
// the largest magnitude at `reach` steps, on either side, since codes reach further below zero
// (-8) than above (7). The candidate whose codes explain most is refitted to its codes, twice, and
// what is kept is what has the least squared error once it is rounded to 16 bits.
f32x16 best_scales(const f32x16* x, uint16_t* halves) {
    f32x16 most = zero();
    for (int i = 0; i < GROUP; ++i) {
        most = max(abs(x[i]), most);
    }
    f32x16 best = zero(), explained = splat(-1.0f);
    for (float reach = 5.5f; reach < 9.3f; reach += 0.35f) {
        const f32x16 inv = quotient(splat(reach), most);
        for (const f32x16 signed_inv : {inv, zero() - inv}) {
            const Fit f = fit(x, signed_inv);
            const f32x16 scale = quotient(f.xc, f.cc), share = scale * f.xc;
            const mask16 better = less(explained, share);
            explained = select(better, share, explained);
            best = select(better, scale, best);
        }
    }
    uint16_t trial[LANES];
    f32x16 kept = to_halves(best, halves), error = squared_error(x, kept);
    f32x16 scale = kept;
    for (int i = 0; i < REFITS; ++i) {
        const Fit f = fit(x, inverse(scale));
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

uint8_t* nibble_at(uint8_t* group, int output, int input) {
    const int half = input % (GROUP / 2);
    return group + 2 * TILE + (half / QUAD) * TILE * QUAD + output * QUAD + half % QUAD;
}

void clear_group(uint8_t* group) {
    std::memset(group, 0, 2 * TILE);
    std::memset(group + 2 * TILE, 0x88, GROUP_BYTES - 2 * TILE);
}

void pack_group(const f32x16* x, uint8_t* group) {
    uint16_t halves[TILE];
    const f32x16 inv = inverse(best_scales(x, halves));
    std::memcpy(group, halves, sizeof halves);
    for (int i = 0; i < GROUP; ++i) {
        int32_t codes[TILE];
        store_i32(codes, round_to_int(code(x[i], inv)));
        for (int output = 0; output < TILE; ++output) {
            uint8_t* at = nibble_at(group, output, i);
            const uint8_t nibble = static_cast<uint8_t>(codes[output] + 8);
            *at = i < GROUP / 2 ? nibble : static_cast<uint8_t>(*at | nibble << 4);
        }
    }
}

}  // namespace

size_t int8_bytes(int n, int k) { return size_t(tiles_of(n)) * TILE * padded(k); }
size_t int4_bytes(int n, int k) { return size_t(tiles_of(n)) * (padded(k) / GROUP) * GROUP_BYTES; }

bool pack_int8(const float* weight, int n, int k, int8_t* data, float* scale) {
    return each_tile(n, [=](int tile) {
        const size_t tile_bytes = size_t(TILE) * padded(k);
        int8_t* out = data + tile * tile_bytes;
        std::memset(out, 0, tile_bytes);
        bool finite = true;
        for (int output = 0; output < TILE; ++output) {
            const int row = tile * TILE + output;
            const float* w = weight + size_t(row) * k;
            const float most = row < n ? largest(w, k) : 0.0f;
            const float step = most / 127.0f < 1e-30f ? 1e-30f : most / 127.0f;
            scale[row] = step;
            if (most == INFINITY) {
                finite = false;
            } else if (row < n) {
                for (int i = 0; i < k; ++i) {
                    out[i / QUAD * TILE * QUAD + output * QUAD + i % QUAD] =
                        static_cast<int8_t>(rounded(w[i] / step));
                }
            }
        }
        return finite;
    });
}

bool pack_int8_rows(const int8_t* q, int n, int k, int8_t* data) {
    return each_tile(n, [=](int tile) {
        const size_t tile_bytes = size_t(TILE) * padded(k);
        int8_t* out = data + tile * tile_bytes;
        std::memset(out, 0, tile_bytes);
        bool good = true;
        for (int output = 0; output < TILE && tile * TILE + output < n; ++output) {
            const int8_t* row = q + size_t(tile * TILE + output) * k;
            for (int i = 0; i < k; ++i) {
                good &= row[i] != -128;
                out[i / QUAD * TILE * QUAD + output * QUAD + i % QUAD] = row[i];
            }
        }
        return good;
    });
}

void unpack_int8(const int8_t* data, int n, int k, int8_t* q) {
    each_tile(n, [=](int tile) {
        const int8_t* in = data + tile * size_t(TILE) * padded(k);
        for (int output = 0; output < TILE && tile * TILE + output < n; ++output) {
            int8_t* row = q + size_t(tile * TILE + output) * k;
            for (int i = 0; i < k; ++i) {
                row[i] = in[i / QUAD * TILE * QUAD + output * QUAD + i % QUAD];
            }
        }
        return true;
    });
}

bool pack_int4(const float* weight, int n, int k, uint8_t* data) {
    return each_tile(n, [=](int tile) {
        const int groups = padded(k) / GROUP;
        bool finite = true;
        for (int row = tile * TILE; row < n && row < (tile + 1) * TILE; ++row) {
            finite &= largest(weight + size_t(row) * k, k) < INFINITY;
        }
        for (int g = 0; finite && g < groups; ++g) {
            float lanes[GROUP][TILE] = {};
            for (int output = 0; output < TILE && tile * TILE + output < n; ++output) {
                const float* row = weight + size_t(tile * TILE + output) * k;
                for (int i = 0; i < GROUP && g * GROUP + i < k; ++i) {
                    lanes[i][output] = row[g * GROUP + i];
                }
            }
            f32x16 x[GROUP];
            for (int i = 0; i < GROUP; ++i) {
                x[i] = load(lanes[i]);
            }
            pack_group(x, data + (size_t(tile) * groups + g) * GROUP_BYTES);
        }
        return finite;
    });
}

bool pack_q4_0(const uint8_t* blocks, int n, int k, uint8_t* data) {
    return each_tile(n, [=](int tile) {
        const int groups = padded(k) / GROUP, real = k / GROUP;
        bool finite = true;
        for (int g = 0; g < groups; ++g) {
            uint8_t* group = data + (size_t(tile) * groups + g) * GROUP_BYTES;
            clear_group(group);
            for (int output = 0; output < TILE && tile * TILE + output < n && g < real; ++output) {
                const uint8_t* block =
                    blocks + (size_t(tile * TILE + output) * real + g) * BLOCK_BYTES;
                uint16_t half;
                std::memcpy(&half, block, sizeof half);
                finite &= (half & 0x7c00) != 0x7c00;
                std::memcpy(group + 2 * output, block, 2);
                for (int i = 0; i < GROUP / 2; ++i) {
                    *nibble_at(group, output, i) = block[2 + i];
                }
            }
        }
        return finite;
    });
}

void unpack_int4(const uint8_t* data, int n, int k, float* weight) {
    each_tile(n, [=](int tile) {
        const int groups = padded(k) / GROUP;
        for (int output = 0; output < TILE && tile * TILE + output < n; ++output) {
            float* row = weight + size_t(tile * TILE + output) * k;
            for (int i = 0; i < k; ++i) {
                const int input = i % GROUP;
                const uint8_t* group =
                    data + (size_t(tile) * groups + i / GROUP) * GROUP_BYTES;
                uint16_t half;
                std::memcpy(&half, group + 2 * output, sizeof half);
                const int byte = *nibble_at(const_cast<uint8_t*>(group), output, input);
                const int nibble = input < GROUP / 2 ? byte & 15 : byte >> 4;
                row[i] = static_cast<float>(nibble - 8) * from_f16(half);
            }
        }
        return true;
    });
}

}  // namespace paceline
