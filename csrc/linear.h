// One linear layer, as the forward sees it: one matrix, or up to three with the same inputs whose
// outputs follow each other and whose formats differ. Owns no memory.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace paceline {

struct Linear {
    static constexpr int MOST_PARTS = 3;  // queries, keys, values
    BlockWeights parts[MOST_PARTS] = {};
    int num_parts = 0;

    int k() const { return parts[0].k; }
    int n() const {
        int outputs = 0;
        for (int i = 0; i < num_parts; ++i) {
            outputs += parts[i].n;
        }
        return outputs;
    }
    static int tiles_of(const BlockWeights& part) { return (part.n + TILE - 1) / TILE; }
    int tiles() const {
        int tiles = 0;
        for (int i = 0; i < num_parts; ++i) {
            tiles += tiles_of(parts[i]);
        }
        return tiles;
    }

    // Tiles are counted through all parts. Columns outside of them are left alone.
    void run(const QuantRows& x, LinearOut out, int tile_begin, int tile_end) const {
        for (int i = 0; i < num_parts; ++i) {
            const int tiles = tiles_of(parts[i]);
            const int begin = std::max(tile_begin, 0), end = std::min(tile_end, tiles);
            if (begin < end) {
                kernels().linear_blocks(x, parts[i], out, begin, end);
            }
            tile_begin -= tiles;
            tile_end -= tiles;
            out.y += parts[i].n;
            out.residual = out.residual ? out.residual + parts[i].n : nullptr;
        }
    }
    void gather(int output, float multiplier, float* y) const {
        int i = 0;
        for (; output >= parts[i].n; ++i) {
            output -= parts[i].n;
        }
        kernels().gather_blocks(parts[i], output, multiplier, y);
    }
};

}  // namespace paceline
