// The linear of quantised weights and quantised activations, for every block format. Where the level
// has an instruction for products of bytes, codes are unpacked in registers, anew for each block of
// rows: that takes less time than a way through memory. Elsewhere, and for AMX, a chunk of a tile is
// unpacked to bytes, which all rows meet. Each element is one fixed program: per group of 16 or 32
// inputs, in ascending order, a fused multiply-add of the exact integer sum with the product of both
// scales, then, where the format has minima, one of the minimum with the inputs' scaled sum.
namespace paceline {
namespace {

struct QuantisedCall {
    const QuantRows& x;
    const BlockWeights& w;
    const LinearOut& out;
    BlockSizes sizes;

    ptrdiff_t tile_bytes() const { return ptrdiff_t(sizes.tile); }
    const uint8_t* tile(int index) const { return w.data + index * tile_bytes(); }
};

// Stretches of a tile whose codes are packed, or bytes, and the scales of their groups.
struct MetTile {
    const uint8_t* codes;
    const float (*scale)[TILE];
    const float (*minimum)[TILE];
};

// Some stretches of TILES tiles, and what is fetched while rows meet them.
template <int TILES> struct Meeting {
    MetTile tiles[TILES];
    ptrdiff_t tile_bytes;
    int first, count;  // stretches
    int fetches;       // per stretch and tile
    NextRead next;     // of these tiles; the bytes are of a row's stretch
};

// Fetches for one stretch after the other. Of a stretch's lines at least LEAST are fetched.
template <int TILES, int LEAST> struct Fetching {
    Ahead ahead;
    ptrdiff_t tile_bytes, index;
    int fetches;

    ALWAYS_INLINE void fetch(ptrdiff_t offset) const {
        for (int t = 0; t < TILES; ++t) {
            __builtin_prefetch(ahead.at + offset + t * tile_bytes);
        }
    }
    ALWAYS_INLINE void next() {
        const ptrdiff_t leap = index < ahead.turn ? 0 : ahead.leap;
#pragma GCC unroll 16
        for (int f = 0; f < LEAST; ++f) {
            fetch(leap + f * ahead.step);
        }
        for (int f = LEAST; f < fetches; ++f) {
            fetch(leap + f * ahead.step);
        }
        ahead.at += fetches * ahead.step;
        index += fetches;
    }
};

template <typename Codes, int TILES>
ALWAYS_INLINE auto fetching(const Meeting<TILES>& m, const Ahead& ahead) {
    const ptrdiff_t index = m.first * m.fetches;
    constexpr int LEAST = Codes::STRETCH_SIZE / LINE;
    return Fetching<TILES, LEAST>{{ahead.at + index * ahead.step, ahead.step, ahead.turn, ahead.leap},
                                  m.tile_bytes, index, m.fetches};
}

// What one row's integers of a group become: see the top.
template <bool MINIMUM>
ALWAYS_INLINE f32x16 scaled(i32x16 total, const MetTile& tile, int group, float inputs, float sum,
                            f32x16 y) {
    y = fma(to_float(total), load(tile.scale[group]) * splat(inputs), y);
    return MINIMUM ? fma(load(tile.minimum[group]), splat(sum), y) : y;
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
template <int ROWS, int TILES, typename Codes, int PART = 0>
ALWAYS_INLINE void meet_groups(const QuantStretch* rows, const Meeting<TILES>& m, int i, f32x16* y) {
    constexpr int GROUPS = QUADS / Codes::COUNT;
    const Group<Codes::COUNT, PART> inputs{rows};
    Quads quads;
    for (int t = 0; t < TILES; ++t) {
        quads.codes[t] = m.tiles[t].codes + i * Codes::STRETCH_SIZE;
    }
    quads.a = inputs.a();
    quads.start = inputs.start();
    i32x16 total[ROWS * TILES];
    exact<ROWS, TILES, Codes, PART>(quads, total);
#pragma GCC unroll 2
    for (int t = 0; t < TILES; ++t) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            f32x16& sum_of = y[r * TILES + t];
            sum_of = scaled<Codes::MINIMUM>(total[r * TILES + t], m.tiles[t], i * GROUPS + PART,
                                            inputs.scale(r), inputs.sum(r), sum_of);
        }
    }
    if constexpr (PART + 1 < GROUPS) {
        meet_groups<ROWS, TILES, Codes, PART + 1>(rows, m, i, y);
    }
}

// Adds what ROWS rows from `row` on make of the stretches to y[row][tile].
template <int ROWS, int TILES, typename Codes>
ALWAYS_INLINE void meet(const QuantRows& x, int row, const Meeting<TILES>& m, const Ahead& ahead,
                        f32x16* y) {
    const ptrdiff_t bytes = ROWS * m.next.bytes;
    const uint8_t* next = m.next.at + row * m.next.bytes * x.stretches() + m.first * bytes;
    for (const uint8_t* end = next + m.count * bytes; next < end; next += LINE) {
        __builtin_prefetch(next, 0, 1);
    }
    auto fetches = fetching<Codes>(m, ahead);
    const QuantStretch* rows = x.at(m.first, row);
    const ptrdiff_t stride = x.stride;
    for (int i = 0; i < m.count; ++i, rows += stride) {
        fetches.next();
        meet_groups<ROWS, TILES, Codes>(rows, m, i, y);
    }
}

constexpr int PACKED_CHUNK = 4 * CHUNK;  // stretches whose scales are unpacked together
constexpr int TURN_OF_TILES = 4;         // that blocks of rows meet in turn
constexpr int SLAB_ROWS = 64;    // whose sums are kept between chunks
constexpr int KEPT_SUMS = 12;    // that stay in registers during a chunk
constexpr int FEW_ROWS = 1;      // whose tiles stream by one at a time

// As `meet`, with the sums in memory between chunks.
template <int ROWS, int TILES, typename Codes>
inline void meet_chunk(const QuantRows& x, int row, const Meeting<TILES>& m, const Ahead& ahead,
                       f32x16* y) {
    if constexpr (ROWS * TILES <= KEPT_SUMS) {
        f32x16 kept[ROWS * TILES];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * TILES; ++i) {
            kept[i] = y[i];
        }
        meet<ROWS, TILES, Codes>(x, row, m, ahead, kept);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * TILES; ++i) {
            y[i] = kept[i];
        }
    } else {
        meet<ROWS, TILES, Codes>(x, row, m, ahead, y);
    }
}

#if defined(__AMX_INT8__)
// As `meet_groups`, of sixteen rows and codes that are bytes.
template <int TILES, typename Codes, int PART = 0>
ALWAYS_INLINE void meet_groups_amx(const QuantStretch* rows, const Meeting<TILES>& m, int i,
                                   i32x16 (*total)[TILES][AMX_ROWS], f32x16* y) {
    constexpr int GROUPS = QUADS / Codes::COUNT;
    const int group = i * GROUPS + PART;
    const Group<Codes::COUNT, PART> inputs{rows};
    const uint8_t* codes[TILES];
    for (int t = 0; t < TILES; ++t) {
        codes[t] = m.tiles[t].codes + group * Codes::COUNT * TILE_QUAD;
    }
    amx_products<TILES>(codes, inputs.a(), total[group % 2]);
    for (int r = 0; r < AMX_ROWS; ++r) {
        const i32x16 start = splat_i32(Codes::SIGNED ? inputs.start()[r * ROW_INTS] : 0);
        for (int t = 0; t < TILES; ++t) {
            f32x16& sum_of = y[r * TILES + t];
            sum_of = scaled<Codes::MINIMUM>(total[group % 2][t][r] + start, m.tiles[t], group,
                                            inputs.scale(r), inputs.sum(r), sum_of);
        }
    }
    if constexpr (PART + 1 < GROUPS) {
        meet_groups_amx<TILES, Codes, PART + 1>(rows, m, i, total, y);
    }
}

template <int TILES, typename Codes>
inline void meet_amx(const QuantRows& x, int row, const Meeting<TILES>& m, const Ahead& ahead,
                     f32x16* y) {
    alignas(64) i32x16 total[2][TILES][AMX_ROWS];  // of two groups, so that they can overlap
    auto fetches = fetching<Codes>(m, ahead);
    for (int i = 0; i < m.count; ++i) {
        fetches.next();
        meet_groups_amx<TILES, Codes>(x.at(m.first + i, row), m, i, total, y);
    }
}
#endif

// Fetches per stretch of a tile: its codes, and its share of the scales.
inline int fetches_of(const BlockSizes& sizes) {
    const int stretch_bytes = static_cast<int>(sizes.tile / size_t(sizes.stretches));
    return (stretch_bytes + LINE - 1) / LINE;
}

// What is read next while tiles tile_begin.. are met by all rows: where it begins for one of them,
// and the bytes that a row fetches in each stretch of a tile.
inline NextRead share_of_next(const QuantisedCall& call, int tile, int tile_begin, int tile_end) {
    const NextRead& all = call.out.next;
    const ptrdiff_t met = ptrdiff_t(call.sizes.stretches) * call.x.rows;  // stretches, of a tile
    const ptrdiff_t bytes = all.bytes / ((tile_end - tile_begin) * met);
    return {all.at + (tile - tile_begin) * met * bytes, bytes};
}

// Of codes that are bytes, into which others are unpacked.
template <typename Codes> void linear_bytes(const QuantisedCall& call, int tile_begin, int tile_end) {
    const QuantRows& x = call.x;
    const BlockSizes& sizes = call.sizes;
    const int fetches = fetches_of(sizes);
    TileChunk chunk[MAX_TILES];
    alignas(64) f32x16 y[SLAB_ROWS * MAX_TILES];
    each_tile<MAX_TILES>(tile_begin, tile_end, x.rows > FEW_ROWS, [&](int tile, auto tiles) {
        constexpr int TILES = tiles();
        const Reading reading = reading_of(call, tile, TILES, tile_begin, tile_end,
                                           sizes.stretches * fetches, ptrdiff_t(sizes.scales));
        const NextRead next = share_of_next(call, tile, tile_begin, tile_end);
        for (int begin = 0; begin < x.rows; begin += SLAB_ROWS) {
            const int end = x.rows - begin < SLAB_ROWS ? x.rows : begin + SLAB_ROWS;
            for (int i = 0; i < (end - begin) * TILES; ++i) {
                y[i] = zero();
            }
            for (int first = 0; first < sizes.stretches; first += CHUNK) {
                const int rest = sizes.stretches - first, count = rest < CHUNK ? rest : CHUNK;
                Meeting<TILES> m = {{}, call.tile_bytes(), first, count, fetches, next};
                for (int t = 0; t < TILES; ++t) {
                    chunk[t].codes = chunk_codes(call.w, sizes, tile + t, first);
                    unpack_scales(call.w, sizes, tile + t, first, count, chunk[t].scales);
                    unpack_codes(call.w.type, count, chunk[t]);
                    if (x.rows > MAX_ROWS<Codes>) {
                        bring_near(chunk[t], count);
                    }
                    m.tiles[t] = {chunk[t].codes, chunk[t].scales.scale, chunk[t].scales.minimum};
                }
                int row = begin;
#if defined(__AMX_INT8__)
                if (end - begin >= LEAST_AMX_ROWS) {
                    const AmxRegisters registers(Codes::COUNT);
                    for (; end - row >= AMX_ROWS; row += AMX_ROWS) {
                        const Ahead ahead = ahead_of(reading, (end - begin) / AMX_ROWS,
                                                     (row - begin) / AMX_ROWS);
                        meet_amx<TILES, Codes>(x, row, m, ahead, y + (row - begin) * TILES);
                    }
                }
#endif
                each_block<MAX_ROWS<Codes>>(row, end, reading, [&](int row, auto rows, Ahead ahead) {
                    meet_chunk<rows(), TILES, Codes>(x, row, m, ahead,
                                                      y + (row - begin) * TILES);
                });
            }
            for (int row = begin; row < end; ++row) {
                for (int t = 0; t < TILES; ++t) {
                    finish(y[(row - begin) * TILES + t], call.w.bias, call.out, row,
                           (tile + t) * TILE, call.w.n);
                }
            }
        }
    });
}

// Of codes as they lie in the weights: tiles by ROWS rows from `row` on, whose sums stay in registers.
template <int ROWS, typename Codes>
void meet_packed(const QuantisedCall& call, int row, int tile_begin, int tile_end) {
    const BlockSizes& sizes = call.sizes;
    const int fetches = fetches_of(sizes);
    TileScales<PACKED_CHUNK> scales;
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        const Reading reading = reading_of(call, tile, 1, tile_begin, tile_end,
                                           sizes.stretches * fetches, ptrdiff_t(sizes.scales));
        const Ahead ahead = ahead_of(reading, 1, 0);
        const NextRead next = share_of_next(call, tile, tile_begin, tile_end);
        f32x16 y[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            y[r] = zero();
        }
        for (int first = 0; first < sizes.stretches; first += PACKED_CHUNK) {
            const int rest = sizes.stretches - first;
            const int count = rest < PACKED_CHUNK ? rest : PACKED_CHUNK;
            unpack_scales(call.w, sizes, tile, first, count, scales);
            const MetTile met = {chunk_codes(call.w, sizes, tile, first), scales.scale,
                                 scales.minimum};
            const Meeting<1> m = {{met}, call.tile_bytes(), first, count, fetches, next};
            meet<ROWS, 1, Codes>(call.x, row, m, ahead, y);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            finish(y[r], call.w.bias, call.out, row + r, tile * TILE, call.w.n);
        }
    }
}

// Blocks of rows take turns on a few tiles, which the second one then finds in the caches.
template <typename Codes> void linear_packed(const QuantisedCall& call, int tile_begin, int tile_end) {
    const int blocks = (call.x.rows + MAX_ROWS<Codes> - 1) / MAX_ROWS<Codes>;
    const int step = blocks == 1 ? tile_end - tile_begin : TURN_OF_TILES;
    for (int tile = tile_begin; tile < tile_end; tile += step) {
        const int end = tile + step < tile_end ? tile + step : tile_end;
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
    const QuantisedCall call = {x, w, out, BlockSizes(shape_of(w.type), w.k)};
    with_codes(w.type, [&](auto codes) {
        using Codes = decltype(codes);
#if defined(__AMX_INT8__)
        if (x.rows >= LEAST_AMX_ROWS) {
            return linear_bytes<typename Codes::AsBytes>(call, tile_begin, tile_end);
        }
#endif
        if constexpr (MEETS_PACKED) {
            linear_packed<Codes>(call, tile_begin, tile_end);
        } else {
            linear_bytes<typename Codes::AsBytes>(call, tile_begin, tile_end);
        }
    });
}

}  // namespace
}  // namespace paceline
