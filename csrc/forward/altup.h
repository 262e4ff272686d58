// Several residual streams: weights, in the words of paceline/models/weights.py. Owns no memory of rows.
#pragma once

#include <vector>

#include "forward/linear.h"

namespace paceline {

struct AltUp {
    int streams, active;  // their number, and the one that layers read
    std::vector<Linear> spread, gather;  // of each stream but the first
};

struct AltUpLayer {
    const float *router_norm, *router;  // [hidden], [streams, hidden]
    const float *predict, *correct;     // [streams * streams, streams], [streams, streams]
    const float* scale;                 // [hidden]; null: 1
    Linear left, right;
    const float* norm;  // [hidden]
};

// Lowers gates by so many standard deviations above their mean, and sets to 0 what is below that.
void cut_gates(float* gates, int width, float deviations);

}  // namespace paceline
