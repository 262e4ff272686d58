// Packed tiles as the products take them: a byte per code and float scales, a chunk at a time. What
// comes out for a format is exact, and the same on every level.
namespace paceline {
namespace {

constexpr int CHUNK = 8;                       // stretches that are unpacked together
constexpr int QUADS = STRETCH / QUAD;          // of a stretch
constexpr int TILE_QUAD = TILE * QUAD;         // bytes of one quad of inputs of a tile
constexpr int STRETCH_BYTES = STRETCH * TILE;  // of a tile's codes, one byte each

// Of each group of 16 or 32 inputs of so many stretches.
template <int STRETCHES> struct TileScales {
    alignas(64) float scale[2 * STRETCHES][TILE];
    alignas(64) float minimum[2 * STRETCHES][TILE];  // added to each weight of the group
};

// One chunk of a tile. Unpacked codes are bytes, [stretches, 8 quads, 16 outputs, 4]: the integer
// itself, or CODE_ZERO more than it where it has a sign.
struct TileChunk {
    const uint8_t* codes;  // where they are: in `bytes`, or in the weights
    alignas(64) uint8_t bytes[CHUNK * STRETCH_BYTES];
    TileScales<CHUNK> scales;
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
    if constexpr (BITS == 8) {
        return load_bytes(from + J * TILE_QUAD);
    } else if constexpr (BITS == 4) {
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
        static_assert(BITS == 6, "no format has codes of other sizes");
        const i32x16 high = load_bytes(from + 256 + J / 4 * 64);
        return codes_of_quad<4, J>(from) | (shifted<4 - 2 * (J % 4)>(high) & bytes_of(48));
    }
}

// How codes become bytes. Integers with a sign are at least -REACH and below REACH, others below twice
// that.
template <int REACH_> struct AsTheyAre {
    static constexpr int REACH = REACH_;
    static i32x16 of(i32x16 codes) { return codes; }
};
template <int ZERO> struct Shifted {  // codes of integers from -ZERO on
    static constexpr int REACH = ZERO;
    static i32x16 of(i32x16 codes) { return add_bytes(codes, bytes_of(CODE_ZERO - ZERO)); }
};
template <const uint8_t (&TABLE)[16], int REACH_> struct LookedUp {
    static constexpr int REACH = REACH_;
    static i32x16 of(i32x16 codes) { return look_up(TABLE, codes); }
};

// Where products of small integers are cheaper than others, the least of these that holds them all.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr int reach_class(int reach) {
    return reach <= 8 ? 8 : reach <= 16 ? 16 : reach <= 32 ? 32 : CODE_ZERO;
}
#else
constexpr int reach_class(int) { return CODE_ZERO; }
#endif

// What a format's codes are. HALVES: the scales of each stretch, and its minima, are 16-bit floats that
// are read where they lie. With codes of five bits, which lie in two places, that takes longer for one
// row: so many streams at once no hardware foresees.
template <int BITS_, typename Map, bool MINIMUM_, int GROUP, bool HALVES_ = false,
          bool SIGNED_ = !MINIMUM_>
struct Codes {
    static constexpr int BITS = BITS_, COUNT = GROUP / QUAD;  // quads that share a scale
    static constexpr int STRETCH_SIZE = STRETCH_BYTES * BITS / 8;
    static constexpr int REACH = Map::REACH;
    static constexpr bool MINIMUM = MINIMUM_, HALVES = HALVES_, SIGNED = SIGNED_;
    using AsBytes = Codes<8, AsTheyAre<reach_class(REACH)>, MINIMUM, GROUP, false, SIGNED>;

    template <int J> static ALWAYS_INLINE i32x16 quad(const uint8_t* from) {
        return Map::of(codes_of_quad<BITS, J>(from));
    }
    template <int J = 0> static void unpack_stretch(const uint8_t* from, uint8_t* to) {
        if constexpr (J < QUADS) {
            store_i32(reinterpret_cast<int32_t*>(to + J * TILE_QUAD), quad<J>(from));
            unpack_stretch<J + 1>(from, to);
        }
    }
};

// Calls f with the Codes of a format.
template <typename F> inline void with_codes(BlockType type, const F& f) {
    constexpr int HALF = STRETCH / 2;
    switch (type) {
        case BlockType::q8_0:
            return f(Codes<8, AsTheyAre<CODE_ZERO>, false, STRETCH, true>());
        case BlockType::c8:
        case BlockType::c8_128:
            return f(Codes<8, AsTheyAre<CODE_ZERO>, false, STRETCH>());
        case BlockType::z8:
        case BlockType::z8_128:
            return f(Codes<8, AsTheyAre<CODE_ZERO>, true, STRETCH, false, true>());
        case BlockType::q4_0:
            return f(Codes<4, Shifted<8>, false, STRETCH, true>());
        case BlockType::q5_0:
            return f(Codes<5, Shifted<16>, false, STRETCH>());
        case BlockType::q3_k:
            return f(Codes<3, Shifted<4>, false, HALF>());
        case BlockType::q6_k:
            return f(Codes<6, Shifted<32>, false, HALF>());
        case BlockType::iq4_nl:
            return f(Codes<4, LookedUp<IQ4_TABLE, CODE_ZERO>, false, STRETCH, true>());
        case BlockType::iq4_xs:
            return f(Codes<4, LookedUp<IQ4_TABLE, CODE_ZERO>, false, STRETCH>());
        case BlockType::mxfp4:
            return f(Codes<4, LookedUp<FP4_TABLE, 13>, false, STRETCH>());
        case BlockType::f4_16:
            return f(Codes<4, LookedUp<FP4_TABLE, 13>, false, HALF>());
        case BlockType::q2_k:
            return f(Codes<2, AsTheyAre<2>, true, HALF>());
        case BlockType::q4_1:
            return f(Codes<4, AsTheyAre<8>, true, STRETCH, true>());
        case BlockType::q4_k:
        case BlockType::z4:
        case BlockType::z4_128:
            return f(Codes<4, AsTheyAre<8>, true, STRETCH>());
        case BlockType::q5_1:
        case BlockType::q5_k:
            return f(Codes<5, AsTheyAre<16>, true, STRETCH>());
    }
}

// Of a chunk that has its codes in the weights.
inline void unpack_codes(BlockType type, int count, TileChunk& chunk) {
    with_codes(type, [&](auto codes) {
        if (codes.BITS < 8) {
            for (int i = 0; i < count; ++i) {
                codes.unpack_stretch(chunk.codes + i * codes.STRETCH_SIZE,
                                     chunk.bytes + i * STRETCH_BYTES);
            }
            chunk.codes = chunk.bytes;
        }
    });
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
// Half of 2^(e - 127): for e < 2 a subnormal number, where the other formula makes -infinity or 0.
inline f32x16 load_halved_powers(const uint8_t* p) {
    const i32x16 e = load_u8(p), one = splat_i32(1);
    const i32x16 subnormal = splat_i32(0x00200000) + shift_left<21>(e & one);
    return max(as_float(shift_left<23>(e - one)), as_float(subnormal));
}

// The scales of stretches first..first + count - 1, at most STRETCHES; `first` is a multiple of CHUNK.
template <int STRETCHES>
inline void unpack_scales(const BlockWeights& w, const BlockSizes& sizes, int tile, int first,
                          int count, TileScales<STRETCHES>& to) {
    const BlockShape& shape = shape_of(w.type);
    const int in_unit = shape.unit / STRETCH, groups = STRETCH / shape.group;
    const uint8_t* scales = w.data + size_t(tile) * sizes.tile +
                            size_t(first / in_unit) * shape.scale_bytes;
    // Calls unit(where its scales are, its first stretch, the one after its last).
    const auto each_unit = [&](auto unit) {
        const uint8_t* at = scales;
        for (int i = 0; i < count; i += in_unit, at += shape.scale_bytes) {
            unit(at, i, i + in_unit < count ? i + in_unit : count);
        }
    };
    switch (w.type) {
        case BlockType::q8_0:
        case BlockType::q4_0:
        case BlockType::q5_0:
        case BlockType::iq4_nl:
            return each_unit([&](const uint8_t* at, int i, int) {
                store(to.scale[i], load_halves(at));
            });
        case BlockType::mxfp4:
            return each_unit([&](const uint8_t* at, int i, int) {
                store(to.scale[i], load_halved_powers(at));
            });
        case BlockType::q4_1:
        case BlockType::q5_1:
            return each_unit([&](const uint8_t* at, int i, int) {
                store(to.scale[i], load_halves(at));
                store(to.minimum[i], load_halves(at + 2 * TILE));
            });
        case BlockType::q2_k:
            return each_unit([&](const uint8_t* at, int i, int end) {
                const f32x16 d = load_halves(at), least = zero() - load_halves(at + 2 * TILE);
                at += 4 * TILE;
                for (int group = i * groups; group < end * groups; ++group, at += TILE) {
                    const i32x16 nibbles = load_u8(at);
                    store(to.scale[group], d * to_float(nibbles & splat_i32(15)));
                    store(to.minimum[group], least * to_float(shift_right<4>(nibbles)));
                }
            });
        case BlockType::q4_k:
        case BlockType::q5_k:
            return each_unit([&](const uint8_t* at, int i, int end) {
                const f32x16 d = load_halves(at), least = zero() - load_halves(at + 2 * TILE);
                at += 4 * TILE;
                for (int group = i * groups; group < end * groups; ++group, at += 2 * TILE) {
                    store(to.scale[group], d * to_float(load_u8(at)));
                    store(to.minimum[group], least * to_float(load_u8(at + TILE)));
                }
            });
        case BlockType::q3_k:
        case BlockType::q6_k:
        case BlockType::iq4_xs:
            return each_unit([&](const uint8_t* at, int i, int end) {
                const f32x16 d = load_halves(at);
                at += 2 * TILE;
                for (int group = i * groups; group < end * groups; ++group, at += TILE) {
                    const i32x16 scale = load_i8(reinterpret_cast<const int8_t*>(at));
                    store(to.scale[group], d * to_float(scale));
                }
            });
        case BlockType::z4:
        case BlockType::z4_128:
        case BlockType::z8:
        case BlockType::z8_128:
            return each_unit([&](const uint8_t* at, int i, int end) {
                const i32x16 zero_code = splat_i32(shape.is_signed() ? CODE_ZERO : 0);
                const f32x16 d = load_floats(at);
                const f32x16 minimum = d * to_float(zero_code - load_u8(at + 4 * TILE));
                for (int stretch = i; stretch < end; ++stretch) {
                    store(to.scale[stretch], d);
                    store(to.minimum[stretch], minimum);
                }
            });
        case BlockType::f4_16:
            return each_unit([&](const uint8_t* at, int i, int) {
                store(to.scale[2 * i], load_floats(at));
                store(to.scale[2 * i + 1], load_floats(at + 4 * TILE));
            });
        case BlockType::c8:
        case BlockType::c8_128:
            return each_unit([&](const uint8_t* at, int i, int end) {
                for (int stretch = i; stretch < end; ++stretch) {
                    store(to.scale[stretch], load_floats(at));
                }
            });
    }
}

// Where the weights have the codes of stretch `first` of a tile.
inline const uint8_t* chunk_codes(const BlockWeights& w, const BlockSizes& sizes, int tile, int first) {
    return w.data + size_t(tile) * sizes.tile + sizes.scales +
           size_t(first) * shape_of(w.type).code_bytes();
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
        chunk.codes = chunk_codes(w, sizes, output / TILE, first);
        unpack_scales(w, sizes, output / TILE, first, count, chunk.scales);
        unpack_codes(w.type, count, chunk);
        for (int at = 0; at < count * STRETCH && first * STRETCH + at < w.k; at += LANES) {
            int32_t codes[LANES];
            for (int i = 0; i < LANES; ++i) {
                const int input = at + i;
                codes[i] = chunk.codes[input / QUAD * TILE_QUAD + lane * QUAD + input % QUAD];
            }
            const int group = at / shape.group;
            f32x16 value = to_float(load_i32(codes) - splat_i32(zero_code)) *
                           splat(chunk.scales.scale[group][lane]);
            if (shape.minimum) {
                value = value + splat(chunk.scales.minimum[group][lane]);
            }
            const int input = first * STRETCH + at, left = w.k - input;
            store_part(y + input, value * times, left);
        }
    }
}

}  // namespace
}  // namespace paceline
