// Weights into the layouts of kernels.h and back: quantisation at load. Knows no Python. The same
// bits on every machine: nothing here depends on the instruction-set level.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int MAX_OUTPUTS = 1 << 24;  // of a linear
constexpr int MAX_INPUTS = 1 << 17;   // 127 * 127 * inputs fits an int32

size_t int8_bytes(int n, int k);
size_t int4_bytes(int n, int k);

// All take [n, k] row by row and fill the whole packed array, padding included, by the pool's
// threads. False where the values cannot be packed: a weight that is not finite, or a -128.
bool pack_int8(const float* weight, int n, int k, int8_t* data, float* scale);
bool pack_int8_rows(const int8_t* q, int n, int k, int8_t* data);
bool pack_int4(const float* weight, int n, int k, uint8_t* data);
bool pack_q4_0(const uint8_t* blocks, int n, int k, uint8_t* data);  // k a multiple of GROUP

void unpack_int8(const int8_t* data, int n, int k, int8_t* q);
void unpack_int4(const uint8_t* data, int n, int k, float* weight);

}  // namespace paceline
