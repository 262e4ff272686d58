// One linear layer, as the forward sees it: one matrix, or up to three with the same inputs whose
// outputs follow each other and whose formats differ. Owns no memory.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace paceline {

// Inputs of linears: as floats for weights that are floats, quantised for the others.
struct Inputs {
    QuantRows codes{};
    FloatRows floats{};
};

struct LinearPart {
    bool is_float = false;
    BlockWeights blocks{};
    FloatWeights floats{};

    int n() const { return is_float ? floats.n : blocks.n; }
    int k() const { return is_float ? floats.k : blocks.k; }
    int tiles() const { return (n() + TILE - 1) / TILE; }

    void run(const Inputs& x, const LinearOut& out, int tile_begin, int tile_end) const {
        if (is_float) {
            kernels().linear_float(x.floats, floats, out, tile_begin, tile_end);
        } else {
            kernels().linear_blocks(x.codes, blocks, out, tile_begin, tile_end);
        }
    }
    void gather(int output, float multiplier, float* y) const {
        if (is_float) {
            kernels().gather_float(floats, output, multiplier, y);
        } else {
            kernels().gather_blocks(blocks, output, multiplier, y);
        }
    }
};

struct Linear {
    static constexpr int MOST_PARTS = 3;  // queries, keys, values
    LinearPart parts[MOST_PARTS] = {};
    int num_parts = 0;
    bool takes_codes = false, takes_floats = false;

    void add(const LinearPart& part) {
        parts[num_parts++] = part;
        (part.is_float ? takes_floats : takes_codes) = true;
    }
    int k() const { return parts[0].k(); }
    int n() const {
        int outputs = 0;
        for (int i = 0; i < num_parts; ++i) {
            outputs += parts[i].n();
        }
        return outputs;
    }
    int tiles() const {
        int tiles = 0;
        for (int i = 0; i < num_parts; ++i) {
            tiles += parts[i].tiles();
        }
        return tiles;
    }

    // Makes a row of inputs, padded with zeros to a multiple of 16, what the parts take.
    void take(const float* x, const Inputs& inputs, int row) const {
        if (takes_codes) {
            kernels().quantize(x, inputs.codes, row);
        }
        if (takes_floats) {
            const FloatRows& rows = inputs.floats;
            std::memcpy(rows.x + ptrdiff_t(row) * rows.stride, x, sizeof(float) * size_t(rows.stride));
        }
    }
    // Tiles are counted through all parts. Columns outside of them are left alone.
    void run(const Inputs& x, LinearOut out, int tile_begin, int tile_end) const {
        for (int i = 0; i < num_parts; ++i) {
            const int tiles = parts[i].tiles();
            const int begin = std::max(tile_begin, 0), end = std::min(tile_end, tiles);
            if (begin < end) {
                parts[i].run(x, out, begin, end);
            }
            tile_begin -= tiles;
            tile_end -= tiles;
            out.y += parts[i].n();
            out.residual = out.residual ? out.residual + parts[i].n() : nullptr;
        }
    }
    // One output's weights, times `multiplier`: y[k].
    void gather(int output, float multiplier, float* y) const {
        int i = 0;
        for (; output >= parts[i].n(); ++i) {
            output -= parts[i].n();
        }
        parts[i].gather(output, multiplier, y);
    }
};

}  // namespace paceline
