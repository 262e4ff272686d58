// The suffix proposer's automaton and the trees that are grown from it: the C++ form of
// paceline/proposers/suffix/automaton.py and growth.py, where both are described. The arithmetic is
// that of the Python code, so that both draft alike to the last bit. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

struct SuffixPlace {
    uint32_t state, length;
};

class SuffixAutomaton {
  public:
    static constexpr uint32_t root = 0, none = UINT32_MAX;

    struct State {
        uint32_t length;  // of its longest string
        uint32_t link;
        uint32_t count;      // continuations
        uint32_t last_edge;  // the one that was taken last; they are linked from there
    };
    struct Edge {
        uint32_t state;
        int32_t token;
        uint32_t target, count;
        uint32_t earlier, later;
    };

    explicit SuffixAutomaton(uint32_t max_depth);

    void end_text();
    void append(int32_t token);

    SuffixPlace follow(SuffixPlace place, int32_t token) const;

    const State& state(uint32_t index) const { return states_[index]; }
    const Edge& edge(uint32_t index) const { return edges_[index]; }
    uint32_t max_depth() const { return max_depth_; }
    size_t num_tokens() const { return num_tokens_; }
    size_t num_states() const { return states_.size(); }
    // Bytes that it holds.
    size_t num_bytes() const;

  private:
    uint32_t find(uint32_t state, int32_t token) const;
    void add_edge(uint32_t state, int32_t token, uint32_t target, uint32_t count);
    void move_to_front(uint32_t edge);
    void grow_table(size_t edges);
    uint32_t split(uint32_t state, uint32_t edge);
    void count(int32_t token);
    SuffixPlace within_depth(uint32_t state, uint32_t length) const;

    uint32_t max_depth_;
    size_t num_tokens_ = 0;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<uint32_t> table_;  // edges by state and token; open addressing
    uint32_t last_ = root;
    SuffixPlace active_{root, 0};  // the longest suffix of the text that is counted
};

struct SuffixRules {
    std::vector<double> disputed, unanimous;  // by length of the context
    uint32_t branching;
    double min_token_prob, min_path_prob, max_spec_factor;
};

struct SuffixDraft {
    std::vector<int32_t> tokens, parents;
    std::vector<double> probs;
};

// `tail`: the last tokens of the context, at least max_depth of them where it is that long.
SuffixDraft grow_suffix_draft(const std::vector<const SuffixAutomaton*>& automata,
                              const std::vector<int32_t>& tail, const SuffixRules& rules,
                              size_t max_nodes, uint32_t max_depth);

}  // namespace paceline
