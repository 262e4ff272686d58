// Sixteen float lanes as one value, whatever the instruction set: AVX-512, AVX2 + FMA, or the
// compiler's own vectors (SSE2, NEON, anything). Every kernel is written once, over these, so that
// a row's arithmetic is one fixed program of 16-lane steps. Included once per instruction set, by a
// translation unit with its own compiler flags; everything lives in an unnamed namespace, lest the
// linker mix code of different levels.
//
// `fma` rounds once where the level has the instruction and twice otherwise. Sums over lanes are a
// fixed tree: (i, i+8), (i, i+4), (i, i+2), (i, i+1).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/halves.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__SSE2__) && !defined(PACELINE_PLAIN)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && !defined(PACELINE_PLAIN)
#include <arm_neon.h>
#endif

namespace paceline {
namespace {

constexpr int LANES = 16;

// --- AVX-512 ------------------------------------------------------------------------------------
#if defined(__AVX512F__)

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};
using mask16 = __mmask16;

inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline f32x16 splat(float a) { return {_mm512_set1_ps(a)}; }
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs(f32x16 a) {
    const __m512i bits = _mm512_set1_epi32(0x7fffffff);
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), bits))};
}
inline mask16 less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline mask16 equal(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    return {_mm512_mask_blend_ps(m, no.v, yes.v)};
}
inline mask16 mask_from_bits(uint32_t bits) { return static_cast<mask16>(bits); }
inline uint32_t bits_of(mask16 m) { return m; }

inline i32x16 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i32(int32_t* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
inline i32x16 splat_i32(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline i32x16 operator&(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline i32x16 operator|(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline i32x16 add_bytes(i32x16 a, i32x16 b) { return {_mm512_add_epi8(a.v, b.v)}; }
// Bytes 0..15 of every 16 bytes of `at`, each below 16, looked up in a table of as many.
inline i32x16 look_up(const uint8_t* table, i32x16 at) {
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), at.v)};
}
template <int N> inline i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> inline i32x16 shift_right(i32x16 a) { return {_mm512_srli_epi32(a.v, N)}; }
inline f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline i32x16 round_to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // half to even
inline f32x16 as_float(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline i32x16 as_int(f32x16 a) { return {_mm512_castps_si512(a.v)}; }

inline f32x16 load_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline f32x16 load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 load_i8(const int8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Lanes in -127..127 as bytes.
inline void store_i8(int8_t* p, i32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// --- AVX2 ---------------------------------------------------------------------------------------
#elif defined(__AVX2__)

struct f32x16 {
    __m256 lo, hi;
};
struct i32x16 {
    __m256i lo, hi;
};
struct mask16 {
    __m256 lo, hi;
};

inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline f32x16 splat(float a) {
    const __m256 v = _mm256_set1_ps(a);
    return {v, v};
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 max(f32x16 a, f32x16 b) {  // b where either is NaN
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline f32x16 min(f32x16 a, f32x16 b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline f32x16 abs(f32x16 a) {
    const __m256 bits = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, bits), _mm256_and_ps(a.hi, bits)};
}
inline mask16 less(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline mask16 equal(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
inline mask16 mask_from_bits(uint32_t bits) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 255)), lanes);
    const __m256i hi = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits >> 8)), lanes);
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(lo, lanes)),
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(hi, lanes))};
}
inline uint32_t bits_of(mask16 m) {
    return static_cast<uint32_t>(_mm256_movemask_ps(m.lo)) |
           static_cast<uint32_t>(_mm256_movemask_ps(m.hi)) << 8;
}

inline i32x16 load_i32(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store_i32(int32_t* p, i32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline i32x16 splat_i32(int32_t a) {
    const __m256i v = _mm256_set1_epi32(a);
    return {v, v};
}
inline i32x16 operator+(i32x16 a, i32x16 b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline i32x16 operator-(i32x16 a, i32x16 b) {
    return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
inline i32x16 operator&(i32x16 a, i32x16 b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline i32x16 operator|(i32x16 a, i32x16 b) {
    return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
inline i32x16 add_bytes(i32x16 a, i32x16 b) {
    return {_mm256_add_epi8(a.lo, b.lo), _mm256_add_epi8(a.hi, b.hi)};
}
inline i32x16 look_up(const uint8_t* table, i32x16 at) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    const __m256i entries = _mm256_broadcastsi128_si256(half);
    return {_mm256_shuffle_epi8(entries, at.lo), _mm256_shuffle_epi8(entries, at.hi)};
}
template <int N> inline i32x16 shift_left(i32x16 a) {
    return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N> inline i32x16 shift_right(i32x16 a) {  // zeros follow
    return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
inline f32x16 to_float(i32x16 a) {
    return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
inline i32x16 round_to_int(f32x16 a) {  // half to even
    return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
inline f32x16 as_float(i32x16 a) {
    return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
inline i32x16 as_int(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

inline __m256 load_bf16_half(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline f32x16 load_bf16(const uint16_t* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }
inline __m256 load_f16_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline f32x16 load_f16(const uint16_t* p) { return {load_f16_half(p), load_f16_half(p + 8)}; }
inline i32x16 load_i8(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Lanes in -127..127 as bytes.
inline void store_i8(int8_t* p, i32x16 a) {
    const __m256i words = _mm256_packs_epi32(a.lo, a.hi);  // 0-3, 8-11 | 4-7, 12-15
    const __m256i bytes = _mm256_packs_epi16(words, words);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
    const __m256i sorted = _mm256_permutevar8x32_epi32(bytes, order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(sorted));
}

// --- the compiler's vectors: SSE2, NEON, any other ----------------------------------------------
#else

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

struct f32x16 {
    f32x4 q[4];
};
struct i32x16 {
    i32x4 q[4];
};
using mask16 = i32x16;  // all bits set or none

inline f32x16 load(const float* p) {
    f32x16 a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
inline void store(float* p, f32x16 a) { std::memcpy(p, &a, sizeof a); }
inline f32x16 splat(float a) {
    const f32x4 v = {a, a, a, a};
    return {{v, v, v, v}};
}
inline i32x16 load_i32(const int32_t* p) {
    i32x16 a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
inline void store_i32(int32_t* p, i32x16 a) { std::memcpy(p, &a, sizeof a); }
inline i32x16 splat_i32(int32_t a) {
    const i32x4 v = {a, a, a, a};
    return {{v, v, v, v}};
}

#define PACELINE_EACH(type, expression)        \
    type r;                                    \
    for (int i = 0; i < 4; ++i) {              \
        r.q[i] = expression;                   \
    }                                          \
    return r

inline f32x16 operator+(f32x16 a, f32x16 b) { PACELINE_EACH(f32x16, a.q[i] + b.q[i]); }
inline f32x16 operator-(f32x16 a, f32x16 b) { PACELINE_EACH(f32x16, a.q[i] - b.q[i]); }
inline f32x16 operator*(f32x16 a, f32x16 b) { PACELINE_EACH(f32x16, a.q[i] * b.q[i]); }
inline f32x16 operator/(f32x16 a, f32x16 b) { PACELINE_EACH(f32x16, a.q[i] / b.q[i]); }
inline i32x16 operator+(i32x16 a, i32x16 b) { PACELINE_EACH(i32x16, a.q[i] + b.q[i]); }
inline i32x16 operator-(i32x16 a, i32x16 b) { PACELINE_EACH(i32x16, a.q[i] - b.q[i]); }
inline i32x16 operator&(i32x16 a, i32x16 b) { PACELINE_EACH(i32x16, a.q[i] & b.q[i]); }
inline i32x16 operator|(i32x16 a, i32x16 b) { PACELINE_EACH(i32x16, a.q[i] | b.q[i]); }
typedef uint8_t u8x16 __attribute__((vector_size(16)));
inline i32x16 add_bytes(i32x16 a, i32x16 b) {
    PACELINE_EACH(i32x16, (i32x4)((u8x16)a.q[i] + (u8x16)b.q[i]));
}
inline i32x16 look_up(const uint8_t* table, i32x16 at) {
    uint8_t bytes[64];
    std::memcpy(bytes, &at, sizeof bytes);
    for (uint8_t& each : bytes) {
        each = table[each];
    }
    return load_i32(reinterpret_cast<const int32_t*>(bytes));
}
template <int N> inline i32x16 shift_left(i32x16 a) { PACELINE_EACH(i32x16, a.q[i] << N); }
template <int N> inline i32x16 shift_right(i32x16 a) {  // zeros follow
    PACELINE_EACH(i32x16, (i32x4)((u32x4)a.q[i] >> N));
}
inline f32x16 as_float(i32x16 a) { PACELINE_EACH(f32x16, (f32x4)a.q[i]); }
inline i32x16 as_int(f32x16 a) { PACELINE_EACH(i32x16, (i32x4)a.q[i]); }
inline f32x16 abs(f32x16 a) {
    const i32x4 bits = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff};
    PACELINE_EACH(f32x16, (f32x4)((i32x4)a.q[i] & bits));
}
inline mask16 less(f32x16 a, f32x16 b) { PACELINE_EACH(mask16, a.q[i] < b.q[i]); }
inline mask16 equal(f32x16 a, f32x16 b) { PACELINE_EACH(mask16, a.q[i] == b.q[i]); }
inline f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    PACELINE_EACH(f32x16, (f32x4)((m.q[i] & (i32x4)yes.q[i]) | (~m.q[i] & (i32x4)no.q[i])));
}
inline f32x16 max(f32x16 a, f32x16 b) { return select(less(b, a), a, b); }  // b where either is NaN
inline f32x16 min(f32x16 a, f32x16 b) { return select(less(a, b), a, b); }
inline mask16 mask_from_bits(uint32_t bits) {
    mask16 m;
    for (int i = 0; i < LANES; ++i) {
        m.q[i / 4][i % 4] = -static_cast<int32_t>(bits >> i & 1);
    }
    return m;
}
inline uint32_t bits_of(mask16 m) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) {
        bits |= static_cast<uint32_t>(m.q[i / 4][i % 4] & 1) << i;
    }
    return bits;
}
#if defined(__ARM_NEON) && !defined(PACELINE_PLAIN)
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    PACELINE_EACH(f32x16, (f32x4)vfmaq_f32((float32x4_t)c.q[i], (float32x4_t)a.q[i],
                                           (float32x4_t)b.q[i]));
}
inline i32x16 round_to_int(f32x16 a) {
    PACELINE_EACH(i32x16, (i32x4)vcvtnq_s32_f32((float32x4_t)a.q[i]));
}
inline f32x16 to_float(i32x16 a) { PACELINE_EACH(f32x16, (f32x4)vcvtq_f32_s32((int32x4_t)a.q[i])); }
#elif defined(__SSE2__) && !defined(PACELINE_PLAIN)
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
inline i32x16 round_to_int(f32x16 a) {
    PACELINE_EACH(i32x16, (i32x4)_mm_cvtps_epi32((__m128)a.q[i]));
}
inline f32x16 to_float(i32x16 a) { PACELINE_EACH(f32x16, (f32x4)_mm_cvtepi32_ps((__m128i)a.q[i])); }
#else
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
inline i32x16 round_to_int(f32x16 a) {
    i32x16 r;
    for (int i = 0; i < LANES; ++i) {
        r.q[i / 4][i % 4] = static_cast<int32_t>(__builtin_rintf(a.q[i / 4][i % 4]));
    }
    return r;
}
inline f32x16 to_float(i32x16 a) { PACELINE_EACH(f32x16, __builtin_convertvector(a.q[i], f32x4)); }
#endif
#undef PACELINE_EACH

inline f32x16 load_bf16(const uint16_t* p) {
    int32_t bits[LANES];
    for (int i = 0; i < LANES; ++i) {
        bits[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    }
    return as_float(load_i32(bits));
}
// Of the bits of float16 in each lane. A float32 has the same three fields, its exponent 112 more, or
// 224 of inf and NaN. A subnormal gets a one in front of its mantissa, which is then taken away.
inline f32x16 from_halves(i32x16 halves) {
    constexpr int EXPONENT = 1 << 23;
    f32x16 r;
    for (int i = 0; i < 4; ++i) {
        const i32x4 size = (halves.q[i] & 0x7fff) << 13, sign = (halves.q[i] & 0x8000) << 16;
        const i32x4 special = size >= 31 * EXPONENT, subnormal = size < EXPONENT;
        const i32x4 normal = size + 112 * EXPONENT + (special & 112 * EXPONENT);
        const i32x4 small = (i32x4)((f32x4)(size + 113 * EXPONENT) - 0x1p-14f);
        r.q[i] = (f32x4)((subnormal & small) | (~subnormal & normal) | sign);
    }
    return r;
}
#if defined(__ARM_NEON) && !defined(PACELINE_PLAIN)
inline f32x16 load_f16(const uint16_t* p) {
    f32x16 a;
    for (int i = 0; i < 4; ++i) {
        a.q[i] = (f32x4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    }
    return a;
}
#else
inline f32x16 load_f16(const uint16_t* p) {
    int32_t halves[LANES];
    for (int i = 0; i < LANES; ++i) {
        halves[i] = p[i];
    }
    return from_halves(load_i32(halves));
}
#endif
inline i32x16 load_i8(const int8_t* p) {
    int32_t lanes[LANES];
    for (int i = 0; i < LANES; ++i) {
        lanes[i] = p[i];
    }
    return load_i32(lanes);
}
// Lanes in -127..127 as bytes.
inline void store_i8(int8_t* p, i32x16 a) {
    int32_t lanes[LANES];
    store_i32(lanes, a);
    for (int i = 0; i < LANES; ++i) {
        p[i] = static_cast<int8_t>(lanes[i]);
    }
}
#endif

// --- all levels ---------------------------------------------------------------------------------

inline f32x16 zero() { return splat(0.0f); }
inline int32_t sum_i8(const int8_t* p) {  // of 16 bytes
#if defined(__SSE2__) && !defined(PACELINE_PLAIN)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i raised = _mm_xor_si128(bytes, _mm_set1_epi8(-128));  // each 128 more
    const __m128i halves = _mm_sad_epu8(raised, _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; ++i) {
        total += p[i];
    }
    return total;
#endif
}
inline i32x16 load_u8(const uint8_t* p) {
    return load_i8(reinterpret_cast<const int8_t*>(p)) & splat_i32(255);
}

// The fixed tree of a sum over lanes.
#if defined(__AVX2__) || defined(__AVX512F__)
#if defined(__AVX512F__)
inline __m256 lower(f32x16 a) { return _mm512_castps512_ps256(a.v); }
inline __m256 upper(f32x16 a) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}
#else
inline __m256 lower(f32x16 a) { return a.lo; }
inline __m256 upper(f32x16 a) { return a.hi; }
#endif
inline float sum(f32x16 a) {
    const __m256 eight = _mm256_add_ps(lower(a), upper(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lane(f32x16 a) {  // of two lanes the first where either is NaN
    const __m256 eight = _mm256_max_ps(upper(a), lower(a));
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}
#else
inline float sum(f32x16 a) {
    alignas(64) float lane[LANES];
    store(lane, a);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            lane[i] += lane[i + half];
        }
    }
    return lane[0];
}

inline float max_lane(f32x16 a) {
    alignas(64) float lane[LANES];
    store(lane, a);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            lane[i] = lane[i] < lane[i + half] ? lane[i + half] : lane[i];
        }
    }
    return lane[0];
}
#endif

inline void store_bf16(uint16_t* p, f32x16 a) {  // as to_bf16
    int32_t lane[LANES];
    if (bits_of(equal(a, a)) == 0xffff) {
        const i32x16 bits = as_int(a);
        const i32x16 odd = shift_right<16>(bits) & splat_i32(1);
        store_i32(lane, shift_right<16>(bits + splat_i32(0x7fff) + odd));
    } else {
        float value[LANES];
        store(value, a);
        for (int i = 0; i < LANES; ++i) {
            lane[i] = to_bf16(value[i]);
        }
    }
    for (int i = 0; i < LANES; ++i) {
        p[i] = static_cast<uint16_t>(lane[i]);
    }
}

// To nearest, half to even; a finite number beyond the largest becomes that, a NaN or inf stays one.
inline void store_f16(uint16_t* p, f32x16 a) {
    const f32x16 most = splat(65504.0f);
    const f32x16 bounded = min(max(a, zero() - most), most);
    const f32x16 x = select(less(abs(a), splat(__builtin_inff())), bounded, a);
#if defined(__AVX2__) || defined(__AVX512F__)
    __m128i* to = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(to, _mm256_cvtps_ph(lower(x), _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(to + 1, _mm256_cvtps_ph(upper(x), _MM_FROUND_TO_NEAREST_INT));
#else
    float lane[LANES];
    store(lane, x);
    for (int i = 0; i < LANES; ++i) {
        p[i] = f32_to_f16(lane[i]);
    }
#endif
}

}  // namespace
}  // namespace paceline
