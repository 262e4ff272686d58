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

// --- AVX-512 VNNI -------------------------------------------------------------------------------
#if defined(__AVX512VNNI__) && defined(__AVX512F__)

constexpr int MAX_INT4_ROWS = 8;
constexpr int MAX_PACKED_ROWS = 1 << 30;

template <int ROWS, typename Groups>
ALWAYS_INLINE void dot_group(const Groups& w, const GroupInputs& x, i32x16* total) {
    for (int r = 0; r < ROWS; ++r) {
        total[r] = splat_i32(-8 * x.sums[r * x.sums_stride]);
    }
    for (int i = 0; i < GROUP_STEPS; ++i) {
        const i32x16 low = w.low(i), high = w.high(i);
        for (int r = 0; r < ROWS; ++r) {
            const int8_t* at = x.a + r * x.stride + i * QUAD;
            const __m512i a0 = _mm512_set1_epi32(load_quad(at));
            const __m512i a1 = _mm512_set1_epi32(load_quad(at + GROUP / 2));
            total[r].v = _mm512_dpbusd_epi32(total[r].v, low.v, a0);
            total[r].v = _mm512_dpbusd_epi32(total[r].v, high.v, a1);
        }
    }
}

// --- AVX-VNNI -----------------------------------------------------------------------------------
#elif defined(__AVXVNNI__)

constexpr int MAX_INT4_ROWS = 4;
constexpr int MAX_PACKED_ROWS = 1 << 30;

template <int ROWS, typename Groups>
ALWAYS_INLINE void dot_group(const Groups& w, const GroupInputs& x, i32x16* total) {
    for (int r = 0; r < ROWS; ++r) {
        total[r] = splat_i32(-8 * x.sums[r * x.sums_stride]);
    }
    for (int i = 0; i < GROUP_STEPS; ++i) {
        const i32x16 low = w.low(i), high = w.high(i);
        for (int r = 0; r < ROWS; ++r) {
            const int8_t* at = x.a + r * x.stride + i * QUAD;
            const __m256i a0 = _mm256_set1_epi32(load_quad(at));
            const __m256i a1 = _mm256_set1_epi32(load_quad(at + GROUP / 2));
            total[r].lo = _mm256_dpbusd_avx_epi32(total[r].lo, low.lo, a0);
            total[r].hi = _mm256_dpbusd_avx_epi32(total[r].hi, low.hi, a0);
            total[r].lo = _mm256_dpbusd_avx_epi32(total[r].lo, high.lo, a1);
            total[r].hi = _mm256_dpbusd_avx_epi32(total[r].hi, high.hi, a1);
        }
    }
}

// --- AVX2 ---------------------------------------------------------------------------------------
// A whole group fits 16 bits: the sum of (c - 8) a over half of its inputs and of -8 a over the
// other half is within 32 * 8 * 127 = 32512. On the way there vpaddw may wrap, which is no loss,
// while vpmaddubsw cannot saturate: 2 * 15 * 127 = 3810.
#elif defined(__AVX2__)

constexpr int MAX_INT4_ROWS = 4;
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

template <int ROWS, typename Groups>
ALWAYS_INLINE void dot_group(const Groups& w, const GroupInputs& x, i32x16* total) {
    GroupSums<ROWS> sums(x.sums, x.sums_stride);
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_STEPS; ++i) {
        sums.add(w.low(i), x.a + i * QUAD, x.stride);
        sums.add(w.high(i), x.a + (GROUP_STEPS + i) * QUAD, x.stride);
    }
    sums.get(total);
}

// --- the others: unpacked nibbles go through the 8-bit products ----------------------------------
#else

constexpr int MAX_INT4_ROWS = MAX_ROWS;
constexpr int MAX_PACKED_ROWS = 0;

template <int ROWS>
ALWAYS_INLINE void dot_group(const UnpackedGroups& w, const GroupInputs& x, i32x16* total) {
    static_assert(!SUMS_NEEDED, "these levels take signed operands");
    dot<ROWS>({w.bytes, x.a, x.stride, GROUP / QUAD, false, nullptr}, nullptr, total);
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

    const uint8_t* group(int tile, int group) const {
        return w.data + (ptrdiff_t(tile) * groups + group) * GROUP_BYTES;
    }
};

// Adds the products of groups begin..end - 1, which `w` starts with, to y.
template <int ROWS, typename Groups>
ALWAYS_INLINE void add_groups(const Int4Call& call, Groups w, int row, int begin, int end,
                              f32x16* y) {
    const QuantRows& x = call.x;
    const ptrdiff_t sums_stride = x.stride / GROUP;
    const float* scales = x.scale + ptrdiff_t(row) * x.scale_groups;
    for (int group = begin; group < end; ++group, w.next()) {
        i32x16 total[ROWS];
        dot_group<ROWS>(w, {x.q + ptrdiff_t(row) * x.stride + group * GROUP, x.stride,
                            x.group_sums + row * sums_stride + group, sums_stride}, total);
        const f32x16 scale = w.scale();
        if (x.scale_groups > 1) {
            const float* each = scales + group / (SCALE_GROUP / GROUP);
            for (int r = 0; r < ROWS; ++r) {
                const f32x16 factor = scale * splat(each[ptrdiff_t(r) * x.scale_groups]);
                y[r] = fma(to_float(total[r]), factor, y[r]);
            }
        } else {
            for (int r = 0; r < ROWS; ++r) {
                y[r] = fma(to_float(total[r]), scale, y[r]);
            }
        }
    }
}

inline void finish_int4(const Int4Call& call, int tile, int row, f32x16 y) {
    const QuantRows& x = call.x;
    finish(x.scale_groups > 1 ? y : y * splat(x.scale[row]), call.w.bias, call.out, row,
           tile * TILE, call.w.n);
}

template <int ROWS> void packed_block(const Int4Call& call, int tile, int row) {
    f32x16 y[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        y[r] = zero();
    }
    add_groups<ROWS>(call, PackedGroups{call.group(tile, 0)}, row, 0, call.groups, y);
    for (int r = 0; r < ROWS; ++r) {
        finish_int4(call, tile, row + r, y[r]);
    }
}

template <int ROWS>
void unpacked_block(const Int4Call& call, const UnpackedGroups& w, int row, int begin, int end,
                    float* sums) {
    f32x16 y[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        y[r] = load(sums + r * TILE);
    }
    add_groups<ROWS>(call, w, row, begin, end, y);
    for (int r = 0; r < ROWS; ++r) {
        store(sums + r * TILE, y[r]);
    }
}

template <int ROWS, typename Block> inline void with_rows(int rows, Block block) {
    if (rows == ROWS) {
        block(std::integral_constant<int, ROWS>());
    } else if constexpr (ROWS > 1) {
        with_rows<ROWS - 1>(rows, block);
    }
}
// Calls block(first row, number of rows) for rows begin..end - 1, at most MAX each and in sizes as
// even as can be.
template <int MAX, typename Block> inline void each_block(int begin, int end, Block block) {
    const int blocks = (end - begin + MAX - 1) / MAX;
    int row = begin;
    for (int i = 0; i < blocks; ++i) {
        const int rows = (end - row) / (blocks - i);
        with_rows<MAX>(rows, [&](auto size) { block(row, size); });
        row += rows;
    }
}

constexpr int UNPACKED_GROUPS = 32;  // 16 KiB: half of a first-level cache
constexpr int UNPACKED_ROWS = 64;

void unpacked_tile(const Int4Call& call, int tile, int row_begin, int row_end) {
    alignas(64) int8_t bytes[UNPACKED_GROUPS * GROUP * TILE];
    alignas(64) float scales[UNPACKED_GROUPS * TILE];
    alignas(64) float y[UNPACKED_ROWS * TILE] = {};
    for (int begin = 0; begin < call.groups; begin += UNPACKED_GROUPS) {
        const int rest = call.groups - begin;
        const int end = begin + (rest < UNPACKED_GROUPS ? rest : UNPACKED_GROUPS);
        PackedGroups w = {call.group(tile, begin)};
        int8_t* to = bytes;
        for (int group = begin; group < end; ++group, w.next()) {
            store(scales + (group - begin) * TILE, w.scale());
            for (int i = 0; i < GROUP_STEPS; ++i, to += TILE_QUAD) {
                store_i32(reinterpret_cast<int32_t*>(to), w.low(i));
                store_i32(reinterpret_cast<int32_t*>(to + GROUP_STEPS * TILE_QUAD), w.high(i));
            }
            to += GROUP_STEPS * TILE_QUAD;
        }
        each_block<MAX_INT4_ROWS>(row_begin, row_end, [&](int row, auto size) {
            unpacked_block<size()>(call, {bytes, scales}, row, begin, end,
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
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        if constexpr (MAX_PACKED_ROWS > 0) {
            if (x.rows <= MAX_PACKED_ROWS) {
                each_block<MAX_INT4_ROWS>(0, x.rows, [&](int row, auto size) {
                    packed_block<size()>(call, tile, row);
                });
                continue;
            }
        }
        for (int row = 0; row < x.rows; row += UNPACKED_ROWS) {
            const int rest = x.rows - row;
            unpacked_tile(call, tile, row, row + (rest < UNPACKED_ROWS ? rest : UNPACKED_ROWS));
        }
    }
}

}  // namespace
}  // namespace paceline
