// The linear of quantised weights and quantised activations, for every block format. Where the level
// has an instruction for products of bytes, codes are unpacked in registers, anew for each block of
// rows: that takes less time than a way through memory. Elsewhere a chunk of a tile is unpacked to
// bytes, which all rows meet. Each element is one fixed program: per group of 16 or 32
// inputs, in ascending order, a fused multiply-add of the exact integer sum with the product of both
// scales, then, where the format has minima, one of the minimum with the inputs' scaled sum.
namespace paceline {
namespace {

struct QuantisedCall {
    const QuantRows& x;
    const BlockWeights& w;
    const LinearOut& out;
    BlockSizes sizes;
    int tile_begin, tile_end;

    ptrdiff_t tile_bytes() const { return ptrdiff_t(sizes.tile); }
    const uint8_t* tile(int index) const { return w.data + index * tile_bytes(); }
};

// Some stretches of a tile, whose codes are packed or bytes, and what is fetched while rows meet them.
struct Meeting {
    const uint8_t* codes;
    const float (*scale)[TILE];  // of each group, where they are unpacked
    const float (*minimum)[TILE];
    const uint8_t* halves;  // or all of the tile's, as they lie in the weights
    int first, count;  // stretches
    int fetches;       // per stretch
    NextRead next;     // the bytes are of a row's stretch
};

// Fetches for one stretch after the other, at least LEAST lines of each.
template <int LEAST> struct Fetching {
    Ahead ahead;
    ptrdiff_t index;
    int fetches;

    ALWAYS_INLINE void next() {
        const int8_t* at = ahead.at + (index < ahead.turn ? 0 : ahead.leap);
#pragma GCC unroll 16
        for (int f = 0; f < LEAST; ++f) {
            __builtin_prefetch(at + f * ahead.step);
        }
        for (int f = LEAST; f < fetches; ++f) {
            __builtin_prefetch(at + f * ahead.step);
        }
        ahead.at += fetches * ahead.step;
        index += fetches;
    }
};

// Of a group of a tile, whose weights have a minimum or not.
template <bool MINIMUM> struct GroupScales {
    f32x16 scale, minimum;

    // What one row's integers become: see the top.
    ALWAYS_INLINE f32x16 scaled(i32x16 total, float inputs, float sum, f32x16 y) const {
        y = fma(to_float(total), scale * splat(inputs), y);
        return MINIMUM ? fma(minimum, splat(sum), y) : y;
    }
};
// Those of the PART-th group of the i-th stretch.
template <typename Codes, int PART>
ALWAYS_INLINE GroupScales<Codes::MINIMUM> group_scales(const Meeting& m, int i) {
    if constexpr (Codes::HALVES) {
        const uint8_t* at = m.halves + i * (Codes::MINIMUM ? 4 : 2) * TILE;
        return {load_halves(at), Codes::MINIMUM ? load_halves(at + 2 * TILE) : zero()};
    } else {
        const int group = i * (QUADS / Codes::COUNT) + PART;
        return {load(m.scale[group]), Codes::MINIMUM ? load(m.minimum[group]) : zero()};
    }
}

// The PART-th group of a stretch's inputs, COUNT quads, as all rows have it.
template <int COUNT, int PART> struct Group {
    static constexpr bool WHOLE = COUNT == QUADS;
    const QuantStretch* rows;

    const int8_t* a() const { return rows->q + PART * COUNT * QUAD; }
    const int32_t* start() const { return WHOLE ? &rows->start : rows->half_start + PART; }
    float scale(int row) const { return rows[row].scale; }
    float sum(int row) const { return WHOLE ? rows[row].sum : rows[row].half_sum[PART]; }
};

// Adds what ROWS rows make of the PART-th group of the i-th stretch, and of those that follow.
template <int ROWS, typename Codes, int PART = 0>
ALWAYS_INLINE void meet_groups(const QuantStretch* rows, const Meeting& m, int i, f32x16* y) {
    constexpr int GROUPS = QUADS / Codes::COUNT;
    const Group<Codes::COUNT, PART> inputs{rows};
    const Quads quads = {m.codes + i * Codes::STRETCH_SIZE, inputs.a(), inputs.start()};
    i32x16 total[ROWS];
    exact<ROWS, Codes, PART>(quads, total);
    const GroupScales<Codes::MINIMUM> scales = group_scales<Codes, PART>(m, i);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        y[r] = scales.scaled(total[r], inputs.scale(r), inputs.sum(r), y[r]);
    }
    if constexpr (PART + 1 < GROUPS) {
        meet_groups<ROWS, Codes, PART + 1>(rows, m, i, y);
    }
}

// Adds what ROWS rows from `row` on make of the stretches to their sums. LEAST: see Fetching.
template <int ROWS, typename Codes, int LEAST>
ALWAYS_INLINE void meet(const QuantRows& x, int row, const Meeting& m, const Ahead& ahead, f32x16* y) {
    const ptrdiff_t bytes = ROWS * m.next.bytes;
    const uint8_t* next = m.next.at + row * m.next.bytes * x.stretches() + m.first * bytes;
    for (const uint8_t* end = next + m.count * bytes; next < end; next += LINE) {
        __builtin_prefetch(next, 0, 1);
    }
    const ptrdiff_t index = m.first * m.fetches, stride = x.stride;
    Fetching<LEAST> fetches = {
        {ahead.at + index * ahead.step, ahead.step, ahead.turn, ahead.leap}, index, m.fetches};
    const QuantStretch* rows = x.at(m.first, row);
    for (int i = 0; i < m.count; ++i, rows += stride) {
        fetches.next();
        meet_groups<ROWS, Codes>(rows, m, i, y);
    }
}

constexpr int PACKED_CHUNK = 4 * CHUNK;  // stretches whose scales are unpacked together
constexpr int TURN_OF_TILES = 4;         // that blocks of rows meet in turn
constexpr int SLAB_ROWS = 64;            // whose sums are kept between chunks

// Fetches per stretch of a tile: its codes, and its share of the scales.
inline int fetches_of(const BlockSizes& sizes) {
    const int stretch_bytes = static_cast<int>(sizes.tile / size_t(sizes.stretches));
    return (stretch_bytes + LINE - 1) / LINE;
}

// What is read next while the tiles are met by all rows: where it begins for one of them,
// and the bytes that a row fetches in each stretch of a tile.
inline NextRead share_of_next(const QuantisedCall& call, int tile) {
    const NextRead& all = call.out.next;
    const ptrdiff_t met = ptrdiff_t(call.sizes.stretches) * call.x.rows;  // stretches, of a tile
    const ptrdiff_t bytes = all.bytes / ((call.tile_end - call.tile_begin) * met);
    return {all.at + (tile - call.tile_begin) * met * bytes, bytes};
}

// Of codes that are bytes, into which others are unpacked.
template <typename Codes> void linear_bytes(const QuantisedCall& call) {
    const QuantRows& x = call.x;
    const BlockSizes& sizes = call.sizes;
    const int fetches = fetches_of(sizes);
    TileChunk chunk;
    alignas(64) f32x16 y[SLAB_ROWS];
    for (int tile = call.tile_begin; tile < call.tile_end; ++tile) {
        const Reading reading = reading_of(call, tile, 1, call.tile_begin, call.tile_end,
                                           sizes.stretches * fetches, ptrdiff_t(sizes.scales));
        const NextRead next = share_of_next(call, tile);
        for (int begin = 0; begin < x.rows; begin += SLAB_ROWS) {
            const int end = x.rows - begin < SLAB_ROWS ? x.rows : begin + SLAB_ROWS;
            for (int i = 0; i < end - begin; ++i) {
                y[i] = zero();
            }
            for (int first = 0; first < sizes.stretches; first += CHUNK) {
                const int rest = sizes.stretches - first, count = rest < CHUNK ? rest : CHUNK;
                chunk.codes = chunk_codes(call.w, sizes, tile, first);
                unpack_scales(call.w, sizes, tile, first, count, chunk.scales);
                unpack_codes(call.w.type, count, chunk);
                if (x.rows > MAX_ROWS<Codes>) {
                    bring_near(chunk, count);
                }
                const Meeting m = {chunk.codes, chunk.scales.scale, chunk.scales.minimum, nullptr,
                                   first,       count,              fetches,
                                   next};
                each_block<MAX_ROWS<Codes>>(begin, end, reading, [&](int row, auto rows, Ahead ahead) {
                    constexpr int ROWS = rows();
                    f32x16 kept[ROWS];
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r) {
                        kept[r] = y[row - begin + r];
                    }
                    meet<ROWS, Codes, 0>(x, row, m, ahead, kept);
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r) {
                        y[row - begin + r] = kept[r];
                    }
                });
            }
            for (int row = begin; row < end; ++row) {
                finish(y[row - begin], call.w.bias, call.out, row, tile * TILE, call.w.n);
            }
        }
    }
}

// Reads a byte of each line. A tile is then read in the order of its memory, which hardware foresees;
// with scales and codes in turn it does not.
inline void read_through(const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += LINE) {
        (void)*static_cast<const volatile uint8_t*>(from + at);
    }
}

// Of codes as they lie in the weights: some tiles by ROWS rows from `row` on, whose sums stay in
// registers.
template <int ROWS, typename Codes>
void meet_packed(const QuantisedCall& call, int row, int begin, int end) {
    const BlockSizes& sizes = call.sizes;
    const int fetches = fetches_of(sizes);
    TileScales<PACKED_CHUNK> scales;
    for (int tile = begin; tile < end; ++tile) {
        const Reading reading = reading_of(call, tile, 1, begin, end, sizes.stretches * fetches,
                                           ptrdiff_t(sizes.scales));
        const Ahead ahead = ahead_of(reading, 1, 0);
        const NextRead next = share_of_next(call, tile);
        f32x16 y[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            y[r] = zero();
        }
        const int most = Codes::HALVES ? sizes.stretches : PACKED_CHUNK;
        for (int first = 0; first < sizes.stretches; first += most) {
            const int rest = sizes.stretches - first;
            const int count = rest < most ? rest : most;
            if constexpr (Codes::HALVES) {
                read_through(call.tile(tile), sizes.scales);
            } else {
                unpack_scales(call.w, sizes, tile, first, count, scales);
            }
            const Meeting m = {chunk_codes(call.w, sizes, tile, first),
                               scales.scale,
                               scales.minimum,
                               call.tile(tile),
                               first,
                               count,
                               fetches,
                               next};
            meet<ROWS, Codes, Codes::STRETCH_SIZE / LINE>(call.x, row, m, ahead, y);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            finish(y[r], call.w.bias, call.out, row + r, tile * TILE, call.w.n);
        }
    }
}

// Blocks of rows take turns on a few tiles, which are in the caches for all but the first one.
template <typename Codes> void linear_packed(const QuantisedCall& call) {
    const int blocks = (call.x.rows + MAX_ROWS<Codes> - 1) / MAX_ROWS<Codes>;
    const int step = blocks == 1 ? call.tile_end - call.tile_begin : TURN_OF_TILES;
    for (int tile = call.tile_begin; tile < call.tile_end; tile += step) {
        const int end = tile + step < call.tile_end ? tile + step : call.tile_end;
        for (int i = 0, row = 0; i < blocks; ++i) {
            const int count = (call.x.rows - row) / (blocks - i);  // as even as can be
            with_number<MAX_ROWS<Codes>>(count, [&](auto rows) {
                meet_packed<rows(), Codes>(call, row, tile, end);
            });
            row += count;
        }
    }
}

void linear_blocks(const QuantRows& x, const BlockWeights& w, const LinearOut& out, int tile_begin,
                   int tile_end) {
    const QuantisedCall call = {x, w, out, BlockSizes(shape_of(w.type), w.k), tile_begin, tile_end};
    with_codes(w.type, [&](auto codes) {
        using Codes = decltype(codes);
        if constexpr (MEETS_PACKED) {
            linear_packed<Codes>(call);
        } else {
            linear_bytes<typename Codes::AsBytes>(call);
        }
    });
}

}  // namespace
}  // namespace paceline
