#include "drafts/suffix.h"

#include <algorithm>
#include <utility>

namespace paceline {
namespace {

constexpr size_t least_slots = 16;
constexpr size_t most_contexts = 4;
constexpr uint32_t most_edges = SuffixAutomaton::num_ordered;
constexpr double least_rest = 0.05;
constexpr uint32_t usual_depth = 8;

uint64_t hash_of(uint32_t state, int32_t token) {
    uint64_t x = static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token);
    x = (x ^ x >> 32) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

// Blocks have room for 2, 3, 4, 6, 8, 12, 16, 24, ... edges.
uint32_t size_class(uint32_t num_edges) {
    uint32_t index = 0;
    for (uint32_t room = 2; room < num_edges; room = room % 3 ? room / 2 * 3 : room / 3 * 4) {
        ++index;
    }
    return index;
}

uint32_t room_of(uint32_t size_class) {
    return (size_class % 2 ? 3u : 2u) << size_class / 2;
}

}  // namespace

SuffixAutomaton::SuffixAutomaton(uint32_t max_depth)
    : max_depth_(max_depth), table_(least_slots, Slot{none, 0, 0}) {
    add_state(0, none);
}

void SuffixAutomaton::end_text() {
    last_ = root;
    active_ = {root, 0};
}

size_t SuffixAutomaton::num_bytes() const {
    return sizeof *this + states_.capacity() * sizeof(State) + pool_.capacity() * sizeof(Edge) +
           free_.capacity() * sizeof(uint32_t) + table_.capacity() * sizeof(Slot);
}

void SuffixAutomaton::add_state(uint32_t length, uint32_t link) {
    states_.push_back({length, link, 0, {0, 0, 0}});
}

// --- edges ---------------------------------------------------------------------------------------

SuffixAutomaton::Edge* SuffixAutomaton::edges(State& state) {
    return state.num_edges == 1 ? &state.only : pool_.data() + state.only.target;
}

const SuffixAutomaton::Edge* SuffixAutomaton::find(const State& state, int32_t token) const {
    const Edge* edge = edges(state);
    const uint32_t listed = std::min(state.num_edges, num_ordered);
    for (uint32_t i = 0; i < listed; ++i) {
        if (edge[i].token == token) {
            return edge + i;
        }
    }
    if (state.num_edges <= num_ordered) {
        return nullptr;
    }
    const Slot& slot = table_[slot_of(static_cast<uint32_t>(&state - states_.data()), token)];
    return slot.state == none ? nullptr : edge + slot.place;
}

SuffixAutomaton::Edge* SuffixAutomaton::find(uint32_t state, int32_t token) {
    return const_cast<Edge*>(std::as_const(*this).find(states_[state], token));
}

// Where the place of a state's edge is kept, or would be.
size_t SuffixAutomaton::slot_of(uint32_t state, int32_t token) const {
    const size_t mask = table_.size() - 1;
    size_t slot = hash_of(state, token) & mask;
    while (table_[slot].state != none &&
           (table_[slot].state != state || table_[slot].token != token)) {
        slot = (slot + 1) & mask;
    }
    return slot;
}

void SuffixAutomaton::remember(uint32_t state, int32_t token, uint32_t place) {
    if ((num_slots_taken_ + 1) * 3 > table_.size() * 2) {  // at most two thirds of it are taken
        LargeVector<Slot> old(table_.size() * 2, Slot{none, 0, 0});
        old.swap(table_);
        for (const Slot& each : old) {
            if (each.state != none) {
                table_[slot_of(each.state, each.token)] = each;
            }
        }
    }
    Slot& slot = table_[slot_of(state, token)];
    num_slots_taken_ += slot.state == none;
    slot = {state, token, place};
}

uint32_t SuffixAutomaton::new_block(uint32_t num_edges) {
    const uint32_t size = size_class(num_edges);
    free_.resize(std::max<size_t>(free_.size(), size + 1), none);
    uint32_t block = free_[size];
    if (block != none) {
        free_[size] = pool_[block].target;
    } else {
        block = static_cast<uint32_t>(pool_.size());
        pool_.resize(pool_.size() + room_of(size));
    }
    return block;
}

void SuffixAutomaton::free_block(uint32_t block, uint32_t num_edges) {
    uint32_t& first = free_[size_class(num_edges)];
    pool_[block].target = first;
    first = block;
}

// Make an edge the first one of its state; `place` is free: where it was, or past the end.
void SuffixAutomaton::put_first(uint32_t state, Edge edge, uint32_t place) {
    Edge* all = edges(states_[state]);
    if (place >= num_ordered) {
        all[place] = all[num_ordered - 1];
        remember(state, all[place].token, place);
        place = num_ordered - 1;
    }
    std::copy_backward(all, all + place, all + place + 1);
    all[0] = edge;
}

void SuffixAutomaton::add_edge(uint32_t state, int32_t token, uint32_t target) {
    const State from = states_[state];
    const uint32_t held = from.num_edges;
    if (held == 0) {
        states_[state].only = {token, target, from.only.count};
    } else if (held == 1 || held == room_of(size_class(held))) {
        const uint32_t block = new_block(held + 1);
        const Edge* old = edges(from);
        std::copy(old, old + held, &pool_[block]);
        if (held > 1) {
            free_block(from.only.target, held);
        }
        states_[state].only = {0, block, from.only.count};
    }
    ++states_[state].num_edges;
    if (held) {
        put_first(state, {token, target, 0}, held);
    }
}

// To a state that has none.
void SuffixAutomaton::copy_edges(uint32_t from, uint32_t to) {
    const uint32_t held = states_[from].num_edges;
    Edge only = states_[from].only;
    if (held > 1) {
        only.target = new_block(held);
        const Edge* old = edges(states_[from]);
        std::copy(old, old + held, &pool_[only.target]);
    }
    states_[to].only = only;
    states_[to].num_edges = held;
    for (uint32_t place = num_ordered; place < held; ++place) {
        remember(to, pool_[only.target + place].token, place);
    }
}

// Count a token that follows.
void SuffixAutomaton::take(uint32_t state, int32_t token) {
    ++states_[state].only.count;
    if (states_[state].num_edges > 1) {
        Edge* edge = find(state, token);
        ++edge->count;
        put_first(state, *edge, static_cast<uint32_t>(edge - edges(states_[state])));
    }
}

// --- texts ---------------------------------------------------------------------------------------

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
    const Edge* edge;
    while (!(edge = find(states_[place.state], token))) {
        if (place.state == root) {
            return {root, 0};
        }
        place.state = states_[place.state].link;
        place.length = states_[place.state].length;
    }
    return within_depth(edge->target, place.length + 1);
}

void SuffixAutomaton::append(int32_t token) {
    ++num_tokens_;
    if (Edge* known = find(last_, token)) {  // as an earlier text went on
        last_ = split(last_, known);
    } else {
        const uint32_t added = static_cast<uint32_t>(states_.size());
        add_state(states_[last_].length + 1, none);
        uint32_t state = last_;
        Edge* edge = nullptr;
        while (state != none && !(edge = find(state, token))) {
            add_edge(state, token, added);
            state = states_[state].link;
        }
        const uint32_t link = state == none ? root : split(state, edge);
        states_[added].link = link;
        last_ = added;
    }
    count(token);
}

// The state of a state's longest string with the edge's token after it, and of no longer ones.
uint32_t SuffixAutomaton::split(uint32_t state, Edge* edge) {
    const uint32_t target = edge->target, length = states_[state].length + 1;
    const int32_t token = edge->token;
    if (states_[target].length == length) {
        return target;
    }
    const uint32_t brief = static_cast<uint32_t>(states_.size());
    add_state(length, states_[target].link);
    copy_edges(target, brief);
    states_[target].link = brief;
    for (; state != none && (edge = find(state, token))->target == target;
         state = states_[state].link) {
        edge->target = brief;
    }
    if (active_.state == target && active_.length <= length) {
        active_.state = brief;
    }
    return brief;
}

void SuffixAutomaton::count(int32_t token) {
    for (uint32_t state = active_.state; state != none; state = states_[state].link) {
        take(state, token);
    }
    active_ = within_depth(find(active_.state, token)->target, active_.length + 1);
}

// --- cursors -------------------------------------------------------------------------------------

size_t SuffixCursor::num_unread(size_t length) const {
    if (is_own_) {
        return 0;
    }
    const bool is_stale = automaton_->num_tokens() != num_known_ || length < num_read_;
    return std::min<size_t>(is_stale ? length : length - num_read_, automaton_->max_depth());
}

void SuffixCursor::advance(const std::vector<int32_t>& tail, size_t length) {
    if (is_own_) {
        place_ = automaton_->end();
        return;
    }
    const size_t unread = num_unread(length);
    if (length - num_read_ != unread || automaton_->num_tokens() != num_known_) {
        place_ = {SuffixAutomaton::root, 0};
    }
    for (size_t i = tail.size() - unread; i < tail.size(); ++i) {
        place_ = automaton_->follow(place_, tail[i]);
    }
    num_read_ = length;
    num_known_ = automaton_->num_tokens();
}

// --- trees ---------------------------------------------------------------------------------------

namespace {

using Cursors = std::vector<const SuffixCursor*>;

void step_up(const SuffixAutomaton& automaton, SuffixPlace* place) {
    place->state = automaton.state(place->state).link;
    place->length = automaton.state(place->state).length;
}

// To the longest suffix of a place that was continued; to the root where there is none.
void rise(const SuffixAutomaton& automaton, SuffixPlace* place) {
    while (place->state != SuffixAutomaton::root && !automaton.state(place->state).only.count) {
        step_up(automaton, place);
    }
}

struct Continuation {
    int32_t token;
    double prob;
};

struct OpenNode {
    double path_prob;
    uint32_t order;
    int32_t parent, token;
    double prob;
    uint32_t depth, places;  // depth of the node, and where its parent's places are kept
};

bool is_less_likely(const OpenNode& a, const OpenNode& b) {
    return a.path_prob != b.path_prob ? a.path_prob < b.path_prob : a.order > b.order;
}

class TreeGrowth {
  public:
    TreeGrowth(const Cursors& cursors, const SuffixRules& rules, size_t length,
               const TargetNoise& noise, size_t max_nodes)
        : cursors_(cursors), width_(cursors.size()), rules_(rules), length_(length),
          noise_(noise), max_nodes_(max_nodes), contexts_(width_) {
        kept_.reserve(width_ * (max_nodes + 1));
    }

    TextDraft grow(uint32_t max_depth) {
        for (const SuffixCursor* cursor : cursors_) {
            kept_.push_back(cursor->place());
        }
        begin_contexts(0);
        const double most = rules_.max_spec_factor * contexts_[longest()].length;
        if (most < max_depth) {
            max_depth = std::min(max_depth, std::max(usual_depth, static_cast<uint32_t>(most)));
        }
        push(-1, 1.0, 1, 0);
        while (!heap_.empty() && draft_.tokens.size() < max_nodes_) {
            std::pop_heap(heap_.begin(), heap_.end(), is_less_likely);
            const OpenNode entry = heap_.back();
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
    const SuffixAutomaton& automaton(size_t i) const { return cursors_[i]->automaton(); }

    void descend(const OpenNode& entry) {
        const uint32_t index = static_cast<uint32_t>(kept_.size());
        for (size_t i = 0; i < width_; ++i) {
            kept_.push_back(automaton(i).follow(kept_[entry.places + i], entry.token));
            automaton(i).prefetch(kept_.back().state);
        }
        for (size_t i = 0; i < width_; ++i) {
            automaton(i).prefetch_around(kept_[index + i].state);
        }
        push(static_cast<int32_t>(draft_.tokens.size()) - 1, entry.path_prob, entry.depth + 1,
             index);
    }

    // The longest context of each place that was continued; at the root where there is none.
    void begin_contexts(size_t places) {
        for (size_t i = 0; i < width_; ++i) {
            contexts_[i] = kept_[places + i];
            rise(automaton(i), &contexts_[i]);
        }
    }

    // Which context is longest, the first of equals; they end with the root's length 0.
    size_t longest() const {
        size_t best = 0;
        for (size_t i = 1; i < width_; ++i) {
            best = contexts_[i].length > contexts_[best].length ? i : best;
        }
        return best;
    }

    void predict(size_t places) {
        candidates_.clear();
        begin_contexts(places);
        double rest = 1.0;
        for (size_t n = 0; n < most_contexts && rest >= least_rest; ++n) {
            const size_t i = longest();
            if (contexts_[i].length == 0) {
                return;
            }
            rest = blend(automaton(i), contexts_[i], rest);
            step_up(automaton(i), &contexts_[i]);
            rise(automaton(i), &contexts_[i]);
            automaton(i).prefetch_around(contexts_[i].state);
        }
    }

    // Adds what followed a context; returns what it leaves to shorter ones.
    double blend(const SuffixAutomaton& automaton, SuffixPlace place, double rest) {
        const SuffixAutomaton::State& state = automaton.state(place.state);
        const SuffixAutomaton::Edge* edge = automaton.edges(state);
        const double total = state.only.count;
        const bool unanimous = edge->count == state.only.count;
        const double other = (unanimous ? rules_.unanimous : rules_.disputed)[place.length];
        const double share = rest / (total + other), least = rules_.min_token_prob * total;
        double unseen = total;  // where less than `least` is unseen, nothing of it is enough
        const SuffixAutomaton::Edge* end = edge + std::min(state.num_edges, most_edges);
        for (; edge < end && unseen > 0.0 && unseen >= least; ++edge) {
            if (edge->count >= least) {
                add(edge->token, share * edge->count);
            }
            unseen -= edge->count;
        }
        return rest * (other / (total + other));
    }

    void add(int32_t token, double prob) {
        for (Continuation& candidate : candidates_) {
            if (candidate.token == token) {
                candidate.prob += prob;
                return;
            }
        }
        candidates_.push_back({token, prob});
    }

    // The likeliest first, and of equals the one that was added first.
    void rank() {
        for (size_t i = 1; i < candidates_.size(); ++i) {
            const Continuation candidate = candidates_[i];
            size_t at = i;
            for (; at && candidates_[at - 1].prob < candidate.prob; --at) {
                candidates_[at] = candidates_[at - 1];
            }
            candidates_[at] = candidate;
        }
    }

    void push(int32_t parent, double path_prob, uint32_t depth, uint32_t places) {
        predict(places);
        noise_.weigh(length_ + depth - 1, &candidates_);
        rank();
        const size_t count = std::min<size_t>(candidates_.size(), rules_.branching);
        for (size_t i = 0; i < count; ++i) {
            const double prob = candidates_[i].prob;
            if (path_prob * prob < rules_.min_path_prob) {
                return;
            }
            heap_.push_back(
                {path_prob * prob, order_++, parent, candidates_[i].token, prob, depth, places});
            std::push_heap(heap_.begin(), heap_.end(), is_less_likely);
        }
    }

    const Cursors& cursors_;
    const size_t width_;  // of the places of one node: one per cursor
    const SuffixRules& rules_;
    const size_t length_;  // of the text
    const TargetNoise& noise_;
    const size_t max_nodes_;
    uint32_t order_ = 0;
    std::vector<SuffixPlace> kept_;      // of every node that was descended to
    std::vector<SuffixPlace> contexts_;  // that are blended next
    std::vector<Continuation> candidates_;
    std::vector<OpenNode> heap_;
    TextDraft draft_;
};

}  // namespace

TextDraft grow_suffix_draft(const Cursors& cursors, const SuffixRules& rules, size_t length,
                            const TargetNoise& noise, size_t max_nodes, uint32_t max_depth) {
    if (cursors.empty() || !max_nodes || !max_depth) {
        return {};
    }
    return TreeGrowth(cursors, rules, length, noise, max_nodes).grow(max_depth);
}

void SuffixText::share(const std::vector<const SuffixAutomaton*>& automata) {
    cursors_.resize(1, cursors_[0]);
    for (const SuffixAutomaton* each : automata) {
        cursors_.emplace_back(each, false);
    }
}

size_t SuffixText::first_unread(size_t length) const {
    size_t first = std::min(own_.num_tokens(), length);
    for (const SuffixCursor& cursor : cursors_) {
        first = std::min(first, length - cursor.num_unread(length));
    }
    return first;
}

void SuffixText::read(const std::vector<int32_t>& tail, size_t length) {
    for (size_t i = own_.num_tokens() - (length - tail.size()); i < tail.size(); ++i) {
        own_.append(tail[i]);
    }
    for (SuffixCursor& cursor : cursors_) {
        cursor.advance(tail, length);
    }
}

size_t SuffixText::matched(const std::vector<int32_t>& tail, size_t length) {
    read(tail, length);
    uint32_t longest = 0;
    for (const SuffixCursor& cursor : cursors_) {
        SuffixPlace place = cursor.place();
        rise(cursor.automaton(), &place);
        longest = std::max(longest, place.length);
    }
    return longest;
}

TextDraft SuffixText::draft(const std::vector<int32_t>& tail, size_t length, size_t max_nodes,
                            size_t max_depth) {
    read(tail, length);
    Cursors cursors;
    for (const SuffixCursor& cursor : cursors_) {
        cursors.push_back(&cursor);
    }
    return grow_suffix_draft(cursors, *rules_, length, noise_, max_nodes,
                             static_cast<uint32_t>(max_depth));
}

}  // namespace paceline
