// Drafts out of the context itself: paceline/proposers/prompt_lookup.py in C++, where it is
// described. Both draft alike, unless two runs of tokens share a hash. Knows no Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "drafts/ngram.h"
#include "drafts/places.h"

namespace paceline {

constexpr size_t kMostAlternatives = 4;
using TokenRun = std::vector<uint32_t>;

struct Occurrences {
    size_t length = 0;            // of the match
    std::vector<uint32_t> after;  // places of the tokens that follow it, the latest first
};

class PromptIndex {
  public:
    PromptIndex(size_t shortest, size_t longest, size_t window) : window_(window) {
        for (size_t length = longest; length >= shortest && length > 0; --length) {
            levels_.push_back({length, {}, {}});
        }
    }

    size_t size() const { return tokens_.size(); }
    size_t num_indexed() const { return tokens_.size() - base_; }
    const std::vector<uint32_t>& tokens() const { return tokens_; }

    void extend(const TokenRun& more) {
        size_t at = tokens_.size();
        tokens_.insert(tokens_.end(), more.begin(), more.end());
        if (!at || num_indexed() > 2 * window_) {
            base_ = at = tokens_.size() - std::min(window_, tokens_.size());
            for (Level& level : levels_) {
                level = {level.length, {}, {}};
            }
        }
        for (; at < tokens_.size(); ++at) {
            for (Level& level : levels_) {
                const bool is_known = at - base_ >= level.length;
                level.before.push_back(
                    is_known ? level.latest.exchange(key(at, level.length), static_cast<uint32_t>(at))
                             : 0);
            }
        }
    }

    // The longest suffix that occurs within the window, and its latest occurrences.
    Occurrences occurrences() const {
        const size_t count = tokens_.size(), oldest = count - std::min(window_, count);
        Occurrences found;
        for (const Level& level : levels_) {
            const size_t least = std::max<size_t>(1, oldest + level.length);
            size_t at = count >= level.length ? level.latest.find(key(count, level.length)) : 0;
            for (; at >= least && found.after.size() < kMostAlternatives;
                 at = level.before[at - base_]) {
                found.after.push_back(static_cast<uint32_t>(at));
            }
            if (!found.after.empty()) {
                found.length = full_length(found.after[0], level.length);
                break;
            }
        }
        return found;
    }

    // So many tokens from a place on; what runs into the end of the context repeats itself.
    TokenRun continuation(size_t at, size_t count) const {
        TokenRun run(count);
        for (size_t i = 0; i < count; ++i) {
            run[i] = tokens_[at + i % (tokens_.size() - at)];
        }
        return run;
    }

  private:
    struct Level {
        size_t length;
        PlaceTable latest;
        std::vector<uint32_t> before;  // by place from the base on: the occurrence before it
    };

    // Of the run of tokens before a place.
    uint64_t key(size_t at, size_t length) const {
        uint64_t hash = length;
        for (size_t i = at - length; i < at; ++i) {
            hash = (hash ^ tokens_[i]) * 0x9fb21c651e98df25ull;
            hash ^= hash >> 32;
        }
        return hash;
    }

    bool is_longer(size_t at, size_t length) const {
        return at >= length && std::equal(tokens_.begin() + static_cast<std::ptrdiff_t>(at - length),
                                          tokens_.begin() + static_cast<std::ptrdiff_t>(at),
                                          tokens_.end() - static_cast<std::ptrdiff_t>(length));
    }

    size_t full_length(size_t at, size_t length) const {
        for (const size_t longer : {size_t{16}, size_t{5}, size_t{8}}) {
            if (longer > length) {
                if (is_longer(at, longer)) {
                    length = longer;
                } else if (longer == 5) {
                    break;
                }
            }
        }
        return length;
    }

    size_t window_, base_ = 0;
    std::vector<uint32_t> tokens_;  // of the whole text
    std::vector<Level> levels_;     // the longest first
};

// Grows drafts by the priors of the Python code.
class PromptDrafter {
  public:
    // By how many occurrences agree, less one, and the length of the match.
    std::vector<std::vector<double>> unanimous;
    // By how many agree and how many do not.
    double disputed[kMostAlternatives][kMostAlternatives] = {};
    size_t branching = 1;
    double min_prob = 0.0;

    TextDraft draft(const PromptIndex& index, size_t max_nodes, size_t max_depth) const {
        const Occurrences found = index.occurrences();
        std::vector<TokenRun> runs;
        for (const uint32_t at : found.after) {
            runs.push_back(index.continuation(at, max_depth));
        }
        if (runs.empty()) {
            return {};
        }
        const bool is_one = std::all_of(runs.begin(), runs.end(),
                                        [&](const TokenRun& run) { return run == runs[0]; });
        return is_one ? chain(runs, found.length, max_nodes) : grow(runs, found.length, max_nodes);
    }

  private:
    using Group = std::vector<const TokenRun*>;

    TextDraft chain(const std::vector<TokenRun>& runs, size_t length, size_t max_nodes) const {
        TextDraft draft;
        double path_prob = 1.0;
        for (size_t i = 0; i < std::min(max_nodes, runs[0].size()); ++i) {
            const double prob = unanimous[runs.size() - 1].at(length + i);
            path_prob *= prob;
            if (path_prob < min_prob) {
                break;
            }
            draft.tokens.push_back(runs[0][i]);
            draft.parents.push_back(static_cast<int32_t>(i) - 1);
            draft.probs.push_back(prob);
        }
        return draft;
    }

    struct Node {
        double path_prob;
        size_t order;
        int32_t parent;
        double prob;
        size_t depth;
        Group group;
    };

    // Best first over runs that differ; each node goes on with the runs that pass it.
    TextDraft grow(const std::vector<TokenRun>& runs, size_t length, size_t max_nodes) const {
        const auto ranks_behind = [](const Node& a, const Node& b) {
            return a.path_prob != b.path_prob ? a.path_prob < b.path_prob : a.order > b.order;
        };
        std::priority_queue<Node, std::vector<Node>, decltype(ranks_behind)> heap(ranks_behind);
        TextDraft draft;
        size_t order = 0;
        const auto push = [&](int32_t parent, double path_prob, size_t depth, const Group& group) {
            for (auto& [prob, passing] : children(group, depth, length)) {
                if (path_prob * prob >= min_prob) {
                    heap.push({path_prob * prob, order++, parent, prob, depth, std::move(passing)});
                }
            }
        };
        Group all;
        for (const TokenRun& run : runs) {
            all.push_back(&run);
        }
        push(-1, 1.0, 0, all);
        while (!heap.empty() && draft.tokens.size() < max_nodes) {
            const Node best = heap.top();
            heap.pop();
            draft.tokens.push_back((*best.group[0])[best.depth]);
            draft.parents.push_back(best.parent);
            draft.probs.push_back(best.prob);
            if (best.depth + 1 < runs[0].size()) {
                push(static_cast<int32_t>(draft.tokens.size()) - 1, best.path_prob, best.depth + 1,
                     best.group);
            }
        }
        return draft;
    }

    // The likeliest next tokens of a group: the prior of each, and the runs that take it.
    std::vector<std::pair<double, Group>> children(const Group& group, size_t depth,
                                                   size_t length) const {
        std::vector<std::pair<double, Group>> found;
        for (const TokenRun* run : group) {
            const auto same = std::find_if(found.begin(), found.end(), [&](const auto& each) {
                return (*each.second[0])[depth] == (*run)[depth];
            });
            if (same == found.end()) {
                found.push_back({0.0, {run}});
            } else {
                same->second.push_back(run);
            }
        }
        if (found.size() == 1) {
            found[0].first = unanimous[group.size() - 1].at(length + depth);
            return found;
        }
        // Among equals the latest occurrence goes first.
        std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
            return a.second.size() > b.second.size();
        });
        found.resize(std::min(found.size(), branching));
        for (auto& [prob, runs] : found) {
            prob = disputed[runs.size()][group.size() - runs.size()];
        }
        return found;
    }
};

// Drafts from the text itself.
class PromptText : public TextDrafter {
  public:
    PromptText(const PromptDrafter* drafter, size_t shortest, size_t longest, size_t window)
        : drafter_(drafter), index_(shortest, longest, window) {}

    size_t first_unread(size_t length) const override { return std::min(index_.size(), length); }

    TextDraft draft(const std::vector<int32_t>& tail, size_t, size_t max_nodes,
                    size_t max_depth) override {
        if (!tail.empty()) {
            index_.extend({tail.begin(), tail.end()});
        }
        return drafter_->draft(index_, max_nodes, max_depth);
    }

  private:
    const PromptDrafter* drafter_;
    PromptIndex index_;
};

}  // namespace paceline
