// The instructions of levels that this CPU lacks, by SIMDe (Debian: libsimde-dev): for tests of
// those levels, never for use. The compiler's command line includes this before everything else and
// says which level is meant by EMULATE_AVX512, EMULATE_AVXVNNI or EMULATE_NEON. The levels' macros
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

#elif defined(EMULATE_AVXVNNI)

#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
#define __AVXVNNI__ 1

#endif
#endif
