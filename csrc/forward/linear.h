// One linear layer, as the forward sees it: one matrix, or up to four with the same inputs whose
// outputs follow each other and whose formats or orders of inputs differ. Owns no memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/kernels.h"
#include "threads/thread_pool.h"

namespace paceline {

// Whatever owns memory that is pointed to.
using Kept = std::shared_ptr<const void>;

// Inputs of linears: as floats for weights that are floats, quantised for the others. A linear whose
// parts have their inputs in several orders takes them once for each order, one after another.
struct Inputs {
    QuantRows codes{};
    FloatRows floats{};

    // Those of the index-th order.
    Inputs in_order(int index) const {
        Inputs x = *this;
        const ptrdiff_t before = ptrdiff_t(index) * codes.stretches() * codes.stride;
        x.codes.data += before;
        x.floats.x += ptrdiff_t(index) * floats.rows * floats.stride;
        return x;
    }
    // `count` rows from `first` on, of those in one order.
    Inputs some(int first, int count) const {
        Inputs x = *this;
        x.codes.data += first;
        x.floats.x += ptrdiff_t(first) * floats.stride;
        x.codes.rows = x.floats.rows = count;
        return x;
    }
};

struct LinearPart {
    bool is_float = false;
    BlockWeights blocks{};
    FloatWeights floats{};
    const int32_t* order = nullptr;  // [k], which input each column is of; null: one after another
    int order_index = 0;             // among the linear's orders

    int n() const { return is_float ? floats.n : blocks.n; }
    int k() const { return is_float ? floats.k : blocks.k; }
    int tiles() const { return (n() + TILE - 1) / TILE; }
    NextRead memory() const {
        const size_t tile = is_float ? size_t(floats.tile_bytes())
                                     : BlockSizes(shape_of(blocks.type), blocks.k).tile;
        return {is_float ? floats.data : blocks.data, ptrdiff_t(tile) * tiles()};
    }
    void move(ptrdiff_t bytes) { (is_float ? floats.data : blocks.data) += bytes; }

    void run(const Inputs& x, const LinearOut& out, int tile_begin, int tile_end) const {
        if (is_float) {
            kernels().linear_float(x.in_order(order_index).floats, floats, out, tile_begin, tile_end);
        } else {
            kernels().linear_blocks(x.in_order(order_index).codes, blocks, out, tile_begin, tile_end);
        }
    }
    void gather(int output, float multiplier, float* y, float* spare) const {
        float* columns = order ? spare : y;
        if (is_float) {
            kernels().gather_float(floats, output, multiplier, columns);
        } else {
            kernels().gather_blocks(blocks, output, multiplier, columns);
        }
        for (int i = 0; order && i < k(); ++i) {
            y[order[i]] = columns[i];
        }
    }
};

struct Linear {
    static constexpr int MOST_PARTS = 4;  // queries, keys, values, gates
    LinearPart parts[MOST_PARTS] = {};
    int num_parts = 0;
    const int32_t* orders[MOST_PARTS] = {};  // those of the parts, each once
    int num_orders = 0;
    bool takes_codes = false, takes_floats = false;

    // What the first part, and whatever else has its inputs, reads of those of the linear.
    Inputs first_inputs(const Inputs& x) const { return x.in_order(parts[0].order_index); }

    void add(const LinearPart& part) {
        const auto is_same = [&](const int32_t* order) {
            const bool both = order && part.order;
            return both ? std::equal(order, order + part.k(), part.order) : order == part.order;
        };
        LinearPart& added = parts[num_parts++] = part;
        added.order_index = int(std::find_if(orders, orders + num_orders, is_same) - orders);
        if (added.order_index == num_orders) {
            orders[num_orders++] = part.order;
        }
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

    // The same with its weights so much further on.
    Linear moved(ptrdiff_t bytes) const {
        Linear other = *this;
        std::for_each(other.parts, other.parts + num_parts, [&](LinearPart& part) { part.move(bytes); });
        return other;
    }

    // Makes a row of inputs, padded with zeros to a multiple of 16, what the parts take. `spare` has
    // room for another such row.
    void take(const float* x, const Inputs& inputs, int row, float* spare) const {
        for (int i = 0; i < num_orders; ++i) {
            take_ordered(orders[i] ? ordered(x, orders[i], spare) : x, inputs.in_order(i), row);
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
    // One output's weights, times `multiplier`: y[k]. `spare` has room for as much.
    void gather(int output, float multiplier, float* y, float* spare) const {
        int i = 0;
        for (; output >= parts[i].n(); ++i) {
            output -= parts[i].n();
        }
        parts[i].gather(output, multiplier, y, spare);
    }

  private:
    const float* ordered(const float* x, const int32_t* order, float* to) const {
        for (int i = 0; i < k(); ++i) {
            to[i] = x[order[i]];
        }
        std::fill(to + k(), to + round_up(k(), TILE), 0.0f);
        return to;
    }
    void take_ordered(const float* x, const Inputs& inputs, int row) const {
        if (takes_codes) {
            kernels().quantize(x, inputs.codes, row);
        }
        if (takes_floats) {
            const FloatRows& rows = inputs.floats;
            std::memcpy(rows.x + ptrdiff_t(row) * rows.stride, x, sizeof(float) * size_t(rows.stride));
        }
    }
};

constexpr int PIECES_PER_THREAD = 8;
constexpr int TILES_TOGETHER = 2;  // that a linear computes side by side

// Of a piece of work, where there are so many tiles.
inline int tiles_per_piece(int tiles) {
    const int share = std::max(1, tiles / (pool().size() * PIECES_PER_THREAD));
    return round_up(share, TILES_TOGETHER);
}

// The tiles from `first_tile` on, by the pool's threads. Not within `pool().each`.
inline void run_linear(const Linear& weights, const Inputs& x, const LinearOut& out,
                       int first_tile = 0) {
    const int tiles = weights.tiles() - first_tile, per_piece = tiles_per_piece(tiles);
    pool().each((tiles + per_piece - 1) / per_piece, [&](int piece, int) {
        const int begin = piece * per_piece, end = std::min(begin + per_piece, tiles);
        weights.run(x, out, first_tile + begin, first_tile + end);
    });
}

}  // namespace paceline
