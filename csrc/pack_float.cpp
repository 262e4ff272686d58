#include "pack_float.h"

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "thread_pool.h"

namespace paceline {

size_t float_elements(int n, int k) { return size_t(round_up(n, TILE)) * round_up(k, TILE); }

template <typename T> void pack_float(const T* rows, int n, int k, T* tiles) {
    const size_t tile_size = size_t(round_up(k, TILE)) * TILE;
    pool().each(round_up(n, TILE) / TILE, [=](int tile, int) {
        T* out = tiles + tile * tile_size;
        const T* first = rows + size_t(tile) * TILE * k;
        const int outputs = n - tile * TILE < TILE ? n - tile * TILE : TILE;
        std::memset(out, 0, tile_size * sizeof(T));
        for (int input = 0; input < k; ++input) {
            for (int output = 0; output < outputs; ++output) {
                out[size_t(input) * TILE + output] = first[size_t(output) * k + input];
            }
        }
    });
}

template void pack_float(const uint8_t*, int, int, uint8_t*);
template void pack_float(const uint16_t*, int, int, uint16_t*);
template void pack_float(const uint32_t*, int, int, uint32_t*);

}  // namespace paceline
