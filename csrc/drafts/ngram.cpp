#include "drafts/ngram.h"

#include <algorithm>
#include <queue>

namespace paceline {
namespace {

constexpr size_t kMostContinuations = 64;
// By length of the context, from 1 on: what speaks against the text's own continuations.
constexpr double kUnanimous[kCachedContext] = {4.0, 1.5, 1.0, 1.0};
constexpr double kDisputed[kCachedContext] = {2.0, 1.2, 0.7, 0.6};  // for each different one

// XXH3's mixing of inputs of 4 to 8 and of 9 to 16 bytes, by its specification, with the words of
// its standard secret already combined.
constexpr uint64_t kFlipShort = 0x1cad21f72c81017cull ^ 0xdb979083e96dd4deull;
constexpr uint64_t kFlipLow = 0x1f67b3b7a4a44072ull ^ 0x78e5c0cc4ee679cbull;
constexpr uint64_t kFlipHigh = 0x2172ffcc7dd05a82ull ^ 0x8e2443f7744608b8ull;

uint64_t rotate(uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

uint64_t reverse_bytes(uint64_t x) {
    x = (x & 0x00ff00ff00ff00ffull) << 8 | (x >> 8 & 0x00ff00ff00ff00ffull);
    x = (x & 0x0000ffff0000ffffull) << 16 | (x >> 16 & 0x0000ffff0000ffffull);
    return x << 32 | x >> 32;
}

// The two halves of a 128-bit product, combined.
uint64_t folded_product(uint64_t a, uint64_t b) {
    const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
    const uint64_t low = a0 * b0, cross = a1 * b0 + (low >> 32);
    const uint64_t middle = a0 * b1 + (cross & 0xffffffffu);
    return (a1 * b1 + (cross >> 32) + (middle >> 32)) ^ (middle << 32 | (low & 0xffffffffu));
}

uint64_t join(uint32_t low, uint32_t high) {
    return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace

uint64_t context_key(const uint32_t* tokens, size_t count) {
    const uint64_t bytes = 4 * count;
    if (count <= 2) {
        // The first word is the upper half; of four bytes both words are the same.
        uint64_t x = join(tokens[count - 1], tokens[0]) ^ kFlipShort;
        x ^= rotate(x, 49) ^ rotate(x, 24);
        x *= 0x9fb21c651e98df25ull;
        x ^= (x >> 35) + bytes;
        x *= 0x9fb21c651e98df25ull;
        return x ^ x >> 28;
    }
    const uint64_t low = join(tokens[0], tokens[1]) ^ kFlipLow;
    const uint64_t high = join(tokens[count - 2], tokens[count - 1]) ^ kFlipHigh;
    uint64_t x = bytes + reverse_bytes(low) + high + folded_product(low, high);
    x ^= x >> 37;
    x *= 0x165667919e3779f9ull;
    return x ^ x >> 32;
}

bool NgramLevel::is_sound() const {
    const size_t buckets_less_one = buckets.size - 1;
    return buckets.size >= 3 && (buckets_less_one & (buckets_less_one - 1)) == 0 &&
           starts.size == keys.size + 1 && lower_weights.size == keys.size &&
           tokens.size == values.size;
}

int64_t NgramLevel::find(uint64_t key) const {
    const size_t bucket = bucket_of(key);
    const size_t end = std::min<size_t>(buckets.data[bucket + 1], keys.size);
    const size_t begin = std::min<size_t>(buckets.data[bucket], end);
    const uint64_t* const last = keys.data + end;
    const uint64_t* const at = std::lower_bound(keys.data + begin, last, key);
    return at != last && *at == key ? at - keys.data : -1;
}

void TextCache::push(uint32_t token) {
    const size_t at = tokens_.size();
    for (size_t length = 1; length <= kCachedContext; ++length) {
        uint32_t before = 0;
        if (at >= length) {
            const uint64_t key = context_key(tokens_.data() + at - length, length);
            before = latest_[length - 1].exchange(key, static_cast<uint32_t>(at));
        }
        before_[length - 1].push_back(before);
    }
    tokens_.push_back(token);
}

size_t TextCache::followers(uint64_t key, size_t length, uint32_t* found) const {
    if (length > kCachedContext) {
        return 0;
    }
    const std::vector<uint32_t>& before = before_[length - 1];
    size_t count = 0;
    uint32_t at = latest_[length - 1].find(key);
    for (; at && count < kMostOccurrences; at = before[at]) {
        found[count++] = tokens_[at];
    }
    return count;
}

NgramChildren::NgramChildren() : slots_(kSlots) {}

void NgramChildren::clear() {
    all.clear();
    ++round_;
}

double* NgramChildren::find(uint32_t token, bool* is_new) {
    size_t at = token * 0x9e3779b1u >> 22;
    while (slots_[at].round == round_ && all[slots_[at].child].token != token) {
        at = (at + 1) % kSlots;
    }
    *is_new = slots_[at].round != round_;
    if (*is_new) {
        slots_[at] = {round_, static_cast<uint32_t>(all.size())};
        all.push_back({token, 0.0});
    }
    return &all[slots_[at].child].prob;
}

void NgramLookup::add(uint32_t token, double value, double rest, NgramChildren* found) const {
    bool is_new = false;
    double* const prob = found->find(token, &is_new);
    if (is_new) {
        const double unigram = token < unigrams.size ? unigrams.data[token] : 0.0;
        *prob = rest * unigram + value;
    } else {
        *prob += value;
    }
}

double NgramLookup::hear_model(const NgramLevel& level, int64_t at, double rest,
                               NgramChildren* found) const {
    const double left = level.lower_weights.data[at];
    for (NgramChildren::Child& child : found->all) {
        child.prob *= left;
    }
    const size_t begin = std::min<size_t>(level.starts.data[at], level.tokens.size);
    const size_t end = std::min<size_t>(level.starts.data[at + 1], level.tokens.size);
    for (size_t i = begin; i < end && i < begin + kMostContinuations; ++i) {
        const uint32_t token = level.tokens.data[i];
        if (is_backoff) {
            bool is_new = false;
            *found->find(token, &is_new) = level.values.data[i];
        } else {
            add(token, level.values.data[i], rest * left, found);
        }
    }
    return left;
}

double NgramLookup::hear_text(size_t length, const uint32_t* followers, size_t count, double rest,
                              NgramChildren* found) const {
    uint32_t tokens[kMostOccurrences];
    int counts[kMostOccurrences];
    size_t distinct = 0;
    for (size_t i = 0; i < count; ++i) {
        const size_t at = std::find(tokens, tokens + distinct, followers[i]) - tokens;
        if (at == distinct) {
            tokens[distinct] = followers[i];
            counts[distinct++] = 0;
        }
        ++counts[at];
    }
    const double other = distinct == 1 ? kUnanimous[length - 1]
                                       : kDisputed[length - 1] * static_cast<double>(distinct);
    const double total = static_cast<double>(count) + other;
    const double left = other / total;
    for (NgramChildren::Child& child : found->all) {
        child.prob *= left;
    }
    for (size_t i = 0; i < distinct; ++i) {
        add(tokens[i], counts[i] / total, rest * left, found);
    }
    return left;
}

void NgramLookup::children(const TextCache* cache, const uint32_t* tail, size_t count,
                           size_t position, const TargetNoise& noise, size_t most,
                           NgramChildren* found) const {
    uint32_t followers[kMostOccurrences];
    double rest = 1.0;
    found->clear();
    // The places are far apart: all are looked for before anything is read there.
    uint64_t keys[kLongestContext];
    int64_t places[kLongestContext];
    const size_t num_levels = std::min(count, levels.size());
    for (size_t i = 0; i < count; ++i) {
        keys[i] = context_key(tail + count - 1 - i, i + 1);
        if (i < num_levels) {
            levels[i].prefetch(keys[i]);
        }
        if (cache) {
            cache->prefetch(keys[i], i + 1);
        }
    }
    for (size_t i = 0; i < num_levels; ++i) {
        places[i] = levels[i].find(keys[i]);
        if (places[i] >= 0) {
            levels[i].prefetch_at(places[i]);
        }
    }
    for (size_t length = 1; length <= count; ++length) {
        if (length <= num_levels && places[length - 1] >= 0) {
            rest *= hear_model(levels[length - 1], places[length - 1], rest, found);
        }
        const size_t known = cache ? cache->followers(keys[length - 1], length, followers) : 0;
        if (known) {
            rest *= hear_text(length, followers, known, rest, found);
        }
    }
    std::vector<NgramChildren::Child>& all = found->all;
    noise.weigh(position, &all);
    const size_t kept = std::min(most, all.size());
    std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept), all.end(),
                      [](const NgramChildren::Child& a, const NgramChildren::Child& b) {
                          return a.prob != b.prob ? a.prob > b.prob : a.token < b.token;
                      });
    all.resize(kept);
    double total = 0.0;
    for (const NgramChildren::Child& child : all) {
        total += child.prob;
    }
    if (total > 1.0) {
        for (NgramChildren::Child& child : all) {
            child.prob /= total;
        }
    }
}

TextDraft NgramLookup::draft(const TextCache* cache, const uint32_t* tail, size_t count,
                             size_t length, const TargetNoise& noise,
                             const NgramLimits& limits) const {
    struct Node {
        double path_prob;
        uint64_t order;
        int32_t parent;
        double prob;
        uint32_t token;
        size_t depth;
    };
    const auto ranks_behind = [](const Node& a, const Node& b) {
        return a.path_prob != b.path_prob ? a.path_prob < b.path_prob : a.order > b.order;
    };
    std::priority_queue<Node, std::vector<Node>, decltype(ranks_behind)> heap(ranks_behind);
    TextDraft draft;
    NgramChildren found;
    uint64_t order = 0;
    const auto push = [&](int32_t parent, double path_prob, size_t depth) {
        // The context: the nodes down to the parent, and before them the end of the text.
        uint32_t context[kLongestContext];
        size_t known = 0;
        for (int32_t at = parent; at >= 0 && known < kLongestContext; at = draft.parents[at]) {
            context[kLongestContext - ++known] = static_cast<uint32_t>(draft.tokens[at]);
        }
        for (size_t i = count; i > 0 && known < kLongestContext; --i) {
            context[kLongestContext - ++known] = tail[i - 1];
        }
        children(cache, context + kLongestContext - known, known, length + depth - 1, noise,
                 limits.branching, &found);
        for (const NgramChildren::Child& child : found.all) {
            if (path_prob * child.prob < limits.min_prob) {
                break;
            }
            heap.push({path_prob * child.prob, order++, parent, child.prob, child.token, depth});
        }
    };
    push(-1, 1.0, 1);
    while (!heap.empty() && draft.tokens.size() < limits.max_nodes) {
        const Node best = heap.top();
        heap.pop();
        draft.tokens.push_back(best.token);
        draft.parents.push_back(best.parent);
        draft.probs.push_back(best.prob);
        if (best.depth < limits.max_depth && draft.tokens.size() < limits.max_nodes) {
            push(static_cast<int32_t>(draft.tokens.size()) - 1, best.path_prob, best.depth + 1);
        }
    }
    return draft;
}

size_t NgramText::base_of(size_t length) const {
    const bool is_current = cache_.size() && length - base_ <= 2 * window_;
    return is_current ? base_ : length - std::min(window_, length);
}

size_t NgramText::first_unread(size_t length) const {
    const size_t base = base_of(length), read = base == base_ ? base_ + cache_.size() : base;
    return std::min(window_ ? read : length, length - std::min(kLongestContext, length));
}

TextDraft NgramText::draft(const std::vector<int32_t>& tail, size_t length, size_t max_nodes,
                           size_t max_depth) {
    const size_t base = base_of(length), first = length - tail.size();
    if (window_) {
        if (base != base_) {
            base_ = base;
            cache_ = TextCache();
        }
        for (size_t i = base_ + cache_.size() - first; i < tail.size(); ++i) {
            cache_.push(static_cast<uint32_t>(tail[i]));
        }
    }
    const size_t count = std::min(kLongestContext, length);
    const std::vector<uint32_t> context(tail.end() - static_cast<std::ptrdiff_t>(count),
                                        tail.end());
    return lookup_->draft(window_ ? &cache_ : nullptr, context.data(), count, length, noise_,
                          {max_nodes, max_depth, branching_, min_prob_});
}

}  // namespace paceline
