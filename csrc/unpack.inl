// Packed tiles as the products take them: a byte per code and float scales, a chunk at a time. What
// comes out for a format is exact, and the same on every level.
namespace paceline {
namespace {

constexpr int CHUNK = 8;                       // stretches that are unpacked together
constexpr int QUADS = STRETCH / QUAD;          // of a stretch
constexpr int TILE_QUAD = TILE * QUAD;         // bytes of one quad of inputs of a tile
constexpr int STRETCH_BYTES = STRETCH * TILE;  // of a tile's codes, one byte each

// One chunk of a tile. Codes are bytes, [stretches, 8 quads, 16 outputs, 4]: the integer itself, or
// CODE_ZERO more than it where it has a sign.
struct TileChunk {
    const uint8_t* codes;  // where they are: in `bytes`, or in the weights if they are bytes already
    alignas(64) uint8_t bytes[CHUNK * STRETCH_BYTES];
    alignas(64) float scale[2 * CHUNK][TILE];    // of each group of 16 or 32 inputs
    alignas(64) float minimum[2 * CHUNK][TILE];  // added to each weight of the group
};

inline i32x16 load_bytes(const uint8_t* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }

inline i32x16 bytes_of(int value) {
    return splat_i32(static_cast<int32_t>(uint32_t(value) * 0x01010101u));
}

template <int N> inline i32x16 shifted(i32x16 a) {  // to the left; to the right where N < 0
    if constexpr (N > 0) {
        return shift_left<N>(a);
    } else if constexpr (N < 0) {
        return shift_right<-N>(a);
    } else {
        return a;
    }
}

// The codes of quad J of a stretch.
template <int BITS, int J> inline i32x16 codes_of_quad(const uint8_t* from) {
    if constexpr (BITS == 4) {
        return shifted<J < 4 ? 0 : -4>(load_bytes(from + J % 4 * 64)) & bytes_of(15);
    } else if constexpr (BITS == 2) {
        return shifted<-2 * (J % 4)>(load_bytes(from + J / 4 * 64)) & bytes_of(3);
    } else if constexpr (BITS == 3) {
        const i32x16 high = shifted<2 - J>(load_bytes(from + 128)) & bytes_of(4);
        return codes_of_quad<2, J>(from) | high;
    } else if constexpr (BITS == 5) {
        const i32x16 high = shifted<4 - J>(load_bytes(from + 256)) & bytes_of(16);
        return codes_of_quad<4, J>(from) | high;
    } else {
        static_assert(BITS == 6, "codes of other sizes need no unpacking");
        const i32x16 high = load_bytes(from + 256 + J / 4 * 64);
        return codes_of_quad<4, J>(from) | (shifted<4 - 2 * (J % 4)>(high) & bytes_of(48));
    }
}

template <int BITS, int J = 0, typename Map>
inline void unpack_stretch(const uint8_t* from, uint8_t* to, const Map& map) {
    if constexpr (J < QUADS) {
        const i32x16 codes = map(codes_of_quad<BITS, J>(from));
        store_i32(reinterpret_cast<int32_t*>(to + J * TILE_QUAD), codes);
        unpack_stretch<BITS, J + 1>(from, to, map);
    }
}

template <int BITS, typename Map>
inline void unpack_codes(const uint8_t* from, int count, TileChunk& to, const Map& map) {
    constexpr int BYTES = STRETCH_BYTES * BITS / 8;
    for (int i = 0; i < count; ++i) {
        unpack_stretch<BITS>(from + i * BYTES, to.bytes + i * STRETCH_BYTES, map);
    }
    to.codes = to.bytes;
}

struct AsTheyAre {
    i32x16 operator()(i32x16 codes) const { return codes; }
};
struct Shifted {  // codes of integers from -zero on
    int zero;
    i32x16 operator()(i32x16 codes) const { return add_bytes(codes, bytes_of(CODE_ZERO - zero)); }
};
struct LookedUp {
    const uint8_t* table;
    i32x16 operator()(i32x16 codes) const { return look_up(table, codes); }
};

inline void unpack_codes_of(BlockType type, const uint8_t* from, int count, TileChunk& to) {
    switch (type) {
        case BlockType::q8_0:
        case BlockType::z8:
        case BlockType::z8_128:
        case BlockType::c8:
        case BlockType::c8_128:
            to.codes = from;
            return;
        case BlockType::q4_0:
            return unpack_codes<4>(from, count, to, Shifted{8});
        case BlockType::q5_0:
            return unpack_codes<5>(from, count, to, Shifted{16});
        case BlockType::q3_k:
            return unpack_codes<3>(from, count, to, Shifted{4});
        case BlockType::q6_k:
            return unpack_codes<6>(from, count, to, Shifted{32});
        case BlockType::iq4_nl:
        case BlockType::iq4_xs:
            return unpack_codes<4>(from, count, to, LookedUp{IQ4_TABLE});
        case BlockType::mxfp4:
        case BlockType::f4_16:
            return unpack_codes<4>(from, count, to, LookedUp{FP4_TABLE});
        case BlockType::q2_k:
            return unpack_codes<2>(from, count, to, AsTheyAre{});
        case BlockType::q4_1:
        case BlockType::q4_k:
        case BlockType::z4:
        case BlockType::z4_128:
            return unpack_codes<4>(from, count, to, AsTheyAre{});
        case BlockType::q5_1:
        case BlockType::q5_k:
            return unpack_codes<5>(from, count, to, AsTheyAre{});
    }
}

inline f32x16 load_halves(const uint8_t* p) {
    uint16_t halves[TILE];
    std::memcpy(halves, p, sizeof halves);
    return load_f16(halves);
}
inline f32x16 load_floats(const uint8_t* p) {
    float floats[TILE];
    std::memcpy(floats, p, sizeof floats);
    return load(floats);
}
// Half of 2^(e - 127), which for the smallest two is a subnormal number.
inline f32x16 load_halved_powers(const uint8_t* p) {
    int32_t bits[TILE];
    for (int i = 0; i < TILE; ++i) {
        bits[i] = p[i] < 2 ? 0x00200000 << p[i] : static_cast<int32_t>(uint32_t(p[i] - 1) << 23);
    }
    return as_float(load_i32(bits));
}

// The scales of the units that hold stretches first..first + count - 1, which begin a unit.
inline void unpack_scales(BlockType type, const uint8_t* scales, int first, int count, TileChunk& to) {
    const BlockShape& shape = shape_of(type);
    const int in_unit = shape.unit / STRETCH, groups = STRETCH / shape.group;
    for (int i = 0; i < count; i += in_unit) {
        const uint8_t* at = scales + size_t((first + i) / in_unit) * shape.scale_bytes;
        const int end = i + in_unit < count ? i + in_unit : count;
        switch (type) {
            case BlockType::q8_0:
            case BlockType::q4_0:
            case BlockType::q5_0:
            case BlockType::iq4_nl:
                store(to.scale[i], load_halves(at));
                break;
            case BlockType::mxfp4:
                store(to.scale[i], load_halved_powers(at));
                break;
            case BlockType::q4_1:
            case BlockType::q5_1:
                store(to.scale[i], load_halves(at));
                store(to.minimum[i], load_halves(at + 2 * TILE));
                break;
            case BlockType::q2_k:
            case BlockType::q4_k:
            case BlockType::q5_k: {
                const f32x16 d = load_halves(at), least = zero() - load_halves(at + 2 * TILE);
                at += 4 * TILE;
                for (int group = i * groups; group < end * groups; ++group, at += TILE) {
                    const i32x16 both = load_u8(at);  // q2_k: a nibble each
                    const bool nibbles = type == BlockType::q2_k;
                    const i32x16 scale = nibbles ? both & splat_i32(15) : both;
                    const i32x16 minimum =
                        nibbles ? shift_right<4>(both) : load_u8(at + TILE);
                    store(to.scale[group], d * to_float(scale));
                    store(to.minimum[group], least * to_float(minimum));
                    at += nibbles ? 0 : TILE;
                }
                break;
            }
            case BlockType::q3_k:
            case BlockType::q6_k:
            case BlockType::iq4_xs: {
                const f32x16 d = load_halves(at);
                at += 2 * TILE;
                for (int group = i * groups; group < end * groups; ++group, at += TILE) {
                    store(to.scale[group], d * to_float(load_i8(reinterpret_cast<const int8_t*>(at))));
                }
                break;
            }
            case BlockType::z4:
            case BlockType::z4_128:
            case BlockType::z8:
            case BlockType::z8_128: {
                const i32x16 zero_code = splat_i32(shape.is_signed() ? CODE_ZERO : 0);
                const f32x16 d = load_floats(at);
                const f32x16 minimum = d * to_float(zero_code - load_u8(at + 4 * TILE));
                for (int stretch = i; stretch < end; ++stretch) {
                    store(to.scale[stretch], d);
                    store(to.minimum[stretch], minimum);
                }
                break;
            }
            case BlockType::f4_16:
                store(to.scale[2 * i], load_floats(at));
                store(to.scale[2 * i + 1], load_floats(at + 4 * TILE));
                break;
            case BlockType::c8:
            case BlockType::c8_128:
                for (int stretch = i; stretch < end; ++stretch) {
                    store(to.scale[stretch], load_floats(at));
                }
                break;
        }
    }
}

// Stretches first..first + count - 1 of a tile, at most CHUNK, `first` a multiple of that.
inline void unpack_chunk(const BlockWeights& w, const BlockSizes& sizes, int tile, int first,
                         int count, TileChunk& to) {
    const uint8_t* at = w.data + size_t(tile) * sizes.tile;
    unpack_scales(w.type, at, first, count, to);
    const uint8_t* codes = at + sizes.scales + size_t(first) * shape_of(w.type).code_bytes();
    unpack_codes_of(w.type, codes, count, to);
}

// Bytes that lie in the weights, for rows that meet them several times: nearer, and in one run.
inline void bring_near(TileChunk& chunk, int count) {
    if (chunk.codes != chunk.bytes) {
        std::memcpy(chunk.bytes, chunk.codes, size_t(count) * STRETCH_BYTES);
        chunk.codes = chunk.bytes;
    }
}

// Lane `output` of a tile: its weights are exact in float, or the nearest to what they stand for.
void gather_blocks(const BlockWeights& w, int output, float multiplier, float* y) {
    const BlockShape& shape = shape_of(w.type);
    const BlockSizes sizes(shape, w.k);
    const int lane = output % TILE, zero_code = shape.is_signed() ? CODE_ZERO : 0;
    const f32x16 times = splat(multiplier);
    TileChunk chunk;
    for (int first = 0; first < sizes.stretches; first += CHUNK) {
        const int count = sizes.stretches - first < CHUNK ? sizes.stretches - first : CHUNK;
        unpack_chunk(w, sizes, output / TILE, first, count, chunk);
        for (int at = 0; at < count * STRETCH && first * STRETCH + at < w.k; at += LANES) {
            int32_t codes[LANES];
            for (int i = 0; i < LANES; ++i) {
                const int input = at + i;
                codes[i] = chunk.codes[input / QUAD * TILE_QUAD + lane * QUAD + input % QUAD];
            }
            const int group = at / shape.group;
            f32x16 value = to_float(load_i32(codes) - splat_i32(zero_code)) *
                           splat(chunk.scale[group][lane]);
            if (shape.minimum) {
                value = value + splat(chunk.minimum[group][lane]);
            }
            const int input = first * STRETCH + at, left = w.k - input;
            store_part(y + input, value * times, left);
        }
    }
}

}  // namespace
}  // namespace paceline
