// The W8A8 linear of one level. `dot` is the only part that knows the instruction set: the exact
// products of up to MAX_ROWS rows with one tile. Integers make the sums independent of their order;
// what is done to them in float is one fixed program per element, in `finish`.
namespace paceline {
namespace {

constexpr int TILE_QUAD = TILE * QUAD;         // bytes of one quad of inputs of a tile
constexpr int PREFETCH_BYTES = 32 * TILE_QUAD;  // how far ahead of the first pass over a tile

// A stretch of one tile's inputs and the rows that meet it.
struct Int8Piece {
    const int8_t* w;      // [quads, 16, 4]
    const int8_t* a;      // first row's inputs
    ptrdiff_t stride;     // from row to row
    int quads;            // a multiple of 8
    bool first;           // the first rows to meet the tile: its weights come from memory
    const int32_t* sums;  // [rows] sum of each row's inputs; only where SUMS_NEEDED
};

// Loops over rows live in registers only if what they call is part of them.
#define ALWAYS_INLINE inline __attribute__((always_inline))

inline int32_t load_quad(const int8_t* a) {
    int32_t quad;
    std::memcpy(&quad, a, sizeof quad);
    return quad;
}

// --- AVX-512 VNNI -------------------------------------------------------------------------------
// The instruction wants one unsigned operand: weights + 128, made once per vector for all rows. The
// excess of 128 times the sum of a row's inputs is where that row's sum starts from.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)

constexpr int MAX_ROWS = 12;
constexpr bool SUMS_NEEDED = true;
struct TileShared {};

template <int ROWS> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
    constexpr int CHAINS = ROWS >= 8 ? 1 : ROWS >= 4 ? 2 : 4;  // to cover the latency
    const __m512i flip = _mm512_set1_epi8(-128);
    __m512i acc[ROWS][CHAINS];
    for (int r = 0; r < ROWS; ++r) {
        acc[r][0] = _mm512_set1_epi32(-128 * p.sums[r]);
        for (int c = 1; c < CHAINS; ++c) {
            acc[r][c] = _mm512_setzero_si512();
        }
    }
    for (int quad = 0; quad < p.quads; quad += CHAINS) {
        for (int c = 0; c < CHAINS; ++c) {
            const int8_t* at = p.w + ptrdiff_t(quad + c) * TILE_QUAD;
            if (p.first) {
                __builtin_prefetch(at + PREFETCH_BYTES);
            }
            const __m512i w = _mm512_xor_si512(_mm512_loadu_si512(at), flip);
            for (int r = 0; r < ROWS; ++r) {
                const int32_t a = load_quad(p.a + r * p.stride + (quad + c) * QUAD);
                acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], w, _mm512_set1_epi32(a));
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        total[r] = {acc[r][0]};
        for (int c = 1; c < CHAINS; ++c) {
            total[r] = total[r] + i32x16{acc[r][c]};
        }
    }
}

// --- AVX-VNNI -----------------------------------------------------------------------------------
#elif defined(__AVXVNNI__)

constexpr int MAX_ROWS = 6;
constexpr bool SUMS_NEEDED = true;
struct TileShared {};

template <int ROWS> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
    constexpr int CHAINS = ROWS >= 3 ? 1 : 2;
    const __m256i flip = _mm256_set1_epi8(-128);
    i32x16 acc[ROWS][CHAINS];
    for (int r = 0; r < ROWS; ++r) {
        acc[r][0] = splat_i32(-128 * p.sums[r]);
        for (int c = 1; c < CHAINS; ++c) {
            acc[r][c] = splat_i32(0);
        }
    }
    for (int quad = 0; quad < p.quads; quad += CHAINS) {
        for (int c = 0; c < CHAINS; ++c) {
            const __m256i* at =
                reinterpret_cast<const __m256i*>(p.w + ptrdiff_t(quad + c) * TILE_QUAD);
            if (p.first) {
                __builtin_prefetch(reinterpret_cast<const int8_t*>(at) + PREFETCH_BYTES);
            }
            const __m256i lo = _mm256_xor_si256(_mm256_loadu_si256(at), flip);
            const __m256i hi = _mm256_xor_si256(_mm256_loadu_si256(at + 1), flip);
            for (int r = 0; r < ROWS; ++r) {
                const __m256i a =
                    _mm256_set1_epi32(load_quad(p.a + r * p.stride + (quad + c) * QUAD));
                acc[r][c].lo = _mm256_dpbusd_avx_epi32(acc[r][c].lo, lo, a);
                acc[r][c].hi = _mm256_dpbusd_avx_epi32(acc[r][c].hi, hi, a);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        total[r] = CHAINS == 1 ? acc[r][0] : acc[r][0] + acc[r][CHAINS - 1];
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
constexpr bool SUMS_NEEDED = false;
struct TileShared {
    i32x16 excess;
};
constexpr int EXCESS_QUADS = 128;  // 128 * 2 * 127 still fits 16 bits
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

// Adds the products of `quads` quads to `total`; for the first rows to meet the tile, where quads is
// at most EXCESS_QUADS, also the negated excess of the weights to `excess`.
template <int ROWS, Meet MEET>
ALWAYS_INLINE void dot_quads(const Int8Piece& p, int begin, int quads, i32x16* excess,
                             i32x16* total) {
    constexpr bool ALONE = MEET == Meet::alone;
    const int8_t *w = p.w + ptrdiff_t(begin) * TILE_QUAD, *a = p.a + begin * QUAD;
    const __m256i none = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    RowSums<ROWS, ALONE> sums;
    i16x16 excess_lo = {}, excess_hi = {};
    for (int quad = 0; quad < quads; ++quad, w += TILE_QUAD, a += QUAD) {
        const i32x16 bytes = load_i32(reinterpret_cast<const int32_t*>(w));
        const i32x16 size = {_mm256_abs_epi8(bytes.lo), _mm256_abs_epi8(bytes.hi)};
        const i32x16 below = {_mm256_cmpgt_epi8(none, bytes.lo), _mm256_cmpgt_epi8(none, bytes.hi)};
        if (MEET != Meet::later) {
            __builtin_prefetch(w + PREFETCH_BYTES);
        }
        if (MEET == Meet::first) {
            excess_lo += (i16x16)_mm256_maddubs_epi16(size.lo, below.lo);
            excess_hi += (i16x16)_mm256_maddubs_epi16(size.hi, below.hi);
        }
        sums.add(size, ALONE ? bytes : below, a, p.stride);
    }
    sums.get(total);
    if (MEET == Meet::first) {
        *excess = *excess + i32x16{_mm256_madd_epi16((__m256i)excess_lo, ones),
                                   _mm256_madd_epi16((__m256i)excess_hi, ones)};
    }
}

// Rows that share the excess of a tile's weights.
template <int ROWS, Meet MEET>
inline void dot_shared(const Int8Piece& p, i32x16& excess, i32x16* total) {
    if (MEET == Meet::first) {
        excess = splat_i32(0);
    }
    for (int at = 0; at < p.quads; at += EXCESS_QUADS) {
        const int quads = p.quads - at < EXCESS_QUADS ? p.quads - at : EXCESS_QUADS;
        dot_quads<ROWS, MEET>(p, at, quads, &excess, total);
    }
    for (int r = 0; r < ROWS; ++r) {
        total[r] = total[r] - excess;
    }
}

template <int ROWS> inline void dot(const Int8Piece& p, TileShared* shared, i32x16* total) {
    for (int r = 0; r < ROWS; ++r) {
        total[r] = splat_i32(0);
    }
    if (!shared) {
        dot_quads<ROWS, Meet::alone>(p, 0, p.quads, nullptr, total);
    } else if (p.first) {
        dot_shared<ROWS, Meet::first>(p, shared->excess, total);
    } else {
        dot_shared<ROWS, Meet::later>(p, shared->excess, total);
    }
}

// --- SSE2 ---------------------------------------------------------------------------------------
// Both operands widened to 16 bits, four outputs at a time.
#elif defined(__SSE2__) && !defined(PACELINE_PLAIN)

constexpr int MAX_ROWS = 4;
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

template <int ROWS> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
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
constexpr bool SUMS_NEEDED = false;
struct TileShared {};

template <int ROWS> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
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
constexpr bool SUMS_NEEDED = false;
struct TileShared {};

template <int ROWS> inline void dot(const Int8Piece& p, TileShared*, i32x16* total) {
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

// Bias, alpha and residual, in this order, of one row's 16 outputs from `column` on; the outputs
// past the last real one go through a copy.
inline void finish(f32x16 y, const float* bias, const LinearOut& out, int row, int column, int n) {
    if (bias) {
        y = y + load(bias + column);
    }
    if (out.alpha != 1.0f) {
        y = y * splat(out.alpha);
    }
    const ptrdiff_t at = ptrdiff_t(row) * out.ld + column;
    if (n - column >= TILE) {
        if (out.residual) {
            y = y + load(out.residual + at);
        }
        store(out.y + at, y);
        return;
    }
    const size_t bytes = size_t(n - column) * sizeof(float);
    float lane[TILE] = {};
    if (out.residual) {
        std::memcpy(lane, out.residual + at, bytes);
        y = y + load(lane);
    }
    store(lane, y);
    std::memcpy(out.y + at, lane, bytes);
}

struct Int8Call {
    const QuantRows& x;
    const Int8Weights& w;
    const LinearOut& out;
    int quads;  // of a row
};

// Sum of a row's inputs from `begin` on, `quads` of them; a multiple of GROUP unless all are meant.
inline int32_t input_sum(const Int8Call& call, int row, int begin, int quads) {
    if (quads == call.quads) {
        return call.x.row_sums[row];
    }
    constexpr int GROUP_QUADS = GROUP / QUAD;
    const int32_t* sums = call.x.group_sums + ptrdiff_t(row) * (call.x.stride / GROUP);
    int32_t sum = 0;
    for (int group = begin / GROUP_QUADS; group < (begin + quads) / GROUP_QUADS; ++group) {
        sum += sums[group];
    }
    return sum;
}

template <int ROWS>
void int8_products(const Int8Call& call, int tile, int row, int quad, int quads, bool first,
                   TileShared* shared, i32x16* total) {
    int32_t sums[ROWS] = {};
    if (SUMS_NEEDED) {
        for (int r = 0; r < ROWS; ++r) {
            sums[r] = input_sum(call, row + r, quad, quads);
        }
    }
    const int8_t* w = call.w.data + (ptrdiff_t(tile) * call.quads + quad) * TILE_QUAD;
    const int8_t* a = call.x.q + ptrdiff_t(row) * call.x.stride + quad * QUAD;
    dot<ROWS>({w, a, call.x.stride, quads, first, sums}, shared, total);
}

template <int ROWS>
void int8_block(const Int8Call& call, int tile, int row, TileShared* shared) {
    const QuantRows& x = call.x;
    i32x16 total[ROWS];
    f32x16 y[ROWS];
    if (x.scale_groups == 1) {
        int8_products<ROWS>(call, tile, row, 0, call.quads, row == 0, shared, total);
        for (int r = 0; r < ROWS; ++r) {
            y[r] = to_float(total[r]) * splat(x.scale[row + r]);
        }
    } else {
        constexpr int STEP = SCALE_GROUP / QUAD;
        for (int r = 0; r < ROWS; ++r) {
            y[r] = zero();
        }
        for (int group = 0; group < x.scale_groups; ++group) {
            const int rest = call.quads - group * STEP;
            int8_products<ROWS>(call, tile, row, group * STEP, rest < STEP ? rest : STEP,
                                row == 0, nullptr, total);  // shared is only what all inputs make
            for (int r = 0; r < ROWS; ++r) {
                const float scale = x.scale[ptrdiff_t(row + r) * x.scale_groups + group];
                y[r] = fma(to_float(total[r]), splat(scale), y[r]);
            }
        }
    }
    const f32x16 scale = load(call.w.scale + tile * TILE);
    for (int r = 0; r < ROWS; ++r) {
        finish(y[r] * scale, call.w.bias, call.out, row + r, tile * TILE, call.w.n);
    }
}

template <int ROWS>
inline void int8_rows(int rows, const Int8Call& call, int tile, int row, TileShared* shared) {
    if (rows == ROWS) {
        int8_block<ROWS>(call, tile, row, shared);
    } else if constexpr (ROWS > 1) {
        int8_rows<ROWS - 1>(rows, call, tile, row, shared);
    }
}

constexpr int FEW_BLOCKS = 2;  // of rows, for which what they could share is not worth making

void linear_int8(const QuantRows& x, const Int8Weights& w, const LinearOut& out, int tile_begin,
                 int tile_end) {
    const Int8Call call = {x, w, out, round_up(w.k, K_MULTIPLE) / QUAD};
    const int blocks = (x.rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        TileShared shared = {};
        int row = 0;
        for (int block = 0; block < blocks; ++block) {  // of sizes as even as can be
            const int rows = (x.rows - row) / (blocks - block);
            int8_rows<MAX_ROWS>(rows, call, tile, row, blocks > FEW_BLOCKS ? &shared : nullptr);
            row += rows;
        }
    }
}

}  // namespace
}  // namespace paceline
