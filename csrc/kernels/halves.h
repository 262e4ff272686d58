// Single floats of 16 bits, in plain arithmetic. In an unnamed namespace, lest the linker mix code
// that was compiled for different instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline {
namespace {

inline uint32_t float_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint16_t to_bf16(float x) {  // to nearest, half to even; a NaN stays one
    const uint32_t bits = float_bits(x);
    if (x != x) {
        return static_cast<uint16_t>(bits >> 16 | 0x40);
    }
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

// To nearest, half to even; a finite number beyond the largest becomes that, a NaN or inf stays one.
inline uint16_t f32_to_f16(float x) {
    const uint32_t bits = float_bits(x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t half;
    if (size >= 0x7f800000) {
        half = size == 0x7f800000 ? 0x7c00 : 0x7e00;
    } else if (size >= 0x477fe000) {  // 65504
        half = 0x7bff;
    } else if (size >= 0x38800000) {
        half = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    } else {  // subnormal: a multiple of 2^-24
        half = static_cast<uint32_t>(__builtin_rintf(float_of(size) * 0x1p24f));
    }
    return static_cast<uint16_t>(sign | half);
}
inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, size = h & 0x7fffu;
    if (size >= 0x7c00) {
        return float_of(sign | ((size << 13) + 0x70000000));
    }
    return float_of(sign | float_bits(float_of(size << 13) * 0x1p112f));
}

// What a KV_GROUP whose largest number has that size is quantised by: a 127th of it, but not 0,
// rounded up to a bfloat16. Then no code exceeds 127. NaN for a NaN or inf.
inline uint16_t kv_scale(float largest) {
    const float scale = largest / 127.0f;
    if (!(scale < __builtin_inff())) {
        return 0x7fc0;
    }
    return static_cast<uint16_t>((float_bits(scale < 1e-30f ? 1e-30f : scale) + 0xffff) >> 16);
}

}  // namespace
}  // namespace paceline
