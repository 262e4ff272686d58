// Drafts by an n-gram model and the text of a request: paceline/proposers/ngram_model.py in
// C++, where it is described. Its arithmetic is that of the Python code, so that both draft alike.
// Reads the tables where they lie, in a file that may be anybody's: whatever it says, nothing is
// read beyond them. Knows no Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafts/draft.h"
#include "drafts/noise.h"
#include "drafts/places.h"

namespace paceline {

constexpr size_t kCachedContext = 4;
constexpr size_t kMostOccurrences = 16;
constexpr size_t kLongestContext = 4;

// XXH3-64 of up to four tokens as little-endian uint32.
uint64_t context_key(const uint32_t* tokens, size_t count);

template <typename T> struct Table {
    const T* data;
    size_t size;
};

struct NgramLevel {
    Table<uint64_t> keys;
    Table<uint32_t> buckets, starts;
    Table<float> lower_weights;
    Table<uint32_t> tokens;
    Table<float> values;

    // Whether the tables' sizes go together.
    bool is_sound() const;
    // Begin to read what finding a key reads first.
    void prefetch(uint64_t key) const { __builtin_prefetch(buckets.data + bucket_of(key)); }
    // Begin to read what a found context holds.
    void prefetch_at(int64_t context) const {
        __builtin_prefetch(lower_weights.data + context);
        const size_t begin = std::min<size_t>(starts.data[context], tokens.size);
        __builtin_prefetch(tokens.data + begin);
        __builtin_prefetch(values.data + begin);
    }
    // Index of the context with this key, -1 where there is none.
    int64_t find(uint64_t key) const;

  private:
    // buckets.size is a power of two and one more.
    size_t bucket_of(uint64_t key) const {
        return key >> (__builtin_clzll(buckets.size - 1) + 1);
    }
};

class TextCache {
  public:
    size_t size() const { return tokens_.size(); }
    void push(uint32_t token);
    // Begin to read what `followers` reads first.
    void prefetch(uint64_t key, size_t length) const {
        if (length <= kCachedContext) {
            latest_[length - 1].prefetch(key);
        }
    }
    // The tokens after the latest occurrences of a context, latest first; returns how many.
    size_t followers(uint64_t key, size_t length, uint32_t* found) const;

  private:
    std::vector<uint32_t> tokens_;
    PlaceTable latest_[kCachedContext];
    std::vector<uint32_t> before_[kCachedContext];
};

struct NgramLimits {
    size_t max_nodes, max_depth, branching;
    double min_prob;
};

// The tokens that may follow a context, found by token. Made once for many contexts.
class NgramChildren {
  public:
    struct Child {
        uint32_t token;
        double prob;
    };
    std::vector<Child> all;

    NgramChildren();
    void clear();
    // The place of a token's probability, and whether it is new and 0.
    double* find(uint32_t token, bool* is_new);

  private:
    static constexpr size_t kSlots = 1024;  // more than twice the most children

    struct Slot {
        uint32_t round, child;
    };
    std::vector<Slot> slots_;  // by hash of the token; of earlier rounds they are free
    uint32_t round_ = 0;
};

class NgramLookup {
  public:
    std::vector<NgramLevel> levels;
    Table<float> unigrams;
    bool is_backoff;

    // A text's end is its last kLongestContext tokens, or all of it; the cache may be null.
    // `length` is of the whole text.
    TextDraft draft(const TextCache* cache, const uint32_t* tail, size_t count, size_t length,
                    const TargetNoise& noise, const NgramLimits& limits) const;

  private:
    void children(const TextCache* cache, const uint32_t* tail, size_t count, size_t position,
                  const TargetNoise& noise, size_t most, NgramChildren* found) const;
    double hear_model(const NgramLevel& level, int64_t at, double rest,
                      NgramChildren* found) const;
    double hear_text(size_t length, const uint32_t* followers, size_t count, double rest,
                     NgramChildren* found) const;
    void add(uint32_t token, double value, double rest, NgramChildren* found) const;
};

// Drafts by an n-gram model and, of the text, by the last `window` to twice as many tokens. Of no
// token where `window` is 0.
class NgramText : public TextDrafter {
  public:
    NgramText(const NgramLookup* lookup, size_t window, size_t branching, double min_prob,
              const TargetNoise& noise)
        : lookup_(lookup), window_(window), branching_(branching), min_prob_(min_prob),
          noise_(noise) {}

    size_t first_unread(size_t length) const override;
    TextDraft draft(const std::vector<int32_t>& tail, size_t length, size_t max_nodes,
                    size_t max_depth) override;

  private:
    // Where the text begins that the cache is to have.
    size_t base_of(size_t length) const;

    const NgramLookup* lookup_;
    size_t window_, branching_;
    double min_prob_;
    TargetNoise noise_;
    size_t base_ = 0;
    TextCache cache_;
};

}  // namespace paceline
