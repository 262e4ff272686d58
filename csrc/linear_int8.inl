// The W8A8 linear of one level. `dot` is the only part that knows the instruction set: the exact
// products of up to MAX_ROWS rows with one tile. Integers make the sums independent of their order;
// what is done to them in float is one fixed program per element, in `finish`.
namespace paceline {
namespace {

// A stretch of the inputs of one tile, or of tiles that follow each other, and the rows that meet it.
struct Int8Piece {
    const int8_t* w;       // the first tile's [quads, 16, 4]
    ptrdiff_t tile_bytes;  // from tile to tile
    const int8_t* a;       // first row's inputs
    ptrdiff_t stride;      // from row to row
    int quads;             // a multiple of 8
    bool first;            // the first rows to meet the tile
    Ahead ahead;           // of the first tile; the others' lie tile_bytes on
    const int32_t* sums;   // sum of the first row's inputs; read only where SUMS_NEEDED
    int sums_stride;       // from row to row
};

// `dot` makes the exact products of ROWS rows with TILES tiles, at most MAX_ROWS and MAX_TILES of
// them: total[row * TILES + tile].

// --- AVX-512 VNNI, AVX-VNNI ---------------------------------------------------------------------
// The instruction wants one unsigned operand: weights + 128, made once per vector for all rows. The
// excess of 128 times the sum of a row's inputs is where that row's sum starts from.
#if (defined(__AVX512VNNI__) && defined(__AVX512F__)) || defined(__AVXVNNI__)
#define HAS_VNNI

// Adds the products of the unsigned bytes of w and the signed ones of a. Assembly, since gcc copies
// the accumulators of the intrinsics and runs out of registers.
#if defined(__AVX512VNNI__)
constexpr int MAX_ROWS = 12;
constexpr int MAX_TILES = 2;
constexpr int VECTORS = 1;  // of a tile's sums

ALWAYS_INLINE void add_products(i32x16& total, i32x16 w, i32x16 a) {
#if defined(PACELINE_EMULATED)
    total.v = _mm512_dpbusd_epi32(total.v, w.v, a.v);
#else
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(total.v) : "v"(w.v), "v"(a.v));
#endif
}
ALWAYS_INLINE i32x16 flip_signs(i32x16 w) {
    return {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))};
}
#else
constexpr int MAX_ROWS = 6;
constexpr int MAX_TILES = 1;
constexpr int VECTORS = 2;

ALWAYS_INLINE void add_products(i32x16& total, i32x16 w, i32x16 a) {
#if defined(PACELINE_EMULATED)
    total.lo = _mm256_dpbusd_avx_epi32(total.lo, w.lo, a.lo);
    total.hi = _mm256_dpbusd_avx_epi32(total.hi, w.hi, a.hi);
#else
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total.lo) : "x"(w.lo), "x"(a.lo));
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total.hi) : "x"(w.hi), "x"(a.hi));
#endif
}
ALWAYS_INLINE i32x16 flip_signs(i32x16 w) {
    const __m256i flip = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(w.lo, flip), _mm256_xor_si256(w.hi, flip)};
}
#endif

constexpr bool SUMS_NEEDED = true;
struct TileShared {};

template <int ROWS, int TILES> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
    constexpr int SUMS = ROWS * TILES * VECTORS;
    constexpr int CHAINS = SUMS >= 8 ? 1 : SUMS >= 6 ? 2 : 4;  // to cover the latency
    i32x16 acc[ROWS][TILES][CHAINS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < TILES; ++t) {
            acc[r][t][0] = splat_i32(-128 * p.sums[r * p.sums_stride]);
#pragma GCC unroll 16
            for (int c = 1; c < CHAINS; ++c) {
                acc[r][t][c] = splat_i32(0);
            }
        }
    }
    for (int quad = 0; quad < p.quads; quad += CHAINS) {
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; ++c) {
            i32x16 w[TILES];
#pragma GCC unroll 16
            for (int t = 0; t < TILES; ++t) {
                const int8_t* at = p.w + t * p.tile_bytes + ptrdiff_t(quad + c) * TILE_QUAD;
                p.ahead.fetch(quad + c, t * p.tile_bytes);
                w[t] = flip_signs(load_i32(reinterpret_cast<const int32_t*>(at)));
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const i32x16 a = splat_i32(load_quad(p.a + r * p.stride + (quad + c) * QUAD));
#pragma GCC unroll 16
                for (int t = 0; t < TILES; ++t) {
                    add_products(acc[r][t][c], w[t], a);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < TILES; ++t) {
            i32x16& sum = total[r * TILES + t] = acc[r][t][0];
#pragma GCC unroll 16
            for (int c = 1; c < CHAINS; ++c) {
                sum = sum + acc[r][t][c];
            }
        }
    }
}

// --- AVX2 ---------------------------------------------------------------------------------------
// |w| is the unsigned operand, and the inputs take over the signs of the weights. For few rows
// vpsignb does that. For many it is `a ^ m`, where m is -1 below zero, which is a or -a - 1: an
// exclusive or runs on every vector unit, vpsignb on half of them, and the excess of -|w| per
// negative weight is the same for all rows, so the first ones to meet a tile sum it up. vpmaddubsw
// cannot saturate: |w| is within 127 and a ^ m within 128, and 2 * 127 * 128 = 32512 is below 32768.
#elif defined(__AVX2__)

constexpr int MAX_ROWS = 4;  // 8 rows of half a tile load twice the inputs and are slower
constexpr int MAX_TILES = 1;
constexpr bool SUMS_NEEDED = false;
struct TileShared {
    i32x16 excess;
};
enum class Meet { alone, first, later };  // without excess; summing it up; knowing it

// Sums of ROWS rows, as two vectors of 8 outputs each. A recursion of single members of the type
// that the addition has, or gcc keeps copies of them and runs out of registers.
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
template <int ROWS, bool ALONE> struct RowSums {
    i32x8 lo = {}, hi = {};
    RowSums<ROWS - 1, ALONE> rest;

    static ALWAYS_INLINE __m256i signed_like(__m256i a, __m256i sign) {
        return ALONE ? _mm256_sign_epi8(a, sign) : _mm256_xor_si256(a, sign);
    }
    ALWAYS_INLINE void add(const i32x16& size, const i32x16& sign, const int8_t* a,
                           ptrdiff_t stride) {
        const __m256i inputs = _mm256_set1_epi32(load_quad(a)), ones = _mm256_set1_epi16(1);
        const __m256i first = _mm256_maddubs_epi16(size.lo, signed_like(inputs, sign.lo));
        const __m256i second = _mm256_maddubs_epi16(size.hi, signed_like(inputs, sign.hi));
        lo += (i32x8)_mm256_madd_epi16(first, ones);
        hi += (i32x8)_mm256_madd_epi16(second, ones);
        rest.add(size, sign, a + stride, stride);
    }
    ALWAYS_INLINE void get(i32x16* total) const {
        *total = *total + i32x16{(__m256i)lo, (__m256i)hi};
        rest.get(total + 1);
    }
};
template <bool ALONE> struct RowSums<0, ALONE> {
    void add(const i32x16&, const i32x16&, const int8_t*, ptrdiff_t) {}
    void get(i32x16*) const {}
};

// Adds the products to `total`; for the first rows to meet the weights also finds their negated
// excess, of which 32 quads fit 16 bits: 32 * 2 * 127.
template <int ROWS, Meet MEET>
ALWAYS_INLINE void dot_quads(const Int8Piece& p, i32x16* excess, i32x16* total) {
    static_assert(SCALE_GROUP / QUAD <= 32, "the excess of a piece may not fit 16 bits");
    constexpr bool ALONE = MEET == Meet::alone;
    const int8_t *w = p.w, *a = p.a;
    const __m256i none = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    RowSums<ROWS, ALONE> sums;
    i16x16 excess_lo = {}, excess_hi = {};
    for (int quad = 0; quad < p.quads; ++quad, w += TILE_QUAD, a += QUAD) {
        const i32x16 bytes = load_i32(reinterpret_cast<const int32_t*>(w));
        const i32x16 size = {_mm256_abs_epi8(bytes.lo), _mm256_abs_epi8(bytes.hi)};
        const i32x16 below = {_mm256_cmpgt_epi8(none, bytes.lo), _mm256_cmpgt_epi8(none, bytes.hi)};
        p.ahead.fetch(quad);
        if (MEET == Meet::first) {
            excess_lo += (i16x16)_mm256_maddubs_epi16(size.lo, below.lo);
            excess_hi += (i16x16)_mm256_maddubs_epi16(size.hi, below.hi);
        }
        sums.add(size, ALONE ? bytes : below, a, p.stride);
    }
    sums.get(total);
    if (MEET == Meet::first) {
        *excess = {_mm256_madd_epi16((__m256i)excess_lo, ones),
                   _mm256_madd_epi16((__m256i)excess_hi, ones)};
    }
    for (int r = 0; !ALONE && r < ROWS; ++r) {
        total[r] = total[r] - *excess;
    }
}

template <int ROWS, int TILES> inline void dot(const Int8Piece& p, TileShared* shared, i32x16* total) {
    for (int r = 0; r < ROWS; ++r) {
        total[r] = splat_i32(0);
    }
    if (!shared) {
        dot_quads<ROWS, Meet::alone>(p, nullptr, total);
    } else if (p.first) {
        dot_quads<ROWS, Meet::first>(p, &shared->excess, total);
    } else {
        dot_quads<ROWS, Meet::later>(p, &shared->excess, total);
    }
}

// --- SSE2 ---------------------------------------------------------------------------------------
// Both operands widened to 16 bits, four outputs at a time.
#elif defined(__SSE2__) && !defined(PACELINE_PLAIN)

constexpr int MAX_ROWS = 4;
constexpr int MAX_TILES = 1;
constexpr bool SUMS_NEEDED = false;
struct TileShared {};

struct Wide {
    __m128i lo, hi;
};
inline Wide widen(const int8_t* p) {  // 16 bytes to 16 bits each
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i sign = _mm_cmpgt_epi8(_mm_setzero_si128(), bytes);
    return {_mm_unpacklo_epi8(bytes, sign), _mm_unpackhi_epi8(bytes, sign)};
}

template <int ROWS, int TILES> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
    for (int part = 0; part < 4; ++part) {
        Wide acc[ROWS];  // two outputs each, as the sums of inputs 0-1 and 2-3 of all quads
        for (Wide& each : acc) {
            each = {_mm_setzero_si128(), _mm_setzero_si128()};
        }
        for (int quad = 0; quad < p.quads; quad += 4) {
            Wide w[4];
            for (int i = 0; i < 4; ++i) {
                w[i] = widen(p.w + ptrdiff_t(quad + i) * TILE_QUAD + part * 16);
            }
            for (int r = 0; r < ROWS; ++r) {
                const Wide a = widen(p.a + r * p.stride + quad * QUAD);
                const __m128i quads[4] = {
                    _mm_unpacklo_epi64(a.lo, a.lo), _mm_unpackhi_epi64(a.lo, a.lo),
                    _mm_unpacklo_epi64(a.hi, a.hi), _mm_unpackhi_epi64(a.hi, a.hi)};
                for (int i = 0; i < 4; ++i) {
                    acc[r].lo = _mm_add_epi32(acc[r].lo, _mm_madd_epi16(w[i].lo, quads[i]));
                    acc[r].hi = _mm_add_epi32(acc[r].hi, _mm_madd_epi16(w[i].hi, quads[i]));
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            const __m128 lo = _mm_castsi128_ps(acc[r].lo), hi = _mm_castsi128_ps(acc[r].hi);
            const __m128i even = _mm_castps_si128(_mm_shuffle_ps(lo, hi, 0x88));
            const __m128i odd = _mm_castps_si128(_mm_shuffle_ps(lo, hi, 0xdd));
            total[r].q[part] = (i32x4)_mm_add_epi32(even, odd);
        }
    }
}

// --- NEON with dot products ---------------------------------------------------------------------
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(PACELINE_PLAIN)

constexpr int MAX_ROWS = 6;
constexpr int MAX_TILES = 1;
constexpr bool SUMS_NEEDED = false;
struct TileShared {};

template <int ROWS, int TILES> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
    int32x4_t acc[ROWS][4];
    for (int r = 0; r < ROWS; ++r) {
        for (int part = 0; part < 4; ++part) {
            acc[r][part] = vdupq_n_s32(0);
        }
    }
    for (int quad = 0; quad < p.quads; ++quad) {
        const int8_t* at = p.w + ptrdiff_t(quad) * TILE_QUAD;
        int8x16_t w[4];
        for (int part = 0; part < 4; ++part) {
            w[part] = vld1q_s8(at + part * 16);
        }
        for (int r = 0; r < ROWS; ++r) {
            const int32x4_t quads = vdupq_n_s32(load_quad(p.a + r * p.stride + quad * QUAD));
            const int8x16_t a = vreinterpretq_s8_s32(quads);
            for (int part = 0; part < 4; ++part) {
                acc[r][part] = vdotq_s32(acc[r][part], w[part], a);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int part = 0; part < 4; ++part) {
            total[r].q[part] = (i32x4)acc[r][part];
        }
    }
}

// --- plain --------------------------------------------------------------------------------------
#else

constexpr int MAX_ROWS = 4;
constexpr int MAX_TILES = 1;
constexpr bool SUMS_NEEDED = false;
struct TileShared {};

template <int ROWS, int TILES> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
    int32_t acc[ROWS][TILE] = {};
    for (int quad = 0; quad < p.quads; ++quad) {
        const int8_t* w = p.w + ptrdiff_t(quad) * TILE_QUAD;
        for (int r = 0; r < ROWS; ++r) {
            const int8_t* a = p.a + r * p.stride + quad * QUAD;
            for (int output = 0; output < TILE; ++output) {
                for (int i = 0; i < QUAD; ++i) {
                    acc[r][output] += int32_t(w[output * QUAD + i]) * a[i];
                }
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        total[r] = load_i32(acc[r]);
    }
}
#endif

// --- all levels ---------------------------------------------------------------------------------

struct Int8Call {
    const QuantRows& x;
    const Int8Weights& w;
    const LinearOut& out;
    int quads;  // of a row

    ptrdiff_t tile_bytes() const { return ptrdiff_t(quads) * TILE_QUAD; }
    const int8_t* tile(int index) const { return w.data + index * tile_bytes(); }
};

// One scale group's products of ROWS rows with TILES tiles.
template <int ROWS, int TILES>
ALWAYS_INLINE void int8_products(const Int8Call& call, int tile, int row, int group, Ahead ahead,
                                 TileShared* shared, i32x16* total) {
    constexpr int STEP = SCALE_GROUP / QUAD;
    const QuantRows& x = call.x;
    const int quad = group * STEP, rest = call.quads - quad;
    const int8_t* w = call.tile(tile) + ptrdiff_t(quad) * TILE_QUAD;
    const int8_t* a = x.q + ptrdiff_t(row) * x.stride + quad * QUAD;
    const int32_t* sums = x.scale_sums + ptrdiff_t(row) * x.scale_groups + group;
    ahead.at += quad * ahead.step;
    dot<ROWS, TILES>({w, call.tile_bytes(), a, x.stride, rest < STEP ? rest : STEP, row == 0, ahead,
                      sums, x.scale_groups}, shared, total);
}

template <int ROWS, int TILES>
void int8_block(const Int8Call& call, int tile, int row, Ahead ahead, TileShared* shared) {
    const QuantRows& x = call.x;
    f32x16 y[ROWS * TILES];
    for (f32x16& each : y) {
        each = zero();
    }
    for (int t = 0; t < TILES; ++t) {
        __builtin_prefetch(call.w.scale + (tile + t) * TILE);
        fetch_outputs(call.out, row, ROWS, (tile + t) * TILE);
    }
    for (int group = 0; group < x.scale_groups; ++group) {
        i32x16 total[ROWS * TILES];
        int8_products<ROWS, TILES>(call, tile, row, group, ahead, shared ? shared + group : nullptr,
                                   total);
        for (int i = 0; i < ROWS * TILES; ++i) {
            const float scale = x.scale[ptrdiff_t(row + i / TILES) * x.scale_groups + group];
            y[i] = fma(to_float(total[i]), splat(scale), y[i]);
        }
    }
    for (int t = 0; t < TILES; ++t) {
        const f32x16 scale = load(call.w.scale + (tile + t) * TILE);
        for (int r = 0; r < ROWS; ++r) {
            finish(y[r * TILES + t] * scale, call.w.bias, call.out, row + r, (tile + t) * TILE,
                   call.w.n);
        }
    }
}

constexpr int FEW_BLOCKS = 2;  // of rows, for which what they could share is not worth making
constexpr int MOST_SHARED = 256;  // scale groups; with more inputs every block is on its own

void linear_int8(const QuantRows& x, const Int8Weights& w, const LinearOut& out, int tile_begin,
                 int tile_end) {
    const Int8Call call = {x, w, out, round_up(w.k, K_MULTIPLE) / QUAD};
    each_tile<MAX_TILES>(tile_begin, tile_end, x.rows > MAX_ROWS, [&](int tile, auto tiles) {
        const Reading reading =
            reading_of(call, tile, tiles(), tile_begin, tile_end, call.quads);
        TileShared shared[MOST_SHARED];
        const bool worth = x.rows > FEW_BLOCKS * MAX_ROWS && x.scale_groups <= MOST_SHARED;
        TileShared* share = worth ? shared : nullptr;
        each_block<MAX_ROWS>(0, x.rows, reading, [&](int row, auto rows, Ahead ahead) {
            int8_block<rows(), tiles()>(call, tile, row, ahead, share);
        });
    });
}

}  // namespace
}  // namespace paceline
