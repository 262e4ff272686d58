#include "suffix.h"

#include <algorithm>

namespace paceline {
namespace {

constexpr size_t least_slots = 16;
constexpr size_t most_contexts = 4, most_edges = 16;
constexpr double least_rest = 0.05;
constexpr uint32_t usual_depth = 8;

uint64_t hash_of(uint32_t state, int32_t token) {
    uint64_t x = static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token);
    x = (x ^ x >> 32) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

}  // namespace

SuffixAutomaton::SuffixAutomaton(uint32_t max_depth)
    : max_depth_(max_depth), states_{{0, none, 0, none}}, table_(least_slots, none) {}

void SuffixAutomaton::end_text() {
    last_ = root;
    active_ = {root, 0};
}

size_t SuffixAutomaton::num_bytes() const {
    return sizeof *this + states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
           table_.capacity() * sizeof(uint32_t);
}

uint32_t SuffixAutomaton::find(uint32_t state, int32_t token) const {
    const size_t mask = table_.size() - 1;
    for (size_t slot = hash_of(state, token) & mask; table_[slot] != none;
         slot = (slot + 1) & mask) {
        const Edge& edge = edges_[table_[slot]];
        if (edge.state == state && edge.token == token) {
            return table_[slot];
        }
    }
    return none;
}

void SuffixAutomaton::grow_table(size_t edges) {
    size_t slots = table_.size();
    while (slots * 2 < edges * 3) {  // at most two thirds of it are taken
        slots *= 2;
    }
    if (slots == table_.size()) {
        return;
    }
    std::vector<uint32_t> table(slots, none);
    for (uint32_t i = 0; i < edges_.size(); ++i) {
        size_t slot = hash_of(edges_[i].state, edges_[i].token) & (slots - 1);
        while (table[slot] != none) {
            slot = (slot + 1) & (slots - 1);
        }
        table[slot] = i;
    }
    table_.swap(table);
}

void SuffixAutomaton::add_edge(uint32_t state, int32_t token, uint32_t target, uint32_t count) {
    grow_table(edges_.size() + 1);
    const uint32_t index = static_cast<uint32_t>(edges_.size()), first = states_[state].last_edge;
    edges_.push_back({state, token, target, count, first, none});
    if (first != none) {
        edges_[first].later = index;
    }
    states_[state].last_edge = index;
    const size_t mask = table_.size() - 1;
    size_t slot = hash_of(state, token) & mask;
    while (table_[slot] != none) {
        slot = (slot + 1) & mask;
    }
    table_[slot] = index;
}

void SuffixAutomaton::move_to_front(uint32_t index) {
    Edge& edge = edges_[index];
    if (edge.later == none) {
        return;
    }
    uint32_t& first = states_[edge.state].last_edge;
    edges_[edge.later].earlier = edge.earlier;
    if (edge.earlier != none) {
        edges_[edge.earlier].later = edge.later;
    }
    edge.later = none;
    edge.earlier = first;
    edges_[first].later = index;
    first = index;
}

SuffixPlace SuffixAutomaton::within_depth(uint32_t state, uint32_t length) const {
    if (length > max_depth_) {
        length = max_depth_;
        const uint32_t link = states_[state].link;
        if (states_[link].length >= length) {
            state = link;
        }
    }
    return {state, length};
}

SuffixPlace SuffixAutomaton::follow(SuffixPlace place, int32_t token) const {
    uint32_t edge;
    while ((edge = find(place.state, token)) == none) {
        if (place.state == root) {
            return {root, 0};
        }
        place.state = states_[place.state].link;
        place.length = states_[place.state].length;
    }
    return within_depth(edges_[edge].target, place.length + 1);
}

void SuffixAutomaton::append(int32_t token) {
    ++num_tokens_;
    const uint32_t known = find(last_, token);
    if (known != none) {  // as an earlier text went on
        last_ = split(last_, known);
    } else {
        const uint32_t added = static_cast<uint32_t>(states_.size());
        states_.push_back({states_[last_].length + 1, none, 0, none});
        uint32_t state = last_, edge = none;
        while (state != none && (edge = find(state, token)) == none) {
            add_edge(state, token, added, 0);
            state = states_[state].link;
        }
        const uint32_t link = state == none ? root : split(state, edge);
        states_[added].link = link;
        last_ = added;
    }
    count(token);
}

// The state of a state's longest string with the edge's token after it, and of no longer ones.
uint32_t SuffixAutomaton::split(uint32_t state, uint32_t edge) {
    const uint32_t target = edges_[edge].target, length = states_[state].length + 1;
    const int32_t token = edges_[edge].token;
    if (states_[target].length == length) {
        return target;
    }
    const uint32_t brief = static_cast<uint32_t>(states_.size());
    states_.push_back({length, states_[target].link, states_[target].count, none});
    uint32_t copied = states_[target].last_edge;
    while (copied != none && edges_[copied].earlier != none) {
        copied = edges_[copied].earlier;
    }
    for (; copied != none; copied = edges_[copied].later) {
        add_edge(brief, edges_[copied].token, edges_[copied].target, edges_[copied].count);
    }
    states_[target].link = brief;
    while (edge != none && edges_[edge].target == target) {
        edges_[edge].target = brief;
        state = states_[state].link;
        edge = state == none ? none : find(state, token);
    }
    if (active_.state == target && active_.length <= length) {
        active_.state = brief;
    }
    return brief;
}

void SuffixAutomaton::count(int32_t token) {
    uint32_t target = none;
    for (uint32_t state = active_.state; state != none; state = states_[state].link) {
        const uint32_t edge = find(state, token);
        ++states_[state].count;
        ++edges_[edge].count;
        move_to_front(edge);
        if (target == none) {
            target = edges_[edge].target;
        }
    }
    active_ = within_depth(target, active_.length + 1);
}

// --- trees ---------------------------------------------------------------------------------------

namespace {

using Automata = std::vector<const SuffixAutomaton*>;
using Places = std::vector<SuffixPlace>;

struct Candidate {
    int32_t token;
    double prob;
};

struct Entry {
    double path_prob;
    uint32_t order;
    int32_t parent, token;
    double prob;
    uint32_t depth, places;  // depth of the node, and where its parent's places are kept
};

bool ranks_behind(const Entry& a, const Entry& b) {
    return a.path_prob != b.path_prob ? a.path_prob < b.path_prob : a.order > b.order;
}

class Growth {
  public:
    Growth(const Automata& automata, const SuffixRules& rules, size_t max_nodes)
        : automata_(automata), rules_(rules), max_nodes_(max_nodes) {}

    SuffixDraft grow(const std::vector<int32_t>& tail, uint32_t max_depth) {
        Places& places = kept_.emplace_back();
        for (const SuffixAutomaton* automaton : automata_) {
            SuffixPlace place{SuffixAutomaton::root, 0};
            const size_t depth = automaton->max_depth();
            for (size_t i = tail.size() > depth ? tail.size() - depth : 0; i < tail.size(); ++i) {
                place = automaton->follow(place, tail[i]);
            }
            places.push_back(place);
        }
        Places matches = places;
        for (size_t i = 0; i < matches.size(); ++i) {
            rise(*automata_[i], &matches[i]);
        }
        if (matches.empty()) {
            return {};
        }
        const double most = rules_.max_spec_factor * matches[longest(matches)].length;
        if (most < max_depth) {
            max_depth = std::min(max_depth, std::max(usual_depth, static_cast<uint32_t>(most)));
        }
        push(-1, 1.0, 1, 0);
        while (!heap_.empty() && draft_.tokens.size() < max_nodes_) {
            std::pop_heap(heap_.begin(), heap_.end(), ranks_behind);
            const Entry entry = heap_.back();
            heap_.pop_back();
            draft_.tokens.push_back(entry.token);
            draft_.parents.push_back(entry.parent);
            draft_.probs.push_back(entry.prob);
            if (entry.depth < max_depth && draft_.tokens.size() < max_nodes_) {
                descend(entry);
            }
        }
        return std::move(draft_);
    }

  private:
    void descend(const Entry& entry) {
        const uint32_t index = static_cast<uint32_t>(kept_.size());
        Places places = kept_[entry.places];
        for (size_t i = 0; i < automata_.size(); ++i) {
            places[i] = automata_[i]->follow(places[i], entry.token);
        }
        kept_.push_back(std::move(places));
        push(static_cast<int32_t>(draft_.tokens.size()) - 1, entry.path_prob, entry.depth + 1,
             index);
    }

    // The longest context of a place that was continued; at the root where there is none.
    static void rise(const SuffixAutomaton& automaton, SuffixPlace* place) {
        while (place->state != SuffixAutomaton::root && !automaton.state(place->state).count) {
            step_up(automaton, place);
        }
    }

    static void step_up(const SuffixAutomaton& automaton, SuffixPlace* place) {
        place->state = automaton.state(place->state).link;
        place->length = automaton.state(place->state).length;
    }

    // The place with the longest context, the first of equals; they end with the root's length 0.
    static size_t longest(const Places& places) {
        size_t best = 0;
        for (size_t i = 1; i < places.size(); ++i) {
            best = places[i].length > places[best].length ? i : best;
        }
        return best;
    }

    void predict(Places places) {
        candidates_.clear();
        for (size_t i = 0; i < places.size(); ++i) {
            rise(*automata_[i], &places[i]);
        }
        double rest = 1.0;
        for (size_t n = 0; n < most_contexts && rest >= least_rest; ++n) {
            const size_t i = longest(places);
            if (places[i].length == 0) {
                return;
            }
            rest = blend(*automata_[i], places[i], rest);
            step_up(*automata_[i], &places[i]);
            rise(*automata_[i], &places[i]);
        }
    }

    // Adds what followed a context; returns what it leaves to shorter ones.
    double blend(const SuffixAutomaton& automaton, SuffixPlace place, double rest) {
        const SuffixAutomaton::State& state = automaton.state(place.state);
        const double total = state.count;
        uint32_t edge = state.last_edge;
        const bool unanimous = automaton.edge(edge).count == state.count;
        const double other = (unanimous ? rules_.unanimous : rules_.disputed)[place.length];
        const double share = rest / (total + other), least = rules_.min_token_prob * total;
        double unseen = total;  // where less than `least` is unseen, nothing of it is enough
        for (size_t n = 0; n < most_edges && unseen > 0.0 && unseen >= least; ++n) {
            const SuffixAutomaton::Edge& known = automaton.edge(edge);
            if (known.count >= least) {
                add(known.token, share * known.count);
            }
            unseen -= known.count;
            edge = known.earlier;
        }
        return rest * (other / (total + other));
    }

    void add(int32_t token, double prob) {
        for (Candidate& candidate : candidates_) {
            if (candidate.token == token) {
                candidate.prob += prob;
                return;
            }
        }
        candidates_.push_back({token, prob});
    }

    void push(int32_t parent, double path_prob, uint32_t depth, uint32_t places) {
        predict(kept_[places]);
        std::stable_sort(candidates_.begin(), candidates_.end(),
                         [](const Candidate& a, const Candidate& b) { return a.prob > b.prob; });
        const size_t count = std::min<size_t>(candidates_.size(), rules_.branching);
        for (size_t i = 0; i < count; ++i) {
            const double prob = candidates_[i].prob;
            if (path_prob * prob < rules_.min_path_prob) {
                return;
            }
            heap_.push_back(
                {path_prob * prob, order_++, parent, candidates_[i].token, prob, depth, places});
            std::push_heap(heap_.begin(), heap_.end(), ranks_behind);
        }
    }

    const Automata& automata_;
    const SuffixRules& rules_;
    const size_t max_nodes_;
    uint32_t order_ = 0;
    std::vector<Places> kept_;
    std::vector<Candidate> candidates_;
    std::vector<Entry> heap_;
    SuffixDraft draft_;
};

}  // namespace

SuffixDraft grow_suffix_draft(const Automata& automata, const std::vector<int32_t>& tail,
                              const SuffixRules& rules, size_t max_nodes, uint32_t max_depth) {
    if (!max_nodes || !max_depth) {
        return {};
    }
    return Growth(automata, rules, max_nodes).grow(tail, max_depth);
}

}  // namespace paceline
