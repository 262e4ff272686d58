// The 4-bit linear of one level. Nibbles are multiplied as they are, 0..15; that they mean c - 8
// is where a group's sum starts from: minus eight times the sum of the row's inputs. `dot_group` is
// the only part that knows the instruction set, and exact; in float each element is one fixed
// program: a fused multiply-add per group, in ascending order, then `finish` of linear_int8.inl.
namespace paceline {
namespace {

constexpr int GROUP_STEPS = GROUP / 2 / QUAD;  // 64-byte rows of nibbles in a group

// Consecutive groups of a tile, from one to the next. low(i) holds the weights of the group's i-th
// quad of inputs, high(i) those of quad GROUP_STEPS + i: a byte each, [16, 4].
struct PackedGroups {  // as they lie in memory
    const uint8_t* at;

    i32x16 row(int i) const {
        return load_i32(reinterpret_cast<const int32_t*>(at + 2 * TILE + i * TILE_QUAD));
    }
    i32x16 low(int i) const { return row(i) & splat_i32(0x0f0f0f0f); }
    i32x16 high(int i) const { return shift_right<4>(row(i)) & splat_i32(0x0f0f0f0f); }
    f32x16 scale() const {
        uint16_t halves[TILE];
        std::memcpy(halves, at, sizeof halves);
        return load_f16(halves);
    }
    void next() { at += GROUP_BYTES; }
};
struct UnpackedGroups {  // in a buffer
    const int8_t* bytes;  // [groups, 8, 16, 4]
    const float* scales;  // [groups, 16]

    i32x16 quad(int i) const {
        return load_i32(reinterpret_cast<const int32_t*>(bytes + i * TILE_QUAD));
    }
    i32x16 low(int i) const { return quad(i); }
    i32x16 high(int i) const { return quad(GROUP_STEPS + i); }
    f32x16 scale() const { return load(scales); }
    void next() {
        bytes += GROUP * TILE;
        scales += TILE;
    }
};

// One group of the inputs of some rows.
struct GroupInputs {
    const int8_t* a;      // first row's inputs
    ptrdiff_t stride;     // from row to row
    const int32_t* sums;  // first row's sum of them
    ptrdiff_t sums_stride;
};

// `dot_group` makes the products of a group of ROWS rows with TILES tiles: total[row * TILES + tile].

// --- AVX-512 VNNI, AVX-VNNI ---------------------------------------------------------------------
#if defined(HAS_VNNI)

constexpr int most_int4_rows(int tiles) { return MAX_ROWS / tiles; }
constexpr int MAX_PACKED_ROWS = 1 << 30;

template <int ROWS, int TILES, typename Groups>
ALWAYS_INLINE void dot_group(const Groups* w, const GroupInputs& x, i32x16* total) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        const int32_t start = -8 * x.sums[r * x.sums_stride];
#pragma GCC unroll 16
        for (int t = 0; t < TILES; ++t) {
            total[r * TILES + t] = splat_i32(start);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * GROUP_STEPS; ++i) {
        i32x16 quads[TILES];
#pragma GCC unroll 16
        for (int t = 0; t < TILES; ++t) {
            quads[t] = i < GROUP_STEPS ? w[t].low(i) : w[t].high(i - GROUP_STEPS);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const i32x16 a = splat_i32(load_quad(x.a + r * x.stride + i * QUAD));
#pragma GCC unroll 16
            for (int t = 0; t < TILES; ++t) {
                add_products(total[r * TILES + t], quads[t], a);
            }
        }
    }
}

// --- AVX2 ---------------------------------------------------------------------------------------
// A whole group fits 16 bits: the sum of (c - 8) a over half of its inputs and of -8 a over the
// other half is within 32 * 8 * 127 = 32512. On the way there vpaddw may wrap, which is no loss,
// while vpmaddubsw cannot saturate: 2 * 15 * 127 = 3810.
#elif defined(__AVX2__)

constexpr int most_int4_rows(int) { return 4; }
constexpr int MAX_PACKED_ROWS = 16;  // for more, unpacking a tile once for all of them is faster

// As RowSums of linear_int8.inl: the sums of pairs of inputs, in 16 bits. The first pair of a quad
// starts from minus eight times the group's sum, the second one from zero.
template <int ROWS> struct GroupSums {
    i16x16 lo, hi;
    GroupSums<ROWS - 1> rest;

    ALWAYS_INLINE explicit GroupSums(const int32_t* sums, ptrdiff_t stride)
        : lo((i16x16)_mm256_mullo_epi16(_mm256_set1_epi32(*sums), _mm256_set1_epi32(0xfff8))),
          hi(lo), rest(sums + stride, stride) {}
    ALWAYS_INLINE void add(const i32x16& w, const int8_t* a, ptrdiff_t stride) {
        const __m256i inputs = _mm256_set1_epi32(load_quad(a));
        lo += (i16x16)_mm256_maddubs_epi16(w.lo, inputs);
        hi += (i16x16)_mm256_maddubs_epi16(w.hi, inputs);
        asm volatile("" : "+x"(lo), "+x"(hi));  // or gcc loads ahead and runs out of registers
        rest.add(w, a + stride, stride);
    }
    ALWAYS_INLINE void get(i32x16* total) const {
        const __m256i ones = _mm256_set1_epi16(1);
        *total = {_mm256_madd_epi16((__m256i)lo, ones), _mm256_madd_epi16((__m256i)hi, ones)};
        rest.get(total + 1);
    }
};
template <> struct GroupSums<0> {
    GroupSums(const int32_t*, ptrdiff_t) {}
    void add(const i32x16&, const int8_t*, ptrdiff_t) {}
    void get(i32x16*) const {}
};

template <int ROWS, int TILES, typename Groups>
ALWAYS_INLINE void dot_group(const Groups* w, const GroupInputs& x, i32x16* total) {
    GroupSums<ROWS> sums(x.sums, x.sums_stride);
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_STEPS; ++i) {
        sums.add(w->low(i), x.a + i * QUAD, x.stride);
        sums.add(w->high(i), x.a + (GROUP_STEPS + i) * QUAD, x.stride);
    }
    sums.get(total);
}

// --- the others: unpacked nibbles go through the 8-bit products ----------------------------------
#else

constexpr int most_int4_rows(int) { return MAX_ROWS; }
constexpr int MAX_PACKED_ROWS = 0;

template <int ROWS, int TILES>
ALWAYS_INLINE void dot_group(const UnpackedGroups* w, const GroupInputs& x, i32x16* total) {
    static_assert(!SUMS_NEEDED, "these levels take signed operands");
    dot<ROWS, 1>({w->bytes, 0, x.a, x.stride, GROUP / QUAD, false, {w->bytes, 0}, nullptr, 0}, nullptr,
                 total);
    for (int r = 0; r < ROWS; ++r) {
        total[r] = total[r] - splat_i32(8 * x.sums[r * x.sums_stride]);
    }
}
#endif

// --- all levels ---------------------------------------------------------------------------------

struct Int4Call {
    const QuantRows& x;
    const Int4Weights& w;
    const LinearOut& out;
    int groups;  // of a row

    ptrdiff_t tile_bytes() const { return ptrdiff_t(groups) * GROUP_BYTES; }
    const uint8_t* tile(int index) const { return w.data + index * tile_bytes(); }
};

constexpr int GROUP_FETCHES = (GROUP_BYTES + 63) / 64;  // lines of a group

// Adds the products of groups begin..end - 1, which `w` starts with, to y[row * TILES + tile].
template <int ROWS, int TILES, typename Groups>
ALWAYS_INLINE void add_groups(const Int4Call& call, Groups* w, int row, int begin, int end,
                              Ahead ahead, f32x16* y) {
    const QuantRows& x = call.x;
    const ptrdiff_t sums_stride = x.stride / GROUP;
    const float* scales = x.scale + ptrdiff_t(row) * x.scale_groups;
    for (int group = begin; group < end; ++group) {
#pragma GCC unroll 16
        for (int i = 0; i < TILES * GROUP_FETCHES; ++i) {
            ahead.fetch(group * GROUP_FETCHES + i / TILES, i % TILES * call.tile_bytes());
        }
        i32x16 total[ROWS * TILES];
        dot_group<ROWS, TILES>(w, {x.q + ptrdiff_t(row) * x.stride + group * GROUP, x.stride,
                                   x.group_sums + row * sums_stride + group, sums_stride}, total);
#pragma GCC unroll 16
        for (int t = 0; t < TILES; ++t) {
            const f32x16 scale = w[t].scale();
            w[t].next();
            const float* each = scales + group / (SCALE_GROUP / GROUP);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const f32x16 factor = scale * splat(each[ptrdiff_t(r) * x.scale_groups]);
                y[r * TILES + t] = fma(to_float(total[r * TILES + t]), factor, y[r * TILES + t]);
            }
        }
    }
}

inline void finish_int4(const Int4Call& call, int tile, int row, f32x16 y) {
    finish(y, call.w.bias, call.out, row, tile * TILE, call.w.n);
}

template <int ROWS, int TILES>
void packed_block(const Int4Call& call, int tile, int row, Ahead ahead) {
    PackedGroups w[TILES];
    for (int t = 0; t < TILES; ++t) {
        w[t] = {call.tile(tile + t)};
        fetch_outputs(call.out, row, ROWS, (tile + t) * TILE);
    }
    f32x16 y[ROWS * TILES];
    for (f32x16& each : y) {
        each = zero();
    }
    add_groups<ROWS, TILES>(call, w, row, 0, call.groups, ahead, y);
    for (int i = 0; i < ROWS * TILES; ++i) {
        finish_int4(call, tile + i % TILES, row + i / TILES, y[i]);
    }
}

template <int ROWS>
void unpacked_block(const Int4Call& call, UnpackedGroups w, int row, int begin, int end,
                    Ahead ahead, float* sums) {
    f32x16 y[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        y[r] = load(sums + r * TILE);
    }
    add_groups<ROWS, 1>(call, &w, row, begin, end, ahead, y);
    for (int r = 0; r < ROWS; ++r) {
        store(sums + r * TILE, y[r]);
    }
}

constexpr int FEW_INT4_ROWS = 3;     // whose tiles stream by one at a time
constexpr int UNPACKED_GROUPS = 32;  // 16 KiB: half of a first-level cache
constexpr int UNPACKED_ROWS = 64;

void unpacked_tile(const Int4Call& call, int tile, int row_begin, int row_end,
                   const Reading& reading) {
    alignas(64) int8_t bytes[UNPACKED_GROUPS * GROUP * TILE];
    alignas(64) float scales[UNPACKED_GROUPS * TILE];
    alignas(64) float y[UNPACKED_ROWS * TILE] = {};
    for (int begin = 0; begin < call.groups; begin += UNPACKED_GROUPS) {
        const int rest = call.groups - begin;
        const int end = begin + (rest < UNPACKED_GROUPS ? rest : UNPACKED_GROUPS);
        PackedGroups w = {call.tile(tile) + ptrdiff_t(begin) * GROUP_BYTES};
        int8_t* to = bytes;
        for (int group = begin; group < end; ++group, w.next()) {
            store(scales + (group - begin) * TILE, w.scale());
            for (int i = 0; i < GROUP_STEPS; ++i, to += TILE_QUAD) {
                store_i32(reinterpret_cast<int32_t*>(to), w.low(i));
                store_i32(reinterpret_cast<int32_t*>(to + GROUP_STEPS * TILE_QUAD), w.high(i));
            }
            to += GROUP_STEPS * TILE_QUAD;
        }
        each_block<most_int4_rows(1)>(row_begin, row_end, reading,
                                      [&](int row, auto rows, Ahead ahead) {
            unpacked_block<rows()>(call, {bytes, scales}, row, begin, end, ahead,
                                   y + (row - row_begin) * TILE);
        });
    }
    for (int row = row_begin; row < row_end; ++row) {
        finish_int4(call, tile, row, load(y + (row - row_begin) * TILE));
    }
}

void linear_int4(const QuantRows& x, const Int4Weights& w, const LinearOut& out, int tile_begin,
                 int tile_end) {
    const Int4Call call = {x, w, out, round_up(w.k, K_MULTIPLE) / GROUP};
    each_tile<MAX_TILES>(tile_begin, tile_end, x.rows > FEW_INT4_ROWS, [&](int tile, auto tiles) {
        const Reading reading = reading_of(call, tile, tiles(), tile_begin, tile_end,
                                           call.groups * GROUP_FETCHES);
        if constexpr (MAX_PACKED_ROWS > 0) {
            if (x.rows <= MAX_PACKED_ROWS) {
                each_block<most_int4_rows(tiles())>(0, x.rows, reading,
                                                    [&](int row, auto rows, Ahead ahead) {
                    packed_block<rows(), tiles()>(call, tile, row, ahead);
                });
                return;
            }
        }
        if constexpr (MAX_PACKED_ROWS < 1 << 30) {
            for (int row = 0; row < x.rows; row += UNPACKED_ROWS) {
                const int rest = x.rows - row;
                const int rows = rest < UNPACKED_ROWS ? rest : UNPACKED_ROWS;
                unpacked_tile(call, tile, row, row + rows, reading);
            }
        }
    });
}

}  // namespace
}  // namespace paceline
