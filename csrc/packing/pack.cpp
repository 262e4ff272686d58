#include "packing/pack.h"

#include <cstring>

#include "kernels/kernels.h"

namespace paceline {
namespace {

constexpr int MOST_GROUPS = 16;  // of a unit

// --- reading blocks -----------------------------------------------------------------------------

// One unit of one output as a file has it, taken apart.
struct Unit {
    uint8_t code[256];
    uint8_t d[8], m[2];                           // as they are stored
    uint8_t scale[MOST_GROUPS], minimum[MOST_GROUPS];  // the groups' integers
};

// Nibbles of `count` bytes: the low ones, then the high ones.
inline void nibbles(const uint8_t* from, int count, uint8_t* to) {
    for (int i = 0; i < count; ++i) {
        to[i] = from[i] & 15;
        to[count + i] = from[i] >> 4;
    }
}

// For each byte eight bytes, in which the fifth bit is one where the byte's bit is.
struct FifthBits {
    uint64_t of[256];
    FifthBits() {
        for (int byte = 0; byte < 256; ++byte) {
            uint8_t codes[8];
            for (int bit = 0; bit < 8; ++bit) {
                codes[bit] = static_cast<uint8_t>((byte >> bit & 1) << 4);
            }
            std::memcpy(of + byte, codes, sizeof codes);
        }
    }
};
const FifthBits FIFTH_BITS;

// 32 bits, the lowest first. Whole words, since codes that were written one by one are not there
// yet when they are read together.
inline void fifth_bits(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < STRETCH / 8; ++i) {
        uint64_t codes;
        std::memcpy(&codes, to + 8 * i, sizeof codes);
        codes |= FIFTH_BITS.of[from[i]];
        std::memcpy(to + 8 * i, &codes, sizeof codes);
    }
}

// Eight scales and eight minima of six bits in twelve bytes: Q4_K and Q5_K.
inline void six_bit_pairs(const uint8_t* from, Unit& to) {
    for (int i = 0; i < 4; ++i) {
        to.scale[i] = from[i] & 63;
        to.minimum[i] = from[4 + i] & 63;
        to.scale[4 + i] = static_cast<uint8_t>((from[8 + i] & 15) | (from[i] >> 6) << 4);
        to.minimum[4 + i] = static_cast<uint8_t>((from[8 + i] >> 4) | (from[4 + i] >> 6) << 4);
    }
}

// 256 codes of two bits: 32 bytes hold 128 of them, two bits for each 32.
inline void two_bits(const uint8_t* from, uint8_t* to) {
    for (int part = 0; part < 8; ++part) {
        for (int i = 0; i < 32; ++i) {
            to[part * 32 + i] = from[part / 4 * 32 + i] >> (part % 4 * 2) & 3;
        }
    }
}

// Formats: the GGUF specification and ggml's block structures, whose fields are named in passing.
void read_q2_k(const uint8_t* from, Unit& to) {
    std::memcpy(to.scale, from, 16);  // a nibble each of scale and minimum
    two_bits(from + 16, to.code);
    std::memcpy(to.d, from + 80, 2);
    std::memcpy(to.m, from + 82, 2);
}

void read_q3_k(const uint8_t* from, Unit& to) {
    const uint8_t *high = from, *low = from + 32, *scales = from + 96;
    two_bits(low, to.code);
    for (int part = 0; part < 8; ++part) {
        for (int i = 0; i < 32; ++i) {
            uint8_t& code = to.code[part * 32 + i];
            code = static_cast<uint8_t>(code | (high[i] >> part & 1) << 2);
        }
    }
    for (int i = 0; i < 16; ++i) {
        const int four = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
        const int two = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        to.scale[i] = static_cast<uint8_t>((four | two << 4) - 32);
    }
    std::memcpy(to.d, from + 108, 2);
}

void read_q4_k(const uint8_t* from, Unit& to) {
    std::memcpy(to.d, from, 2);
    std::memcpy(to.m, from + 2, 2);
    six_bit_pairs(from + 4, to);
    for (int i = 0; i < 4; ++i) {
        nibbles(from + 16 + i * 32, 32, to.code + i * 64);
    }
}

void read_q5_k(const uint8_t* from, Unit& to) {
    std::memcpy(to.d, from, 2);
    std::memcpy(to.m, from + 2, 2);
    six_bit_pairs(from + 4, to);
    for (int i = 0; i < 4; ++i) {
        nibbles(from + 48 + i * 32, 32, to.code + i * 64);
    }
    for (int group = 0; group < 8; ++group) {  // qh: bit `group` of byte i belongs to its input i
        for (int i = 0; i < 32; ++i) {
            uint8_t& code = to.code[group * 32 + i];
            code = static_cast<uint8_t>(code | (from[16 + i] >> group & 1) << 4);
        }
    }
}

void read_q6_k(const uint8_t* from, Unit& to) {
    for (int half = 0; half < 2; ++half) {
        uint8_t* code = to.code + half * 128;
        const uint8_t *low = from + half * 64, *high = from + 128 + half * 32;
        nibbles(low, 64, code);
        for (int part = 0; part < 4; ++part) {
            for (int i = 0; i < 32; ++i) {
                uint8_t& each = code[part * 32 + i];
                each = static_cast<uint8_t>(each | (high[i] >> (2 * part) & 3) << 4);
            }
        }
    }
    std::memcpy(to.scale, from + 192, 16);
    std::memcpy(to.d, from + 208, 2);
}

void read_iq4_xs(const uint8_t* from, Unit& to) {
    uint16_t high;
    std::memcpy(to.d, from, 2);
    std::memcpy(&high, from + 2, sizeof high);
    for (int i = 0; i < 8; ++i) {
        const int low = from[4 + i / 2] >> (i % 2 * 4) & 15;
        to.scale[i] = static_cast<uint8_t>((low | (high >> (2 * i) & 3) << 4) - 32);
        nibbles(from + 8 + i * 16, 16, to.code + i * 32);
    }
}

void read_unit(BlockType type, const uint8_t* from, Unit& to) {
    switch (type) {
        case BlockType::q8_0:
            std::memcpy(to.d, from, 2);
            for (int i = 0; i < STRETCH; ++i) {
                to.code[i] = from[2 + i] ^ 0x80;
            }
            return;
        case BlockType::q4_0:
        case BlockType::iq4_nl:
            std::memcpy(to.d, from, 2);
            return nibbles(from + 2, 16, to.code);
        case BlockType::mxfp4:
            to.d[0] = from[0];
            return nibbles(from + 1, 16, to.code);
        case BlockType::q4_1:
            std::memcpy(to.d, from, 2);
            std::memcpy(to.m, from + 2, 2);
            return nibbles(from + 4, 16, to.code);
        case BlockType::q5_0:
            std::memcpy(to.d, from, 2);
            nibbles(from + 6, 16, to.code);
            return fifth_bits(from + 2, to.code);
        case BlockType::q5_1:
            std::memcpy(to.d, from, 2);
            std::memcpy(to.m, from + 2, 2);
            nibbles(from + 8, 16, to.code);
            return fifth_bits(from + 4, to.code);
        case BlockType::q2_k:
            return read_q2_k(from, to);
        case BlockType::q3_k:
            return read_q3_k(from, to);
        case BlockType::q4_k:
            return read_q4_k(from, to);
        case BlockType::q5_k:
            return read_q5_k(from, to);
        case BlockType::q6_k:
            return read_q6_k(from, to);
        case BlockType::iq4_xs:
            return read_iq4_xs(from, to);
        case BlockType::z4:
        case BlockType::z4_128:
            std::memcpy(to.d, from, 4);
            to.minimum[0] = from[4];
            for (int i = 0; i < shape_of(type).unit / STRETCH; ++i) {
                nibbles(from + 5 + i * 16, 16, to.code + i * STRETCH);
            }
            return;
        case BlockType::z8:
        case BlockType::z8_128:
            std::memcpy(to.d, from, 4);
            to.minimum[0] = from[4];
            std::memcpy(to.code, from + 5, size_t(shape_of(type).unit));
            return;
        case BlockType::f4_16:
            std::memcpy(to.d, from, 8);
            return nibbles(from + 8, 16, to.code);
        case BlockType::c8:
        case BlockType::c8_128:
            std::memcpy(to.d, from, 4);
            for (int i = 0; i < shape_of(type).unit; ++i) {
                to.code[i] = from[4 + i] ^ 0x80;
            }
            return;
    }
}

bool is_finite_half(const uint8_t* at) { return (at[1] & 0x7c) != 0x7c; }
bool is_finite_float(const uint8_t* at) { return (at[3] & 0x7f) != 0x7f || !(at[2] & 0x80); }

bool is_finite(BlockType type, const Unit& unit) {
    switch (type) {
        case BlockType::mxfp4:
            return unit.d[0] != 255;
        case BlockType::z4:
        case BlockType::z4_128:
        case BlockType::z8:
        case BlockType::z8_128:
        case BlockType::c8:
        case BlockType::c8_128:
            return is_finite_float(unit.d);
        case BlockType::f4_16:
            return is_finite_float(unit.d) && is_finite_float(unit.d + 4);
        default:
            return is_finite_half(unit.d) && is_finite_half(unit.m);
    }
}

// --- writing tiles ------------------------------------------------------------------------------

// Puts one output's scales where its tile has them.
void write_scales(BlockType type, const Unit& unit, int output, uint8_t* at) {
    const BlockShape& shape = shape_of(type);
    switch (type) {
        case BlockType::mxfp4:
            at[output] = unit.d[0];
            return;
        case BlockType::z4:
        case BlockType::z4_128:
        case BlockType::z8:
        case BlockType::z8_128:
            std::memcpy(at + 4 * output, unit.d, 4);
            at[4 * TILE + output] = unit.minimum[0];
            return;
        case BlockType::f4_16:
            std::memcpy(at + 4 * output, unit.d, 4);
            std::memcpy(at + 4 * TILE + 4 * output, unit.d + 4, 4);
            return;
        case BlockType::c8:
        case BlockType::c8_128:
            std::memcpy(at + 4 * output, unit.d, 4);
            return;
        default:
            break;
    }
    std::memcpy(at + 2 * output, unit.d, 2);
    at += 2 * TILE;
    if (shape.minimum) {
        std::memcpy(at + 2 * output, unit.m, 2);
        at += 2 * TILE;
    }
    if (shape.unit == STRETCH) {
        return;
    }
    const bool pairs = shape.minimum && type != BlockType::q2_k;  // which has both in one byte
    for (int group = 0; group < shape.unit / shape.group; ++group) {
        at[output] = unit.scale[group];
        at += TILE;
        if (pairs) {
            at[output] = unit.minimum[group];
            at += TILE;
        }
    }
}

using Word = uint32_t;  // four codes of an output

// A stretch of 16 outputs' codes, [quad][output], to planes of 16 words: see BlockWeights.
void write_codes(int bits, const Word (*codes)[TILE], uint8_t* to) {
    if (bits == 8) {
        std::memcpy(to, codes, sizeof(Word) * 8 * TILE);
        return;
    }
    // A plane has `count` of a word's bits, from `lowest` on, of every step-th quad from `first` on.
    const auto plane = [&](int first, int step, int lowest, int count) {
        const Word mask = 0x01010101u * ((1u << count) - 1);
        Word words[TILE] = {};
        for (int quad = first, shift = 0; shift < 8; quad += step, shift += count) {
            for (int output = 0; output < TILE; ++output) {
                words[output] |= (codes[quad][output] >> lowest & mask) << shift;
            }
        }
        std::memcpy(to, words, sizeof words);
        to += sizeof words;
    };
    const int below = bits >= 4 ? 4 : 0;
    for (int i = 0; i < below; ++i) {
        plane(i, 4, 0, 4);
    }
    if (bits - below >= 2) {
        plane(0, 1, below, 2);
        plane(4, 1, below, 2);
    }
    if (bits % 2) {
        plane(0, 1, bits - 1, 1);
    }
}

size_t block_row_bytes(BlockType type, int k) {
    const BlockShape& shape = shape_of(type);
    return size_t((k + shape.unit - 1) / shape.unit) * shape.raw_bytes;
}

bool pack_tile(BlockType type, const uint8_t* rows, int outputs, int k, uint8_t* data) {
    const BlockShape& shape = shape_of(type);
    const BlockSizes sizes(shape, k);
    const size_t row_bytes = block_row_bytes(type, k);
    std::memset(data, 0, sizes.scales);
    bool good = true;
    Unit unit = {};
    alignas(64) Word codes[256 / QUAD][TILE] = {};
    for (int u = 0; u < sizes.units; ++u) {
        for (int output = 0; output < outputs; ++output) {
            read_unit(type, rows + output * row_bytes + size_t(u) * shape.raw_bytes, unit);
            good &= is_finite(type, unit);
            write_scales(type, unit, output, data + size_t(u) * shape.scale_bytes);
            for (int quad = 0; quad < shape.unit / QUAD; ++quad) {
                std::memcpy(&codes[quad][output], unit.code + quad * QUAD, sizeof(Word));
            }
        }
        const int stretches = shape.unit / STRETCH;
        for (int i = 0; i < stretches; ++i) {
            write_codes(shape.bits, codes + i * STRETCH / QUAD,
                        data + sizes.scales + (size_t(u) * stretches + i) * shape.code_bytes());
        }
    }
    return good;
}

// --- floats -------------------------------------------------------------------------------------

// [outputs, k] elements of so many bytes to [k, 16]; what is not there is zero.
void pack_float_tile(const uint8_t* rows, int outputs, int k, int bytes, uint8_t* to) {
    std::memset(to, 0, size_t(round_up(k, TILE)) * TILE * bytes);
    const auto copy = [=](auto element) {
        using Element = decltype(element);
        for (int output = 0; output < outputs; ++output) {
            const uint8_t* row = rows + size_t(output) * k * sizeof(Element);
            for (int input = 0; input < k; ++input) {
                std::memcpy(to + (size_t(input) * TILE + output) * sizeof(Element),
                            row + size_t(input) * sizeof(Element), sizeof(Element));
            }
        }
    };
    bytes == 4 ? copy(uint32_t{}) : bytes == 2 ? copy(uint16_t{}) : copy(uint8_t{});
}

constexpr int FP8_UNIT = int(sizeof(float)) + SCALE_INPUTS;  // bytes
int fp8_units(int k) { return (k + SCALE_INPUTS - 1) / SCALE_INPUTS; }

bool pack_fp8_tile(const uint8_t* rows, int outputs, int k, uint8_t* codes) {
    uint8_t* scales = codes + size_t(round_up(k, TILE)) * TILE;
    std::memset(codes, 0, size_t(round_up(k, TILE)) * TILE);
    std::memset(scales, 0, size_t(fp8_units(k)) * TILE * sizeof(float));
    bool good = true;
    for (int output = 0; output < outputs; ++output) {
        for (int unit = 0; unit < fp8_units(k); ++unit) {
            const uint8_t* from = rows + (size_t(output) * fp8_units(k) + unit) * FP8_UNIT;
            good &= is_finite_float(from);
            std::memcpy(scales + (size_t(unit) * TILE + output) * sizeof(float), from, sizeof(float));
            for (int i = 0; i < SCALE_INPUTS && unit * SCALE_INPUTS + i < k; ++i) {
                codes[size_t(unit * SCALE_INPUTS + i) * TILE + output] = from[sizeof(float) + i];
            }
        }
    }
    return good;
}

}  // namespace

bool find_format(const char* name, WeightFormat* found) {
    static const char* const FLOATS[] = {"F32", "F16", "BF16", "F8_128"};  // as in FloatType
    for (int i = 0; i < 4; ++i) {
        if (std::strcmp(name, FLOATS[i]) == 0) {
            *found = {true, {}, static_cast<FloatType>(i)};
            return true;
        }
    }
    for (int i = 0; i < BLOCK_TYPES; ++i) {
        if (std::strcmp(name, BLOCK_SHAPES[i].name) == 0) {
            *found = {false, static_cast<BlockType>(i), {}};
            return true;
        }
    }
    return false;
}

size_t raw_row_bytes(WeightFormat format, int k) {
    if (!format.is_float) {
        return block_row_bytes(format.block, k);
    }
    return format.floats == FloatType::f8e4m3 ? size_t(fp8_units(k)) * FP8_UNIT
                                              : size_t(k) * bytes_of(format.floats);
}

size_t packed_bytes(WeightFormat format, int n, int k) {
    const size_t tile = format.is_float
                            ? size_t(FloatWeights{nullptr, nullptr, format.floats, n, k}.tile_bytes())
                            : BlockSizes(shape_of(format.block), k).tile;
    return size_t(tiles_of(n)) * tile;
}

bool pack_rows(WeightFormat format, const uint8_t* rows, int n, int k, uint8_t* data) {
    const size_t row_bytes = raw_row_bytes(format, k), tile_bytes = packed_bytes(format, 1, k);
    return each_of(tiles_of(n), [=](int tile) {
        const int first = tile * TILE, outputs = n - first < TILE ? n - first : TILE;
        const uint8_t* from = rows + first * row_bytes;
        uint8_t* to = data + tile * tile_bytes;
        if (!format.is_float) {
            return pack_tile(format.block, from, outputs, k, to);
        }
        if (format.floats == FloatType::f8e4m3) {
            return pack_fp8_tile(from, outputs, k, to);
        }
        pack_float_tile(from, outputs, k, bytes_of(format.floats), to);
        return true;
    });
}

}  // namespace paceline
