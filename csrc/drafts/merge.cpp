#include "drafts/merge.h"

namespace paceline {
namespace {

constexpr double kLeastLeft = 0.001;

// By parent, what a tree leaves to other tokens; the last place is that of the top.
std::vector<double> left_by(const DraftNodes& tree) {
    const size_t count = tree.parents.size();
    std::vector<double> left(count + 1, 1.0);
    for (size_t i = 0; i < count; ++i) {
        left[tree.parents[i] < 0 ? count : tree.parents[i]] -= tree.probs[i];
    }
    for (double& rest : left) {
        rest = rest < kLeastLeft ? kLeastLeft : rest;
    }
    return left;
}

// Probabilities of nodes from their odds against tokens that were not drafted there.
std::vector<double> shared_out(const std::vector<double>& odds, const Parents& parents) {
    std::vector<double> total(odds.size() + 1, 1.0);  // by parent; the last place is the top's
    const auto at = [&](size_t i) { return parents[i] < 0 ? odds.size() : parents[i]; };
    for (size_t i = 0; i < odds.size(); ++i) {
        total[at(i)] += odds[i];
    }
    std::vector<double> probs(odds.size());
    for (size_t i = 0; i < odds.size(); ++i) {
        probs[i] = odds[i] / total[at(i)];
    }
    return probs;
}

struct Named {
    int32_t node;
    Claim claim;
};

Claims by_node(const std::vector<Named>& named, size_t count) {
    Claims claims;
    claims.ends.assign(count, 0);
    for (const Named& each : named) {
        ++claims.ends[each.node];
    }
    int32_t end = 0;
    std::vector<int32_t> next(count);
    for (size_t node = 0; node < count; ++node) {
        next[node] = end;
        claims.ends[node] = end += claims.ends[node];
    }
    claims.all.resize(named.size());
    for (const Named& each : named) {
        claims.all[next[each.node]++] = each.claim;
    }
    return claims;
}

}  // namespace

DraftNodes merge(const std::vector<DraftNodes>& trees) {
    DraftNodes merged;
    Trie trie;
    std::vector<double> odds, surest;
    std::vector<Named> named;
    for (const DraftNodes& tree : trees) {
        const std::vector<double> left = left_by(tree);
        std::vector<int32_t> node_of;
        for (size_t i = 0; i < tree.tokens.size(); ++i) {
            const int32_t parent = tree.parents[i];
            const int32_t above = parent < 0 ? -1 : node_of[parent];
            const double prob = tree.probs[i];
            const double share = prob / left[parent < 0 ? left.size() - 1 : parent];
            const int32_t node = trie.child(above, tree.tokens[i]);
            node_of.push_back(node);
            if (static_cast<size_t>(node) == odds.size()) {
                merged.tokens.push_back(tree.tokens[i]);
                merged.parents.push_back(above);
                merged.origins.push_back(tree.origins[i]);
                surest.push_back(prob);
                odds.push_back(share);
            } else {
                odds[node] += share;
                if (prob > surest[node]) {
                    surest[node] = prob;
                    merged.origins[node] = tree.origins[i];
                }
            }
            named.push_back({node, {tree.origins[i], prob}});
        }
    }
    merged.probs = shared_out(odds, merged.parents);
    merged.claims = by_node(named, odds.size());
    return merged;
}

}  // namespace paceline
