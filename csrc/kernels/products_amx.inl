// Exact products on AMX: one instruction multiplies sixteen rows, sixteen outputs and up to 64 inputs,
// and takes the codes as they lie. Here it takes the inputs that share a scale, 16 or 32. What follows
// the integers is the same program as for other rows, so the bits are those of AVX-512 VNNI.
namespace paceline {
namespace {

constexpr int AMX_ROWS = 16;                  // of a register
constexpr int AMX_BYTES = 64;                 // of a full register's row
constexpr int LEAST_AMX_ROWS = 2 * AMX_ROWS;  // fewer are faster without

// What is at `memory` is read by the instruction that follows. gcc 12's intrinsics do not say so:
// `_tile_loadconfig` names its first eight bytes as a pointer, and `_tile_loadd` none, so that the
// compiler may drop or delay what was written there.
ALWAYS_INLINE void will_be_read(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Of a register's contents, as the processor reads it.
struct AmxShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The registers, for `quads` quads of inputs at once: 0 and 1 hold sums, 2 the inputs, 3 and 4 codes.
struct AmxRegisters {
    explicit AmxRegisters(int quads) {
        AmxShapes shapes;
        for (int i = 0; i < 5; ++i) {
            shapes.row_bytes[i] = static_cast<uint16_t>(i == 2 ? quads * QUAD : AMX_BYTES);
            shapes.rows[i] = static_cast<uint8_t>(i < 3 ? AMX_ROWS : quads);
        }
        will_be_read(&shapes);
        _tile_loadconfig(&shapes);
    }
    ~AmxRegisters() { _tile_release(); }
    AmxRegisters(const AmxRegisters&) = delete;
    AmxRegisters& operator=(const AmxRegisters&) = delete;
};

// Sums over the quads that the registers are made for, of sixteen rows with TILES tiles:
// total[tile][row]. Signed codes make them too large by CODE_ZERO times the sum of a row's inputs.
template <int TILES>
inline void amx_products(const uint8_t* const* codes, const int8_t* a,
                         i32x16 (*total)[AMX_ROWS]) {
    will_be_read(a);
    for (int t = 0; t < TILES; ++t) {
        will_be_read(codes[t]);
    }
    _tile_loadd(2, a, ROW_BYTES);
    _tile_zero(0);
    _tile_loadd(3, codes[0], AMX_BYTES);
    _tile_dpbsud(0, 2, 3);
    if constexpr (TILES > 1) {
        _tile_zero(1);
        _tile_loadd(4, codes[1], AMX_BYTES);
        _tile_dpbsud(1, 2, 4);
    }
    _tile_stored(0, total[0], AMX_BYTES);
    if constexpr (TILES > 1) {
        _tile_stored(1, total[1], AMX_BYTES);
    }
}

}  // namespace
}  // namespace paceline
