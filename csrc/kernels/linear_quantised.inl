// The linear of quantised weights and quantised activations, for every block format. Tiles are
// unpacked a chunk at a time and met by all rows; what few rows meet is unpacked in registers, code by
// code, which saves a way through memory. Each element is one fixed program: per group of 16
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
    NextRead next;     // of these tiles; the bytes are of a row's stretch
};

template <int TILES> ALWAYS_INLINE void fetch_for(const Meeting& m, int stretch, Ahead ahead) {
    const int8_t* at = ahead.place(stretch * m.fetches);
    for (int f = 0; f < m.fetches; ++f, at += ahead.step) {
        for (int t = 0; t < TILES; ++t) {
            __builtin_prefetch(at + t * m.tile_bytes);
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
ALWAYS_INLINE void meet_groups(const QuantStretch* rows, const Meeting& m, int i, f32x16* y) {
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
inline void meet(const QuantRows& x, int row, const Meeting& m, Ahead ahead, f32x16* y) {
    const ptrdiff_t bytes = ROWS * m.next.bytes;
    const uint8_t* next = m.next.at + row * m.next.bytes * x.stretches() + m.first * bytes;
    for (const uint8_t* end = next + m.count * bytes; next < end; next += LINE) {
        __builtin_prefetch(next, 0, 1);
    }
    for (int i = 0; i < m.count; ++i) {
        fetch_for<TILES>(m, m.first + i, ahead);
        meet_groups<ROWS, TILES, Codes>(x.at(m.first + i, row), m, i, y);
    }
}

constexpr int SLAB_ROWS = 64;    // whose sums are kept between chunks
constexpr int KEPT_SUMS = 12;    // that stay in registers during a chunk
constexpr int FEW_ROWS = 1;      // whose tiles stream by one at a time

// As `meet`, with the sums in memory between chunks.
template <int ROWS, int TILES, typename Codes>
inline void meet_chunk(const QuantRows& x, int row, const Meeting& m, Ahead ahead, f32x16* y) {
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
ALWAYS_INLINE void meet_groups_amx(const QuantStretch* rows, const Meeting& m, int i,
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
inline void meet_amx(const QuantRows& x, int row, const Meeting& m, Ahead ahead, f32x16* y) {
    alignas(64) i32x16 total[2][TILES][AMX_ROWS];  // of two groups, so that they can overlap
    for (int i = 0; i < m.count; ++i) {
        fetch_for<TILES>(m, m.first + i, ahead);
        meet_groups_amx<TILES, Codes>(x.at(m.first + i, row), m, i, total, y);
    }
}
#endif

// Of packed Codes, whose rows are at most MAX_ROWS, or of bytes, into which others are unpacked.
template <typename Codes> void linear_as(const QuantisedCall& call, int tile_begin, int tile_end) {
    const QuantRows& x = call.x;
    const BlockSizes& sizes = call.sizes;
    const int stretch_bytes = static_cast<int>(sizes.tile / size_t(sizes.stretches));
    const int fetches = (stretch_bytes + 63) / 64;
    const ptrdiff_t met = ptrdiff_t(sizes.stretches) * x.rows;  // stretches, of a tile
    const NextRead& all = call.out.next;
    const ptrdiff_t next_bytes = all.bytes / ((tile_end - tile_begin) * met);  // of each
    TileChunk chunk[MAX_TILES];
    alignas(64) f32x16 y[SLAB_ROWS * MAX_TILES];
    each_tile<MAX_TILES>(tile_begin, tile_end, x.rows > FEW_ROWS, [&](int tile, auto tiles) {
        constexpr int TILES = tiles();
        const Reading reading = reading_of(call, tile, TILES, tile_begin, tile_end,
                                           sizes.stretches * fetches, ptrdiff_t(sizes.scales));
        for (int begin = 0; begin < x.rows; begin += SLAB_ROWS) {
            const int end = x.rows - begin < SLAB_ROWS ? x.rows : begin + SLAB_ROWS;
            for (int i = 0; i < (end - begin) * TILES; ++i) {
                y[i] = zero();
            }
            for (int first = 0; first < sizes.stretches; first += CHUNK) {
                const int rest = sizes.stretches - first, count = rest < CHUNK ? rest : CHUNK;
                for (int t = 0; t < TILES; ++t) {
                    chunk[t].codes = chunk_codes(call.w, sizes, tile + t, first);
                    unpack_scales(call.w, sizes, tile + t, first, count, chunk[t]);
                    if (Codes::BITS == 8) {
                        unpack_codes(call.w.type, count, chunk[t]);
                    }
                    if (x.rows > MAX_ROWS<Codes>) {
                        bring_near(chunk[t], count);
                    }
                }
                const NextRead next{all.at + (tile - tile_begin) * met * next_bytes, next_bytes};
                const Meeting m = {chunk, call.tile_bytes(), first, count, fetches, next};
                int row = begin;
#if defined(__AMX_INT8__)
                if (Codes::BITS == 8 && end - begin >= LEAST_AMX_ROWS) {
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

void linear_blocks(const QuantRows& x, const BlockWeights& w, const LinearOut& out, int tile_begin,
                   int tile_end) {
    const QuantisedCall call = {x, w, out, BlockSizes(shape_of(w.type), w.k)};
    with_codes(w.type, [&](auto codes) {
        using Codes = decltype(codes);
        if constexpr (MEETS_PACKED) {
            if (x.rows <= MAX_ROWS<Codes>) {
                return linear_as<Codes>(call, tile_begin, tile_end);
            }
        }
        linear_as<typename Codes::AsBytes>(call, tile_begin, tile_end);
    });
}

}  // namespace
}  // namespace paceline
