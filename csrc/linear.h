// One linear layer of either kind, as the forward sees it. Owns no memory.
#pragma once

#include "kernels.h"

namespace paceline {

struct Linear {
    bool is_int4 = false;
    Int8Weights int8{};
    Int4Weights int4{};

    int n() const { return is_int4 ? int4.n : int8.n; }
    int k() const { return is_int4 ? int4.k : int8.k; }
    int tiles() const { return (n() + TILE - 1) / TILE; }

    void run(const QuantRows& x, const LinearOut& out, int tile_begin, int tile_end) const {
        if (is_int4) {
            kernels().linear_int4(x, int4, out, tile_begin, tile_end);
        } else {
            kernels().linear_int8(x, int8, out, tile_begin, tile_end);
        }
    }
};

}  // namespace paceline
