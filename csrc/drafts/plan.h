// The choice of the draft nodes that a step verifies: paceline/planner/choice.py in C++, where it is
// described. Its arithmetic is that of the Python code, so that both choose alike to the last bit.
// Knows no Python.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline {

struct PlanRequest {
    int first, count;  // its nodes, in the arrays of all requests' nodes
    int64_t max_nodes, max_depth;
    double min_path_prob;
    bool is_forced;
    double ahead;  // tokens that it is taken to gain beside its nodes
};

struct Plan {
    std::vector<PlanRequest> requests;
    std::vector<int32_t> parents;  // within the request, each below its node; -1 at the top
    std::vector<double> accept_probs;
    std::vector<double> growth;  // milliseconds, by draft nodes; may end beyond most_nodes()
    double rate;
    bool is_fair;  // whether slowdown limits anything
    double slowdown;
    int64_t node_budget;

    // Nodes that fit the requests' limits and the budget.
    int64_t most_nodes() const;
};

// For each request its nodes, the best path first.
std::vector<std::vector<int32_t>> choose_nodes(const Plan& plan);

}  // namespace paceline
