// The suffix proposer's automaton and the trees that are grown from it: the C++ form of
// paceline/proposers/suffix.py, where both are described. The arithmetic is
// that of the Python code, so that both draft alike to the last bit. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafts/draft.h"
#include "drafts/large_pages.h"
#include "drafts/noise.h"

namespace paceline {

struct SuffixPlace {
    uint32_t state, length;
};

class SuffixAutomaton {
  public:
    static constexpr uint32_t root = 0, none = UINT32_MAX;

    struct Edge {
        int32_t token;
        uint32_t target, count;
    };
    // Most states have one edge, which is kept in them. Those of others are a block of the pool; the
    // first `num_ordered` of a block are those that were taken last, the latest first.
    struct State {
        uint32_t length;  // of its longest string
        uint32_t link;
        uint32_t num_edges;
        Edge only;  // the edge; of several, `count` is of all and `target` where the block begins
    };
    static constexpr uint32_t num_ordered = 16;

    explicit SuffixAutomaton(uint32_t max_depth);

    void end_text();
    void append(int32_t token);

    SuffixPlace follow(SuffixPlace place, int32_t token) const;
    // Where the longest suffix of the text occurs, within the depth.
    SuffixPlace end() const { return active_; }

    const State& state(uint32_t index) const { return states_[index]; }
    // Those of a state, `num_edges` of them.
    const Edge* edges(const State& state) const {
        return state.num_edges == 1 ? &state.only : pool_.data() + state.only.target;
    }
    // Begin to read what a draft reads of a state, whose own memory is at hand.
    void prefetch_around(uint32_t state) const {
        if (states_[state].num_edges > 1) {
            __builtin_prefetch(edges(states_[state]));
        }
        if (states_[state].link != none) {
            prefetch(states_[state].link);
        }
    }
    void prefetch(uint32_t state) const { __builtin_prefetch(&states_[state]); }

    uint32_t max_depth() const { return max_depth_; }
    size_t num_tokens() const { return num_tokens_; }
    size_t num_states() const { return states_.size(); }
    // Bytes that it holds.
    size_t num_bytes() const;

  private:
    struct Slot {
        uint32_t state;
        int32_t token;
        uint32_t place;  // in the state's block
    };

    const Edge* find(const State& state, int32_t token) const;
    Edge* find(uint32_t state, int32_t token);
    Edge* edges(State& state);
    void add_state(uint32_t length, uint32_t link);
    void add_edge(uint32_t state, int32_t token, uint32_t target);
    void copy_edges(uint32_t from, uint32_t to);
    void take(uint32_t state, int32_t token);
    void put_first(uint32_t state, Edge edge, uint32_t place);
    uint32_t new_block(uint32_t num_edges);
    void free_block(uint32_t block, uint32_t num_edges);
    size_t slot_of(uint32_t state, int32_t token) const;
    void remember(uint32_t state, int32_t token, uint32_t place);
    uint32_t split(uint32_t state, Edge* edge);
    void count(int32_t token);
    SuffixPlace within_depth(uint32_t state, uint32_t length) const;

    uint32_t max_depth_;
    size_t num_tokens_ = 0;
    LargeVector<State> states_;
    LargeVector<Edge> pool_;
    std::vector<uint32_t> free_;  // by size of block: the first free one, which tells the next
    LargeVector<Slot> table_;     // places beyond the ordered ones; open addressing
    size_t num_slots_taken_ = 0;
    uint32_t last_ = root;
    SuffixPlace active_{root, 0};  // the longest suffix of the text that is counted
};

// Where the longest suffix of a growing text occurs, followed token by token.
class SuffixCursor {
  public:
    // `is_own`: the automaton is of the very text that is followed, and holds all of it.
    SuffixCursor(const SuffixAutomaton* automaton, bool is_own)
        : automaton_(automaton), is_own_(is_own) {}

    const SuffixAutomaton& automaton() const { return *automaton_; }
    SuffixPlace place() const { return place_; }
    // Tokens of the text that are to be given to `advance`, when it has so many.
    size_t num_unread(size_t length) const;
    // Follow the last tokens of a text of that length, all of the unread ones among them.
    void advance(const std::vector<int32_t>& tail, size_t length);

  private:
    const SuffixAutomaton* automaton_;
    bool is_own_;
    SuffixPlace place_{SuffixAutomaton::root, 0};
    size_t num_read_ = 0;
    size_t num_known_ = 0;  // tokens of the automaton when the place was found
};

struct SuffixRules {
    std::vector<double> disputed, unanimous;  // by length of the context
    uint32_t branching;
    double min_token_prob, min_path_prob, max_spec_factor;
};

// Below a text of that length. Of equally long contexts the first cursor's counts.
TextDraft grow_suffix_draft(const std::vector<const SuffixCursor*>& cursors,
                            const SuffixRules& rules, size_t length, const TargetNoise& noise,
                            size_t max_nodes, uint32_t max_depth);

// Drafts from the text itself and from others that are shared with it, whose automata outlive it.
class SuffixText : public TextDrafter {
  public:
    SuffixText(const SuffixRules* rules, uint32_t max_depth, const TargetNoise& noise)
        : rules_(rules), noise_(noise), own_(max_depth), cursors_{{&own_, true}} {}
    SuffixText(const SuffixText&) = delete;

    const SuffixRules& rules() const { return *rules_; }
    void share(const std::vector<const SuffixAutomaton*>& automata);
    size_t first_unread(size_t length) const override;
    TextDraft draft(const std::vector<int32_t>& tail, size_t length, size_t max_nodes,
                    size_t max_depth) override;
    size_t matched(const std::vector<int32_t>& tail, size_t length) override;

  private:
    void read(const std::vector<int32_t>& tail, size_t length);

    const SuffixRules* rules_;
    TargetNoise noise_;
    SuffixAutomaton own_;
    std::vector<SuffixCursor> cursors_;
};

}  // namespace paceline
