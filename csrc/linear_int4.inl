// The 4-bit linear of one level. Nibbles are multiplied as they are, 0..15; that they mean c - 8
// is where a group's sum starts from: minus eight times the sum of the row's inputs. `dot_group` is
// the only part that knows the instruction set, and exact; in float each element is one fixed
// program: a fused multiply-add per group, in ascending order, then `finish` of linear_int8.inl.
namespace paceline {
namespace {

constexpr int GROUP_STEPS = GROUP / 2 / QUAD;  // 64-byte rows of nibbles in a group

// --- AVX-512 VNNI -------------------------------------------------------------------------------
#if defined(__AVX512VNNI__) && defined(__AVX512F__)

constexpr int MAX_INT4_ROWS = 8;

template <int ROWS>
ALWAYS_INLINE void dot_group(const uint8_t* nibbles, const int8_t* a, ptrdiff_t stride, i32x16* total) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < GROUP_STEPS; ++i) {
        const __m512i w = _mm512_loadu_si512(nibbles + i * TILE_QUAD);
        const __m512i lo = _mm512_and_si512(w, low);
        const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
        for (int r = 0; r < ROWS; ++r) {
            const int8_t* at = a + r * stride + i * QUAD;
            __m512i sum = _mm512_dpbusd_epi32(total[r].v, lo, _mm512_set1_epi32(load_quad(at)));
            total[r].v =
                _mm512_dpbusd_epi32(sum, hi, _mm512_set1_epi32(load_quad(at + GROUP / 2)));
        }
    }
}

// --- AVX-VNNI -----------------------------------------------------------------------------------
#elif defined(__AVXVNNI__)

constexpr int MAX_INT4_ROWS = 4;

template <int ROWS>
ALWAYS_INLINE void dot_group(const uint8_t* nibbles, const int8_t* a, ptrdiff_t stride, i32x16* total) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < GROUP_STEPS; ++i) {
        const __m256i* at = reinterpret_cast<const __m256i*>(nibbles + i * TILE_QUAD);
        const __m256i w0 = _mm256_loadu_si256(at), w1 = _mm256_loadu_si256(at + 1);
        const __m256i lo0 = _mm256_and_si256(w0, low), lo1 = _mm256_and_si256(w1, low);
        const __m256i hi0 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), low);
        const __m256i hi1 = _mm256_and_si256(_mm256_srli_epi16(w1, 4), low);
        for (int r = 0; r < ROWS; ++r) {
            const int8_t* quad = a + r * stride + i * QUAD;
            const __m256i a0 = _mm256_set1_epi32(load_quad(quad));
            const __m256i a1 = _mm256_set1_epi32(load_quad(quad + GROUP / 2));
            total[r].lo = _mm256_dpbusd_avx_epi32(total[r].lo, lo0, a0);
            total[r].hi = _mm256_dpbusd_avx_epi32(total[r].hi, lo1, a0);
            total[r].lo = _mm256_dpbusd_avx_epi32(total[r].lo, hi0, a1);
            total[r].hi = _mm256_dpbusd_avx_epi32(total[r].hi, hi1, a1);
        }
    }
}

// --- AVX2 ---------------------------------------------------------------------------------------
// A whole group's products fit 16 bits: 8 vpmaddubsw of at most 2 * 15 * 127 add up to 30480.
#elif defined(__AVX2__)

constexpr int MAX_INT4_ROWS = 4;

// As RowSums of linear_int8.inl: the sums of pairs of inputs, in 16 bits.
template <int ROWS> struct GroupSums {
    i16x16 lo = {}, hi = {};
    GroupSums<ROWS - 1> rest;

    ALWAYS_INLINE void add(const i32x16& low, const i32x16& high, const int8_t* a,
                           ptrdiff_t stride) {
        const __m256i a0 = _mm256_set1_epi32(load_quad(a));
        const __m256i a1 = _mm256_set1_epi32(load_quad(a + GROUP / 2));
        lo += (i16x16)_mm256_maddubs_epi16(low.lo, a0);
        hi += (i16x16)_mm256_maddubs_epi16(low.hi, a0);
        lo += (i16x16)_mm256_maddubs_epi16(high.lo, a1);
        hi += (i16x16)_mm256_maddubs_epi16(high.hi, a1);
        rest.add(low, high, a + stride, stride);
    }
    ALWAYS_INLINE void get(i32x16* total) const {
        const __m256i ones = _mm256_set1_epi16(1);
        *total = *total + i32x16{_mm256_madd_epi16((__m256i)lo, ones),
                                 _mm256_madd_epi16((__m256i)hi, ones)};
        rest.get(total + 1);
    }
};
template <> struct GroupSums<0> {
    void add(const i32x16&, const i32x16&, const int8_t*, ptrdiff_t) {}
    void get(i32x16*) const {}
};

template <int ROWS>
ALWAYS_INLINE void dot_group(const uint8_t* nibbles, const int8_t* a, ptrdiff_t stride,
                             i32x16* total) {
    const __m256i mask = _mm256_set1_epi8(15);
    GroupSums<ROWS> sums;
#pragma GCC unroll 1  // unrolled, four steps' operands do not fit the registers
    for (int i = 0; i < GROUP_STEPS; ++i) {
        const __m256i* at = reinterpret_cast<const __m256i*>(nibbles + i * TILE_QUAD);
        const __m256i w0 = _mm256_loadu_si256(at), w1 = _mm256_loadu_si256(at + 1);
        const i32x16 low = {_mm256_and_si256(w0, mask), _mm256_and_si256(w1, mask)};
        const i32x16 high = {_mm256_and_si256(_mm256_srli_epi16(w0, 4), mask),
                             _mm256_and_si256(_mm256_srli_epi16(w1, 4), mask)};
        sums.add(low, high, a + i * QUAD, stride);
    }
    sums.get(total);
}

// --- the others: the nibbles as bytes go through the 8-bit products -------------------------------
#else

constexpr int MAX_INT4_ROWS = MAX_ROWS;

template <int ROWS>
ALWAYS_INLINE void dot_group(const uint8_t* nibbles, const int8_t* a, ptrdiff_t stride, i32x16* total) {
    int8_t w[2 * GROUP_STEPS * TILE_QUAD];
    for (int i = 0; i < GROUP_STEPS * TILE_QUAD; ++i) {
        w[i] = static_cast<int8_t>(nibbles[i] & 15);
        w[i + GROUP_STEPS * TILE_QUAD] = static_cast<int8_t>(nibbles[i] >> 4);
    }
    static_assert(!SUMS_NEEDED, "these levels take signed operands");
    i32x16 products[ROWS];
    TileShared none = {};
    dot<ROWS>({w, a, stride, GROUP / QUAD, false, nullptr}, none, products);
    for (int r = 0; r < ROWS; ++r) {
        total[r] = total[r] + products[r];
    }
}
#endif

// --- all levels ---------------------------------------------------------------------------------

struct Int4Call {
    const QuantRows& x;
    const Int4Weights& w;
    const LinearOut& out;
    int groups;  // of a row
};

template <int ROWS> void int4_block(const Int4Call& call, int tile, int row) {
    const QuantRows& x = call.x;
    const uint8_t* data = call.w.data + ptrdiff_t(tile) * call.groups * GROUP_BYTES;
    const int8_t* a = x.q + ptrdiff_t(row) * x.stride;
    const int32_t* sums = x.group_sums + ptrdiff_t(row) * (x.stride / GROUP);
    const float* scales = x.scale + ptrdiff_t(row) * x.scale_groups;
    const bool grouped = x.scale_groups > 1;
    f32x16 y[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        y[r] = zero();
    }
    for (int group = 0; group < call.groups; ++group, data += GROUP_BYTES) {
        i32x16 total[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            total[r] = splat_i32(-8 * sums[ptrdiff_t(r) * (x.stride / GROUP) + group]);
        }
        dot_group<ROWS>(data + 2 * TILE, a + group * GROUP, x.stride, total);
        uint16_t halves[TILE];
        std::memcpy(halves, data, sizeof halves);
        const f32x16 scale = load_f16(halves);
        if (grouped) {
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
    for (int r = 0; r < ROWS; ++r) {
        const f32x16 value = grouped ? y[r] : y[r] * splat(scales[r]);
        finish(value, call.w.bias, call.out, row + r, tile * TILE, call.w.n);
    }
}

template <int ROWS> inline void int4_rows(int rows, const Int4Call& call, int tile, int row) {
    if (rows == ROWS) {
        int4_block<ROWS>(call, tile, row);
    } else if constexpr (ROWS > 1) {
        int4_rows<ROWS - 1>(rows, call, tile, row);
    }
}

void linear_int4(const QuantRows& x, const Int4Weights& w, const LinearOut& out, int tile_begin,
                 int tile_end) {
    const Int4Call call = {x, w, out, round_up(w.k, K_MULTIPLE) / GROUP};
    const int blocks = (x.rows + MAX_INT4_ROWS - 1) / MAX_INT4_ROWS;
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        int row = 0;
        for (int block = 0; block < blocks; ++block) {  // of sizes as even as can be
            const int rows = (x.rows - row) / (blocks - block);
            int4_rows<MAX_INT4_ROWS>(rows, call, tile, row);
            row += rows;
        }
    }
}

}  // namespace
}  // namespace paceline
