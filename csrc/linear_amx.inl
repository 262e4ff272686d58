// The W8A8 linear on AMX: one instruction multiplies sixteen rows, sixteen outputs and 64 inputs,
// and takes the packed tiles as they lie. Few rows go the way of AVX-512 VNNI. The integers are
// exact and what follows them is the same program, so the bits are those of AVX-512 VNNI.
namespace paceline {
namespace {

// So few rows AVX-512 VNNI takes through short tiles and through others at least as fast.
constexpr int FEW_ROWS_SHORT = 8, FEW_ROWS = 2;
constexpr int SHORT_TILE = 4 * STREAM_AHEAD;  // bytes
constexpr int AMX_ROWS = 16;     // of a register
constexpr int AMX_BYTES = 64;    // of a register's row: 64 inputs of one row, or a quad of 16 outputs
constexpr int AMX_QUADS = AMX_BYTES / QUAD;

// Of a register's contents, as the processor reads it.
struct AmxShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The eight registers: 0 to 3 sums and 4, 5 inputs, of `rows` rows; 6, 7 weights.
struct AmxRegisters {
    explicit AmxRegisters(int rows) {
        AmxShapes shapes;
        for (int i = 0; i < 8; ++i) {
            shapes.row_bytes[i] = AMX_BYTES;
            shapes.rows[i] = static_cast<uint8_t>(i < 6 ? rows : AMX_QUADS);
        }
        _tile_loadconfig(&shapes);
    }
    ~AmxRegisters() { _tile_release(); }
    AmxRegisters(const AmxRegisters&) = delete;
    AmxRegisters& operator=(const AmxRegisters&) = delete;
};

// A stretch of the inputs of tiles that follow each other, and one or two blocks of rows.
struct AmxPiece {
    const int8_t* w;       // first tile's [quads, 16, 4]
    ptrdiff_t tile_bytes;  // from tile to tile
    const int8_t* a[2];    // each block's first row
    ptrdiff_t stride;      // from row to row
    int quads;             // a multiple of AMX_QUADS
    Ahead ahead;           // of the first tile; the others' lie tile_bytes on

    // All lines of what a register takes of the so-manyth tile.
    ALWAYS_INLINE void fetch(int quad, int tile) const {
#pragma GCC unroll 16
        for (int i = 0; i < AMX_QUADS; ++i) {
            ahead.fetch(quad + i, tile * tile_bytes);
        }
    }
};

// Exact products of BLOCKS blocks of rows with TILES tiles, at most four of both together, so that
// the sums hide the latency: total[block][tile][row].
template <int BLOCKS, int TILES>
inline void amx_products(const AmxPiece& p, i32x16 (*total)[TILES][AMX_ROWS]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int quad = 0; quad < p.quads; quad += AMX_QUADS) {
        const int8_t* w = p.w + ptrdiff_t(quad) * TILE_QUAD;
        _tile_loadd(6, w, AMX_BYTES);
        _tile_loadd(4, p.a[0] + quad * QUAD, p.stride);
        p.fetch(quad, 0);
        _tile_dpbssd(0, 4, 6);
        if constexpr (BLOCKS > 1) {
            _tile_loadd(5, p.a[1] + quad * QUAD, p.stride);
            _tile_dpbssd(2, 5, 6);
        }
        if constexpr (TILES > 1) {
            _tile_loadd(7, w + p.tile_bytes, AMX_BYTES);
            p.fetch(quad, 1);
            _tile_dpbssd(1, 4, 7);
        }
        if constexpr (BLOCKS > 1 && TILES > 1) {
            _tile_dpbssd(3, 5, 7);
        }
        if constexpr (TILES > 2) {
            _tile_loadd(6, w + 2 * p.tile_bytes, AMX_BYTES);
            p.fetch(quad, 2);
            _tile_dpbssd(2, 4, 6);
            _tile_loadd(7, w + 3 * p.tile_bytes, AMX_BYTES);
            p.fetch(quad, 3);
            _tile_dpbssd(3, 4, 7);
        }
    }
    _tile_stored(0, total[0][0], AMX_BYTES);
    if constexpr (TILES > 1) {
        _tile_stored(1, total[0][1], AMX_BYTES);
    }
    if constexpr (TILES > 2) {
        _tile_stored(2, total[0][2], AMX_BYTES);
        _tile_stored(3, total[0][3], AMX_BYTES);
    }
    if constexpr (BLOCKS > 1) {
        _tile_stored(2, total[1][0], AMX_BYTES);
    }
    if constexpr (BLOCKS > 1 && TILES > 1) {
        _tile_stored(3, total[1][1], AMX_BYTES);
    }
}

// Up to sixteen rows from `begin` on, `first` of which and those after it are in the registers: a
// block that would reach beyond the last row begins so much earlier, and only its own are written.
struct AmxRows {
    int begin, end, first;

    AmxRows(int begin, int rows)
        : begin(begin), end(rows - begin < AMX_ROWS ? rows : begin + AMX_ROWS),
          first(end < AMX_ROWS ? 0 : end - AMX_ROWS) {}
};

// Adds the products of one group of inputs, as the rows scale them, to y[tile][row].
template <int TILES>
inline void add_scaled(const QuantRows& x, const AmxRows& rows, int group,
                       const i32x16 (*total)[AMX_ROWS], f32x16 (*y)[AMX_ROWS]) {
    for (int r = rows.begin - rows.first; r < rows.end - rows.first; ++r) {
        const float scale = x.scale[ptrdiff_t(rows.first + r) * x.scale_groups + group];
        for (int t = 0; t < TILES; ++t) {
            y[t][r] = fma(to_float(total[t][r]), splat(scale), group ? y[t][r] : zero());
        }
    }
}

template <int BLOCKS, int TILES>
void amx_block(const Int8Call& call, int tile, int row, Ahead ahead) {
    const QuantRows& x = call.x;
    const AmxRows rows[2] = {{row, x.rows}, {BLOCKS > 1 ? row + AMX_ROWS : row, x.rows}};
    alignas(64) i32x16 total[BLOCKS][TILES][AMX_ROWS];
    alignas(64) f32x16 y[BLOCKS][TILES][AMX_ROWS];
    constexpr int STEP = SCALE_GROUP / QUAD;
    for (int group = 0; group < x.scale_groups; ++group) {
        const int quad = group * STEP, rest = call.quads - quad;
        AmxPiece piece = {call.tile(tile) + ptrdiff_t(quad) * TILE_QUAD, call.tile_bytes(), {},
                          x.stride, rest < STEP ? rest : STEP,
                          {ahead.at + quad * ahead.step, ahead.step}};
        for (int b = 0; b < BLOCKS; ++b) {
            piece.a[b] = x.q + ptrdiff_t(rows[b].first) * x.stride + quad * QUAD;
        }
        amx_products<BLOCKS, TILES>(piece, total);
        for (int b = 0; b < BLOCKS; ++b) {
            add_scaled<TILES>(x, rows[b], group, total[b], y[b]);
        }
    }
    for (int b = 0; b < BLOCKS; ++b) {
        for (int t = 0; t < TILES; ++t) {
            const f32x16 scale = load(call.w.scale + (tile + t) * TILE);
            for (int r = rows[b].begin; r < rows[b].end; ++r) {
                finish(y[b][t][r - rows[b].first] * scale, call.w.bias, call.out, r,
                       (tile + t) * TILE, call.w.n);
            }
        }
    }
}

void linear_int8_amx(const QuantRows& x, const Int8Weights& w, const LinearOut& out, int tile_begin,
                     int tile_end) {
    const Int8Call call = {x, w, out, round_up(w.k, K_MULTIPLE) / QUAD};
    const bool is_short = call.tile_bytes() < SHORT_TILE;
    if (x.rows <= (is_short ? FEW_ROWS_SHORT : FEW_ROWS)) {
        return linear_int8(x, w, out, tile_begin, tile_end);
    }
    const AmxRegisters registers(x.rows < AMX_ROWS ? x.rows : AMX_ROWS);
    if (x.rows <= AMX_ROWS) {
        each_tile<4>(tile_begin, tile_end, true, [&](int tile, auto tiles) {
            const Reading reading = reading_of(call, tile, tiles(), tile_begin, tile_end, call.quads);
            Ahead ahead = ahead_of(reading, 1, 0);
            if (is_short && reading.next) {
                ahead = {static_cast<const int8_t*>(reading.next), TILE_QUAD};
            }
            amx_block<1, tiles()>(call, tile, 0, ahead);
        });
        return;
    }
    each_tile<2>(tile_begin, tile_end, true, [&](int tile, auto tiles) {
        const Reading reading = reading_of(call, tile, tiles(), tile_begin, tile_end, call.quads);
        const int blocks = (x.rows + 2 * AMX_ROWS - 1) / (2 * AMX_ROWS);
        for (int i = 0; i < blocks; ++i) {
            const int row = i * 2 * AMX_ROWS;
            const Ahead ahead = ahead_of(reading, blocks, i);
            if (x.rows - row > AMX_ROWS) {
                amx_block<2, tiles()>(call, tile, row, ahead);
            } else {
                amx_block<1, tiles()>(call, tile, row, ahead);
            }
        }
    });
}

}  // namespace
}  // namespace paceline
