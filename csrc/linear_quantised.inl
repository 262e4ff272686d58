// The linear of quantised weights and quantised activations, for every block format. Tiles are
// unpacked a chunk at a time and met by all rows. Each element is one fixed program: per group of 16
// or 32 inputs, in ascending order, a fused multiply-add of the exact integer sum with the product of
// both scales, then, where the format has minima, one of the minimum with the inputs' scaled sum.
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

// Some stretches of unpacked tiles, and what is fetched while rows meet them.
struct Meeting {
    const TileChunk* tiles;
    ptrdiff_t tile_bytes;
    int first, count;  // stretches
    int fetches;       // per stretch and tile
};

template <int TILES, int GROUPS>
ALWAYS_INLINE void fetch_group(const Meeting& m, int group, Ahead ahead) {
    if (group % GROUPS == 0) {
        for (int f = 0; f < m.fetches; ++f) {
            for (int t = 0; t < TILES; ++t) {
                ahead.fetch(group / GROUPS * m.fetches + f, t * m.tile_bytes);
            }
        }
    }
}

// What one row's integers of a group become: see the top.
template <bool MINIMUM>
ALWAYS_INLINE f32x16 scaled(i32x16 total, const TileChunk& tile, int group, float inputs, float sum,
                            f32x16 y) {
    y = fma(to_float(total), load(tile.scale[group]) * splat(inputs), y);
    return MINIMUM ? fma(load(tile.minimum[group]), splat(sum), y) : y;
}

// A group of inputs as all rows have it: `group` is counted through a row, COUNT quads each.
template <int COUNT> struct Group {
    static constexpr int GROUPS = QUADS / COUNT;  // of a stretch
    const QuantStretch* rows;
    int half;

    Group(const QuantRows& x, int group, int row)
        : rows(x.at(group / GROUPS, row)), half(group % GROUPS) {}

    const int8_t* a() const { return rows->q + half * COUNT * QUAD; }
    const int32_t* start() const { return GROUPS == 1 ? &rows->start : rows->half_start + half; }
    float scale(int row) const { return rows[row].scale; }
    float sum(int row) const { return GROUPS == 1 ? rows[row].sum : rows[row].half_sum[half]; }
};

// Adds what ROWS rows from `row` on make of the stretches to y[row][tile].
template <int ROWS, int TILES, bool MINIMUM, bool SIGNED, int COUNT>
inline void meet(const QuantRows& x, int row, const Meeting& m, Ahead ahead, f32x16* y) {
    constexpr int GROUPS = QUADS / COUNT;
    for (int i = 0; i < m.count * GROUPS; ++i) {
        const int group = m.first * GROUPS + i;
        fetch_group<TILES, GROUPS>(m, group, ahead);
        const Group<COUNT> inputs(x, group, row);
        Quads quads;
        for (int t = 0; t < TILES; ++t) {
            quads.codes[t] = m.tiles[t].codes + i * COUNT * TILE_QUAD;
        }
        quads.a = inputs.a();
        quads.start = inputs.start();
        i32x16 total[ROWS * TILES];
        exact<ROWS, TILES, SIGNED, COUNT>(quads, total);
#pragma GCC unroll 2
        for (int t = 0; t < TILES; ++t) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                f32x16& sum_of = y[r * TILES + t];
                sum_of = scaled<MINIMUM>(total[r * TILES + t], m.tiles[t], i, inputs.scale(r),
                                         inputs.sum(r), sum_of);
            }
        }
    }
}

constexpr int SLAB_ROWS = 64;    // whose sums are kept between chunks
constexpr int KEPT_SUMS = 12;    // that stay in registers during a chunk
constexpr int FEW_ROWS = 3;      // whose tiles stream by one at a time

// As `meet`, with the sums in memory between chunks.
template <int ROWS, int TILES, bool MINIMUM, bool SIGNED, int COUNT>
inline void meet_chunk(const QuantRows& x, int row, const Meeting& m, Ahead ahead, f32x16* y) {
    if constexpr (ROWS * TILES <= KEPT_SUMS) {
        f32x16 kept[ROWS * TILES];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * TILES; ++i) {
            kept[i] = y[i];
        }
        meet<ROWS, TILES, MINIMUM, SIGNED, COUNT>(x, row, m, ahead, kept);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * TILES; ++i) {
            y[i] = kept[i];
        }
    } else {
        meet<ROWS, TILES, MINIMUM, SIGNED, COUNT>(x, row, m, ahead, y);
    }
}

#if defined(__AMX_INT8__)
// As `meet`, of sixteen rows.
template <int TILES, bool MINIMUM, bool SIGNED, int COUNT>
inline void meet_amx(const QuantRows& x, int row, const Meeting& m, Ahead ahead, f32x16* y) {
    constexpr int GROUPS = QUADS / COUNT;
    alignas(64) i32x16 total[2][TILES][AMX_ROWS];  // of two groups, so that they can overlap
    for (int i = 0; i < m.count * GROUPS; ++i) {
        const int group = m.first * GROUPS + i;
        fetch_group<TILES, GROUPS>(m, group, ahead);
        const Group<COUNT> inputs(x, group, row);
        const uint8_t* codes[TILES];
        for (int t = 0; t < TILES; ++t) {
            codes[t] = m.tiles[t].codes + i * COUNT * TILE_QUAD;
        }
        amx_products<TILES>(codes, inputs.a(), total[i % 2]);
        for (int r = 0; r < AMX_ROWS; ++r) {
            const i32x16 start = splat_i32(SIGNED ? inputs.start()[r * ROW_INTS] : 0);
            for (int t = 0; t < TILES; ++t) {
                f32x16& sum_of = y[r * TILES + t];
                sum_of = scaled<MINIMUM>(total[i % 2][t][r] + start, m.tiles[t], i,
                                         inputs.scale(r), inputs.sum(r), sum_of);
            }
        }
    }
}
#endif

template <bool MINIMUM, bool SIGNED, int COUNT>
void linear_of_kind(const QuantisedCall& call, int tile_begin, int tile_end) {
    const QuantRows& x = call.x;
    const BlockSizes& sizes = call.sizes;
    const int stretch_bytes = static_cast<int>(sizes.tile / size_t(sizes.stretches));
    const int fetches = (stretch_bytes + 63) / 64;
    TileChunk chunk[MAX_TILES];
    alignas(64) f32x16 y[SLAB_ROWS * MAX_TILES];
    each_tile<MAX_TILES>(tile_begin, tile_end, x.rows > FEW_ROWS, [&](int tile, auto tiles) {
        constexpr int TILES = tiles();
        const Reading reading =
            reading_of(call, tile, TILES, tile_begin, tile_end, sizes.stretches * fetches);
        for (int begin = 0; begin < x.rows; begin += SLAB_ROWS) {
            const int end = x.rows - begin < SLAB_ROWS ? x.rows : begin + SLAB_ROWS;
            for (int i = 0; i < (end - begin) * TILES; ++i) {
                y[i] = zero();
            }
            for (int first = 0; first < sizes.stretches; first += CHUNK) {
                const int rest = sizes.stretches - first, count = rest < CHUNK ? rest : CHUNK;
                for (int t = 0; t < TILES; ++t) {
                    unpack_chunk(call.w, sizes, tile + t, first, count, chunk[t]);
                    if (x.rows > MAX_ROWS) {
                        bring_near(chunk[t], count);
                    }
                }
                const Meeting m = {chunk, call.tile_bytes(), first, count, fetches};
                int row = begin;
#if defined(__AMX_INT8__)
                if (end - begin >= AMX_ROWS) {
                    const AmxRegisters registers(COUNT);
                    for (; end - row >= AMX_ROWS; row += AMX_ROWS) {
                        const Ahead ahead = ahead_of(reading, (end - begin) / AMX_ROWS,
                                                     (row - begin) / AMX_ROWS);
                        meet_amx<TILES, MINIMUM, SIGNED, COUNT>(x, row, m, ahead,
                                                                y + (row - begin) * TILES);
                    }
                }
#endif
                each_block<MAX_ROWS>(row, end, reading, [&](int row, auto rows, Ahead ahead) {
                    meet_chunk<rows(), TILES, MINIMUM, SIGNED, COUNT>(
                        x, row, m, ahead, y + (row - begin) * TILES);
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

void linear_blocks(const QuantRows& x, const BlockWeights& w, const LinearOut& out, int tile_begin,
                   int tile_end) {
    const BlockShape& shape = shape_of(w.type);
    const QuantisedCall call = {x, w, out, BlockSizes(shape, w.k)};
    constexpr int HALF = QUADS / 2;
    if (shape.minimum && shape.is_signed()) {
        linear_of_kind<true, true, QUADS>(call, tile_begin, tile_end);
    } else if (shape.minimum) {
        shape.group == STRETCH ? linear_of_kind<true, false, QUADS>(call, tile_begin, tile_end)
                               : linear_of_kind<true, false, HALF>(call, tile_begin, tile_end);
    } else {
        shape.group == STRETCH ? linear_of_kind<false, true, QUADS>(call, tile_begin, tile_end)
                               : linear_of_kind<false, true, HALF>(call, tile_begin, tile_end);
    }
}

}  // namespace
}  // namespace paceline
