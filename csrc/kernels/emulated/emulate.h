// The instructions of levels that this CPU lacks, by SIMDe (Debian: libsimde-dev): for tests of
// those levels, never for use. The compiler's command line includes this before everything else and
// says which level is meant by EMULATE_AVX512 (and EMULATE_AMX), EMULATE_AVXVNNI or EMULATE_NEON. The levels' macros
// are defined after SIMDe has been read, lest it take the instructions for real.
#pragma once

#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#if defined(EMULATE_NEON)

#include <simde/arm/neon.h>

inline int32x4_t emulated_vcvtnq_s32_f32(float32x4_t a) {
    __m128 lanes;
    __builtin_memcpy(&lanes, &a, sizeof lanes);
    const __m128i rounded = _mm_cvtps_epi32(lanes);
    int32x4_t result;
    __builtin_memcpy(&result, &rounded, sizeof result);
    return result;
}
#define vcvtnq_s32_f32 emulated_vcvtnq_s32_f32

#undef __SSE2__  // which would be preferred
#define __ARM_NEON 1
#define __ARM_FEATURE_DOTPROD 1

#else

#include <simde/x86/avx512.h>
#if defined(EMULATE_AVX512)

// What SIMDe does not have, by halves.
inline __m256i emulated_half(__m512i a, int half) {
    __m256i halves[2];
    __builtin_memcpy(halves, &a, sizeof halves);
    return halves[half];
}
template <typename Wide, typename Half> inline Wide emulated_join(Half lo, Half hi) {
    const Half halves[2] = {lo, hi};
    Wide wide;
    __builtin_memcpy(&wide, halves, sizeof wide);
    return wide;
}
inline __m512 emulated_cvtepi32_ps(__m512i a) {
    return emulated_join<__m512>(_mm256_cvtepi32_ps(emulated_half(a, 0)),
                                 _mm256_cvtepi32_ps(emulated_half(a, 1)));
}
inline __m512i emulated_cvtps_epi32(__m512 a) {
    __m256 halves[2];
    __builtin_memcpy(halves, &a, sizeof halves);
    return emulated_join<__m512i>(_mm256_cvtps_epi32(halves[0]), _mm256_cvtps_epi32(halves[1]));
}
inline __m512d emulated_cvtps_pd(__m256 a) {
    return emulated_join<__m512d>(_mm256_cvtps_pd(_mm256_castps256_ps128(a)),
                                  _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
}
inline float emulated_reduce_max_ps(__m512 a) {
    float lanes[16], most;
    __builtin_memcpy(lanes, &a, sizeof lanes);
    most = lanes[0];
    for (float each : lanes) {
        most = each > most ? each : most;
    }
    return most;
}
inline __m512 emulated_cvtph_ps(__m256i a) {
    return emulated_join<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                                 _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
inline __m512i emulated_cvtepu16_epi32(__m256i a) {
    return emulated_join<__m512i>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                                  _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
inline __m128i emulated_cvtepi32_epi8(__m512i a) {
    int lanes[16];
    signed char bytes[16];
    __builtin_memcpy(lanes, &a, sizeof lanes);
    for (int i = 0; i < 16; ++i) {
        bytes[i] = static_cast<signed char>(lanes[i]);
    }
    __m128i packed;
    __builtin_memcpy(&packed, bytes, sizeof packed);
    return packed;
}
inline __m512i emulated_cvtepi8_epi32(__m128i a) {
    return emulated_join<__m512i>(_mm256_cvtepi8_epi32(a),
                                  _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtps_pd emulated_cvtps_pd
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#define __AVX512VNNI__ 1

#if defined(EMULATE_AMX)

// A thread's tile registers, each row 64 bytes apart; signed bytes are multiplied with unsigned ones.
struct EmulatedTiles {
    unsigned char rows[8] = {};
    unsigned short row_bytes[8] = {};
    alignas(64) signed char bytes[8][16][64];
};
inline thread_local EmulatedTiles emulated_tiles;

inline void emulated_loadconfig(const void* config) {
    constexpr int BYTES_AT = 16, ROWS_AT = 48;  // of a configuration
    __builtin_memcpy(emulated_tiles.row_bytes, static_cast<const char*>(config) + BYTES_AT, 16);
    __builtin_memcpy(emulated_tiles.rows, static_cast<const char*>(config) + ROWS_AT, 8);
}
inline void emulated_tile_zero(int tile) {
    __builtin_memset(emulated_tiles.bytes[tile], 0, sizeof emulated_tiles.bytes[tile]);
}
inline void emulated_tile_loadd(int tile, const void* from, long stride) {
    for (int row = 0; row < emulated_tiles.rows[tile]; ++row) {
        __builtin_memcpy(emulated_tiles.bytes[tile][row],
                         static_cast<const char*>(from) + row * stride,
                         emulated_tiles.row_bytes[tile]);
    }
}
inline void emulated_tile_stored(int tile, void* to, long stride) {
    for (int row = 0; row < emulated_tiles.rows[tile]; ++row) {
        __builtin_memcpy(static_cast<char*>(to) + row * stride, emulated_tiles.bytes[tile][row], 64);
    }
}
inline void emulated_dpbsud(int sums, int a, int b) {
    for (int row = 0; row < emulated_tiles.rows[sums]; ++row) {
        int totals[16];
        __builtin_memcpy(totals, emulated_tiles.bytes[sums][row], sizeof totals);
        for (int i = 0; i < emulated_tiles.row_bytes[a]; ++i) {
            for (int column = 0; column < 16; ++column) {
                const signed char byte = emulated_tiles.bytes[b][i / 4][column * 4 + i % 4];
                totals[column] +=
                    emulated_tiles.bytes[a][row][i] * static_cast<unsigned char>(byte);
            }
        }
        __builtin_memcpy(emulated_tiles.bytes[sums][row], totals, sizeof totals);
    }
}
#define _tile_loadconfig emulated_loadconfig
#define _tile_release() static_cast<void>(0)
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_dpbsud emulated_dpbsud
#define __AMX_INT8__ 1

#endif

#elif defined(EMULATE_AVXVNNI)

#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
#define __AVXVNNI__ 1

#endif
#endif
