// Several draft trees of one request as one: paceline/policy/merging.py in C++, where it is
// described. Its arithmetic is that of the Python code, to the last bit. Knows no Python.
#pragma once

#include <cstdint>
#include <vector>

#include "draft.h"

namespace paceline {

struct TreeToMerge {
    std::vector<int64_t> tokens;
    Parents parents;
    std::vector<double> probs;
    std::vector<int32_t> cells;  // of its evidence; empty where there is none
};

struct Source {
    int32_t tree, node;
};

struct Merged {
    std::vector<Source> first;   // by node: where it comes from,
    std::vector<Source> surest;  // and who is the surest of it
    Parents parents;
    std::vector<double> probs;
    Claims claims;
};

Merged merge(const std::vector<TreeToMerge>& trees);

}  // namespace paceline
