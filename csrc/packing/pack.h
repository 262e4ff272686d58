// Weights into the tiles of kernels.h: blocks of a file as they are, and the quantisation of floats
// to such blocks (quantise.cpp). Knows no Python. The same bits on every machine: nothing here depends
// on the instruction-set level.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "threads/thread_pool.h"

namespace paceline {

constexpr int MAX_OUTPUTS = 1 << 24;  // of a linear
constexpr int MAX_INPUTS = 1 << 17;

// What a weight is stored as: blocks, or floats.
struct WeightFormat {
    bool is_float = false;
    BlockType block{};
    FloatType floats{};
};
// The format of a name: those of BLOCK_SHAPES, F32, F16, BF16, and F8_128, a float32 scale and 128
// codes of e4m3 at a time. False where there is none.
bool find_format(const char* name, WeightFormat* found);

size_t raw_row_bytes(WeightFormat format, int k);  // of one output
size_t packed_bytes(WeightFormat format, int n, int k);

// All use the pool's threads. `rows`: each output as it is stored, one after another. False where a
// scale is not a finite number; the others are packed all the same.
bool pack_rows(WeightFormat format, const uint8_t* rows, int n, int k, uint8_t* data);

// Blocks that floats can be made: Q8_0, Q4_0, Q3_K and Q2_K.
bool can_quantise(WeightFormat format);
// [n, k] to such blocks, the last one of a row filled up with zeros. False where a weight is not finite.
bool quantise(WeightFormat format, const float* weight, int n, int k, uint8_t* rows);

inline int tiles_of(int n) { return (n + TILE - 1) / TILE; }

// Calls piece(i) for i below `count` on the pool's threads; true if all of them returned true.
template <typename Piece> bool each_of(int count, const Piece& piece) {
    std::atomic<bool> good{true};
    pool().each(count, [&](int i, int) {
        if (!piece(i)) {
            good.store(false);
        }
    });
    return good.load();
}

}  // namespace paceline
