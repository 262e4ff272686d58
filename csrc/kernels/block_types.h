// The block formats of quantised weights: how many bits a code has, which inputs share a scale, and
// where things lie in a packed tile. Knows no instruction set and no Python.
//
// A weight is scale * q, or scale * q + minimum, with an integer q made of a code. A *stretch* is 32
// inputs. A *unit* is what a format's own blocks hold: one stretch, or eight that share a 16-bit
// scale by which the small integer scales of their groups are multiplied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int STRETCH = 32;
constexpr int CODE_ZERO = 128;  // added to codes that have a sign where products are made of them

enum class BlockType : uint8_t {
    q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4,  // units of one stretch
    q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs,         // units of eight
    z4, z4_128, z8, z8_128, f4_16, c8, c8_128,  // float32 scales; z: with a zero point of 8 bits
};
constexpr int BLOCK_TYPES = 20;

struct BlockShape {
    const char* name;
    int bits;         // of a code
    int unit;         // inputs
    int group;        // inputs that share a scale: 16 or 32
    bool minimum;     // whether weights have one
    int raw_bytes;    // of a unit of one output, as the format's files have it
    int scale_bytes;  // of a unit of a tile's 16 outputs, without its codes

    constexpr bool is_signed() const { return !minimum || bits == 8; }    // the integer q
    constexpr int code_bytes() const { return STRETCH * 16 * bits / 8; }  // of a tile's stretch
};

// GGUF's names, in capitals, for its types. A tile's scales: 16 each of `d` (float16, float32 or an
// exponent), then of what else a unit has (`m` or `dmin`), then per stretch the groups' integers.
constexpr BlockShape BLOCK_SHAPES[BLOCK_TYPES] = {
    {"Q8_0", 8, 32, 32, false, 34, 32},
    {"Q4_0", 4, 32, 32, false, 18, 32},
    {"Q4_1", 4, 32, 32, true, 20, 64},
    {"Q5_0", 5, 32, 32, false, 22, 32},
    {"Q5_1", 5, 32, 32, true, 24, 64},
    {"IQ4_NL", 4, 32, 32, false, 18, 32},
    {"MXFP4", 4, 32, 32, false, 17, 16},
    {"Q2_K", 2, 256, 16, true, 84, 64 + 8 * 32},
    {"Q3_K", 3, 256, 16, false, 110, 32 + 8 * 32},
    {"Q4_K", 4, 256, 32, true, 144, 64 + 8 * 32},
    {"Q5_K", 5, 256, 32, true, 176, 64 + 8 * 32},
    {"Q6_K", 6, 256, 16, false, 210, 32 + 8 * 32},
    {"IQ4_XS", 4, 256, 32, false, 136, 32 + 8 * 16},
    {"Z4_32", 4, 32, 32, true, 5 + 16, 80},
    {"Z4_128", 4, 128, 32, true, 5 + 64, 80},
    {"Z8_32", 8, 32, 32, true, 5 + 32, 80},
    {"Z8_128", 8, 128, 32, true, 5 + 128, 80},
    {"F4_16", 4, 32, 16, false, 8 + 16, 128},
    {"C8_32", 8, 32, 32, false, 4 + 32, 64},
    {"C8_128", 8, 128, 32, false, 4 + 128, 64},
};

// What four bits stand for in the formats with a table, CODE_ZERO added.
constexpr uint8_t IQ4_TABLE[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4_TABLE[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                   128, 127, 126, 125, 124, 122, 120, 116};

inline const BlockShape& shape_of(BlockType type) { return BLOCK_SHAPES[static_cast<int>(type)]; }

// Sizes of a packed matrix of k inputs. A tile is its scales, padded to a whole cache line, and its
// codes, stretch by stretch.
struct BlockSizes {
    int stretches, units;
    size_t scales, tile;  // bytes

    BlockSizes(const BlockShape& shape, int k)
        : stretches((k + STRETCH - 1) / STRETCH),
          units((k + shape.unit - 1) / shape.unit),
          scales((size_t(units) * shape.scale_bytes + 63) / 64 * 64),
          tile(scales + size_t(units) * (shape.unit / STRETCH) * shape.code_bytes()) {}
};

}  // namespace paceline
