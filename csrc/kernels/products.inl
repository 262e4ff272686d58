// Exact products of 8-bit activations with the codes of unpacked tiles: the only part of the
// quantised linear that knows the instruction set.
//
// `exact<ROWS, Codes, PART>` makes the sums over the PART-th quads of a stretch's inputs that share a
// scale, of ROWS rows with a tile. Signed codes are bytes
// that stand for CODE_ZERO less, the others for themselves and are at most 31. Integers make a sum
// independent of its order. Where MEETS_PACKED, codes may be packed still.
namespace paceline {
namespace {

struct Quads {
    const uint8_t* codes;  // of the stretch, [8 quads, 16, 4] or packed
    const int8_t* a;       // the first row's inputs, of the PART-th group
    const int32_t* start;  // its -CODE_ZERO * sum of these inputs
};
// From each row's to the next one's.
constexpr int ROW_BYTES = sizeof(QuantStretch), ROW_INTS = ROW_BYTES / sizeof(int32_t);

// --- AVX-512 VNNI, AVX-VNNI ---------------------------------------------------------------------
// The instruction wants one unsigned operand: the codes. What signed ones are too large by is where
// a row's sum starts from.
#if (defined(__AVX512VNNI__) && defined(__AVX512F__)) || defined(__AVXVNNI__)

constexpr bool MEETS_PACKED = true;

// Adds the products of the unsigned bytes of w and the signed ones of a. Assembly, since gcc copies
// the accumulators of the intrinsics and runs out of registers.
#if defined(__AVX512VNNI__)
template <typename> constexpr int MAX_ROWS = 12;

// The four bytes that all lanes of an instruction are multiplied with.
typedef int32_t __attribute__((may_alias)) AliasedQuad;
ALWAYS_INLINE void add_products(i32x16& total, i32x16 w, const int8_t* a) {
#if defined(PACELINE_EMULATED)
    total.v = _mm512_dpbusd_epi32(total.v, w.v, _mm512_set1_epi32(load_quad(a)));
#else
    asm volatile("vpdpbusd %2%{1to16%}, %1, %0"
                 : "+v"(total.v)
                 : "v"(w.v), "m"(*reinterpret_cast<const AliasedQuad*>(a)));
#endif
}
#else
template <typename> constexpr int MAX_ROWS = 6;

ALWAYS_INLINE void add_products(i32x16& total, i32x16 w, const int8_t* a) {
    const __m256i inputs = _mm256_set1_epi32(load_quad(a));
#if defined(PACELINE_EMULATED)
    total.lo = _mm256_dpbusd_avx_epi32(total.lo, w.lo, inputs);
    total.hi = _mm256_dpbusd_avx_epi32(total.hi, w.hi, inputs);
#else
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total.lo) : "x"(w.lo), "x"(inputs));
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total.hi) : "x"(w.hi), "x"(inputs));
#endif
}
#endif

// Adds the products with quads J, J + STEP and so on; the codes of these may lie in the same bytes.
template <int ROWS, typename Codes, int PART, int STEP, int J>
ALWAYS_INLINE void add_quads(const Quads& p, i32x16* total) {
    if constexpr (J < Codes::COUNT) {
        const i32x16 w = Codes::template quad<PART * Codes::COUNT + J>(p.codes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            add_products(total[r], w, p.a + r * ROW_BYTES + J * QUAD);
        }
        add_quads<ROWS, Codes, PART, STEP, J + STEP>(p, total);
    }
}

template <int ROWS, typename Codes, int PART>
ALWAYS_INLINE void exact(const Quads& p, i32x16* total) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        total[r] = splat_i32(Codes::SIGNED ? p.start[r * ROW_INTS] : 0);
    }
    add_quads<ROWS, Codes, PART, 4, 0>(p, total);
    add_quads<ROWS, Codes, PART, 4, 1>(p, total);
    add_quads<ROWS, Codes, PART, 4, 2>(p, total);
    add_quads<ROWS, Codes, PART, 4, 3>(p, total);
}

// --- AVX2 ---------------------------------------------------------------------------------------
// vpmaddubsw adds two products in 16 bits, with saturation. Signed codes: their sizes are the
// unsigned operand and the inputs, which have no -128, take over their signs: 2 * 128 * 127 fits.
// Of the others eight quads fit where they are at most 15, 16 * 15 * 127, and four up to 31. Signed
// codes that are small become such, by adding their REACH, which is where a row's sum starts from
// then; of up to 63 two quads fit: 4 * 63 * 127.
#elif defined(__AVX2__)

constexpr bool MEETS_PACKED = false;
// More than 4 rows meet half a tile at a time, or their sums would not fit into the registers.
template <typename Codes>
constexpr bool IS_LARGE = Codes::SIGNED && Codes::REACH == CODE_ZERO;
template <typename Codes> constexpr int MAX_ROWS = IS_LARGE<Codes> ? 8 : 4;

typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));

// Sums of ROWS rows, as two vectors of 8 outputs each. A recursion of single members of the type
// that the addition has, or gcc keeps copies of them and runs out of registers.
template <int ROWS> struct SignedSums {
    i32x8 lo = {}, hi = {};
    SignedSums<ROWS - 1> rest;

    ALWAYS_INLINE void add(const i32x16& size, const i32x16& sign, const int8_t* a) {
        const __m256i inputs = _mm256_set1_epi32(load_quad(a)), ones = _mm256_set1_epi16(1);
        const __m256i first = _mm256_maddubs_epi16(size.lo, _mm256_sign_epi8(inputs, sign.lo));
        const __m256i second = _mm256_maddubs_epi16(size.hi, _mm256_sign_epi8(inputs, sign.hi));
        lo += (i32x8)_mm256_madd_epi16(first, ones);
        hi += (i32x8)_mm256_madd_epi16(second, ones);
        rest.add(size, sign, a + ROW_BYTES);
    }
    ALWAYS_INLINE void get(i32x16* total) const {
        *total = {(__m256i)lo, (__m256i)hi};
        rest.get(total + 1);
    }
};
template <> struct SignedSums<0> {
    void add(const i32x16&, const i32x16&, const int8_t*) {}
    void get(i32x16*) const {}
};

// The same of one half of the outputs, for more rows than have registers for both.
template <int ROWS> struct HalfSums {
    i32x8 sum = {};
    HalfSums<ROWS - 1> rest;

    ALWAYS_INLINE void add(__m256i size, __m256i sign, const int8_t* a) {
        const __m256i inputs = _mm256_sign_epi8(_mm256_set1_epi32(load_quad(a)), sign);
        const __m256i pairs = _mm256_maddubs_epi16(size, inputs);
        sum += (i32x8)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        rest.add(size, sign, a + ROW_BYTES);
    }
    template <__m256i i32x16::*HALF> ALWAYS_INLINE void get(i32x16* total) const {
        total->*HALF = (__m256i)sum;
        rest.template get<HALF>(total + 1);
    }
};
template <> struct HalfSums<0> {
    void add(__m256i, __m256i, const int8_t*) {}
    template <__m256i i32x16::*> void get(i32x16*) const {}
};

inline i32x16 signed_bytes(const uint8_t* codes) {
    return add_bytes(load_bytes(codes), bytes_of(CODE_ZERO));
}

template <__m256i i32x16::*HALF, int ROWS, int COUNT>
ALWAYS_INLINE void exact_half(const uint8_t* codes, const int8_t* a, i32x16* total) {
    HalfSums<ROWS> sums;
    for (int i = 0; i < COUNT; ++i) {
        const __m256i w = signed_bytes(codes + i * TILE_QUAD).*HALF;
        sums.add(_mm256_abs_epi8(w), w, a + i * QUAD);
    }
    sums.template get<HALF>(total);
}

// The same of two, four or eight quads of small codes, as the sums of pairs of inputs.
template <int ROWS> struct PairSums {
    i16x16 lo = {}, hi = {};
    PairSums<ROWS - 1> rest;

    ALWAYS_INLINE void add(const i32x16& w, const int8_t* a) {
        const __m256i inputs = _mm256_set1_epi32(load_quad(a));
        lo += (i16x16)_mm256_maddubs_epi16(w.lo, inputs);
        hi += (i16x16)_mm256_maddubs_epi16(w.hi, inputs);
        asm volatile("" : "+x"(lo), "+x"(hi));  // or gcc loads ahead and runs out of registers
        rest.add(w, a + ROW_BYTES);
    }
    ALWAYS_INLINE void get(i32x16* total) const {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i first = _mm256_madd_epi16((__m256i)lo, ones);
        const __m256i second = _mm256_madd_epi16((__m256i)hi, ones);
        *total = *total + i32x16{first, second};
        rest.get(total + 1);
    }
};
template <> struct PairSums<0> {
    void add(const i32x16&, const int8_t*) {}
    void get(i32x16*) const {}
};

template <int ROWS, typename Codes, int PART>
ALWAYS_INLINE void exact(const Quads& p, i32x16* total) {
    const uint8_t* codes = p.codes + PART * Codes::COUNT * TILE_QUAD;
    if constexpr (IS_LARGE<Codes> && ROWS > 4) {
        exact_half<&i32x16::lo, ROWS, Codes::COUNT>(codes, p.a, total);
        exact_half<&i32x16::hi, ROWS, Codes::COUNT>(codes, p.a, total);
    } else if constexpr (IS_LARGE<Codes>) {
        SignedSums<ROWS> sums;
        for (int i = 0; i < Codes::COUNT; ++i) {
            const i32x16 w = signed_bytes(codes + i * TILE_QUAD);
            const i32x16 size = {_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)};
            sums.add(size, w, p.a + i * QUAD);
        }
        sums.get(total);
    } else {
        constexpr int FIT = Codes::REACH <= 8 ? 8 : Codes::REACH <= 16 ? 4 : 2;
        constexpr int TOGETHER = FIT < Codes::COUNT ? FIT : Codes::COUNT;
        const i32x16 more = bytes_of((Codes::REACH - CODE_ZERO) & 0xff);
        for (int r = 0; r < ROWS; ++r) {
            const int32_t start = p.start[r * ROW_INTS] / CODE_ZERO * Codes::REACH;
            total[r] = splat_i32(Codes::SIGNED ? start : 0);
        }
        for (int begin = 0; begin < Codes::COUNT; begin += TOGETHER) {
            PairSums<ROWS> sums;
#pragma GCC unroll 8
            for (int i = begin; i < begin + TOGETHER; ++i) {
                const i32x16 w = load_bytes(codes + i * TILE_QUAD);
                sums.add(Codes::SIGNED ? add_bytes(w, more) : w, p.a + i * QUAD);
            }
            sums.get(total);
        }
    }
}

// --- the others: signed bytes --------------------------------------------------------------------
// A row's sum is a type of its own, and not of Sums<ROWS>: gcc takes equal members of several ROWS
// for one, and then warns of the array's bounds.
#else

constexpr bool MEETS_PACKED = false;

#if defined(__SSE2__) && !defined(PACELINE_PLAIN)
// Both operands widened to 16 bits, four outputs at a time.
template <typename> constexpr int MAX_ROWS = 4;

struct Wide {
    __m128i lo, hi;
};
inline Wide widen(__m128i bytes) {  // 16 bytes to 16 bits each
    const __m128i sign = _mm_cmpgt_epi8(_mm_setzero_si128(), bytes);
    return {_mm_unpacklo_epi8(bytes, sign), _mm_unpackhi_epi8(bytes, sign)};
}
struct RowSum {
    Wide part[4];  // of four outputs, as the sums of inputs 0-1 and 2-3

    i32x16 get() const {
        i32x16 total;
        for (int i = 0; i < 4; ++i) {
            const __m128 lo = _mm_castsi128_ps(part[i].lo), hi = _mm_castsi128_ps(part[i].hi);
            const __m128i even = _mm_castps_si128(_mm_shuffle_ps(lo, hi, 0x88));
            const __m128i odd = _mm_castps_si128(_mm_shuffle_ps(lo, hi, 0xdd));
            total.q[i] = (i32x4)_mm_add_epi32(even, odd);
        }
        return total;
    }
};
template <int ROWS> struct Sums {
    RowSum rows[ROWS];

    void clear() { std::memset(this, 0, sizeof *this); }
    void add(i32x16 w, const int8_t* a) {
        for (int part = 0; part < 4; ++part) {
            const Wide wide = widen((__m128i)w.q[part]);
            for (int r = 0; r < ROWS; ++r) {
                const __m128i quad = widen(_mm_set1_epi32(load_quad(a + r * ROW_BYTES))).lo;
                Wide& sum = rows[r].part[part];
                sum.lo = _mm_add_epi32(sum.lo, _mm_madd_epi16(wide.lo, quad));
                sum.hi = _mm_add_epi32(sum.hi, _mm_madd_epi16(wide.hi, quad));
            }
        }
    }
};
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(PACELINE_PLAIN)
template <typename> constexpr int MAX_ROWS = 6;

struct RowSum {
    int32x4_t part[4];

    i32x16 get() const {
        i32x16 total;
        for (int i = 0; i < 4; ++i) {
            total.q[i] = (i32x4)part[i];
        }
        return total;
    }
};
template <int ROWS> struct Sums {
    RowSum rows[ROWS];

    void clear() {
        for (int i = 0; i < ROWS * 4; ++i) {
            rows[i / 4].part[i % 4] = vdupq_n_s32(0);
        }
    }
    ALWAYS_INLINE void add(i32x16 w, const int8_t* a) {
        for (int r = 0; r < ROWS; ++r) {
            const int8x16_t quad = vreinterpretq_s8_s32(vdupq_n_s32(load_quad(a + r * ROW_BYTES)));
            for (int part = 0; part < 4; ++part) {
                int32x4_t& sum = rows[r].part[part];
                sum = vdotq_s32(sum, (int8x16_t)w.q[part], quad);
            }
        }
    }
};
#else
template <typename> constexpr int MAX_ROWS = 4;

struct RowSum {
    int32_t outputs[TILE];

    i32x16 get() const { return load_i32(outputs); }
};
template <int ROWS> struct Sums {
    RowSum rows[ROWS];

    void clear() { std::memset(this, 0, sizeof *this); }
    void add(i32x16 w, const int8_t* a) {
        int8_t bytes[TILE_QUAD];
        std::memcpy(bytes, &w, sizeof bytes);
        for (int r = 0; r < ROWS; ++r) {
            for (int output = 0; output < TILE; ++output) {
                for (int i = 0; i < QUAD; ++i) {
                    const int32_t code = bytes[output * QUAD + i];
                    rows[r].outputs[output] += code * a[r * ROW_BYTES + i];
                }
            }
        }
    }
};
#endif

template <int ROWS, typename Codes, int PART>
ALWAYS_INLINE void exact(const Quads& p, i32x16* total) {
    const uint8_t* codes = p.codes + PART * Codes::COUNT * TILE_QUAD;
    Sums<ROWS> sums;
    sums.clear();
    for (int i = 0; i < Codes::COUNT; ++i) {
        const i32x16 w = load_bytes(codes + i * TILE_QUAD);
        sums.add(Codes::SIGNED ? add_bytes(w, bytes_of(CODE_ZERO)) : w, p.a + i * QUAD);
    }
    for (int r = 0; r < ROWS; ++r) {
        total[r] = sums.rows[r].get();
    }
}
#endif

}  // namespace
}  // namespace paceline
