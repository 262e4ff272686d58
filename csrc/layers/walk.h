// The order in which a step's rows go through recurrent layers, made once and shared by all of them.
// Knows no layer's numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/recurrent.h"

namespace paceline {

// Appends a walk of rows whose parents come before them (-1: the committed state), of which the first
// `certain` ones are a chain. Returns how many slices its stack needs.
int add_walk(const std::vector<int32_t>& parents, int certain, std::vector<WalkStep>& steps);

// Appends the windows of the rows: see ConvolvedRows. `last` becomes that behind the certain rows.
void add_windows(const std::vector<int32_t>& parents, int certain, int kernel,
                 std::vector<int32_t>& windows, std::vector<int32_t>& last);

}  // namespace paceline
