// How one request is sampled, as its rows of logits meet it: edits, filters and noise. Knows no
// Python: a request's tokens are asked of the caller.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/sampler.h"

namespace paceline {

using Ids = std::vector<int32_t>;

constexpr float MASKED = -std::numeric_limits<float>::infinity();

// Raises std::invalid_argument where a token is none of the vocabulary.
void check_ids(const Ids& ids, int vocab, const char* whose);

// How often each token occurs. Follows tokens that grow in number at their end.
class TokenCounts {
  public:
    struct Entry {
        int32_t id, emitted;
    };

    // `prompt_counts`: whether tokens of the prompt are wanted at all.
    template <typename TokenAt>
    void follow(size_t length, const TokenAt& token_at, size_t prompt_len, bool prompt_counts) {
        if (length < length_ || (length_ && token_at(length_ - 1) != last_)) {
            *this = TokenCounts();  // not the tokens that they were
        }
        for (size_t i = prompt_counts ? length_ : std::max(length_, prompt_len); i < length; ++i) {
            const int32_t id = token_at(i);
            const auto [place, fresh] = places_.try_emplace(id, entries_.size());
            if (fresh) {
                entries_.push_back({id, 0});
                lowest_ = std::min(lowest_, id);
                highest_ = std::max(highest_, id);
            }
            entries_[place->second].emitted += i >= prompt_len;
        }
        length_ = length;
        last_ = length ? token_at(length - 1) : 0;
    }

    const std::vector<Entry>& entries() const { return entries_; }
    int emitted(int32_t id) const {
        const auto place = places_.find(id);
        return place == places_.end() ? 0 : entries_[place->second].emitted;
    }
    void check(int vocab) const {
        if (!entries_.empty()) {
            check_ids({lowest_, highest_}, vocab, "prompt and output");
        }
    }

  private:
    std::unordered_map<int32_t, size_t> places_;
    std::vector<Entry> entries_;
    int32_t lowest_ = std::numeric_limits<int32_t>::max(), highest_ = -1, last_ = 0;
    size_t length_ = 0;
};

// How one request is sampled, and what its penalties have counted so far. The order of the edits
// is that of docs/losslessness.md; the arithmetic is float32, as in sampling/sampler.py.
struct SamplingRules {
    SamplerFilter filter;
    uint64_t seed;
    uint32_t sample;
    size_t prompt_len, min_tokens;
    float repetition, presence, frequency;
    Ids bias_ids, banned, ending;
    std::vector<float> biases;
    std::optional<Ids> allowed;
    TokenCounts counts;

    bool is_greedy() const { return filter.temperature == 0.0; }
    bool repeats() const { return repetition != 1.0f; }
    bool penalises() const { return repeats() || presence != 0.0f || frequency != 0.0f; }
    bool is_too_short(size_t length) const { return length - prompt_len < min_tokens; }
    bool edits(size_t length) const {
        return penalises() || !bias_ids.empty() || !banned.empty() || allowed ||
               is_too_short(length);
    }

    void check(int vocab) const {
        check_ids(bias_ids, vocab, "logit_bias");
        check_ids(banned, vocab, "banned_token_ids");
        check_ids(ending, vocab, "tokens that end the text");
        if (allowed) {
            check_ids(*allowed, vocab, "allowed_token_ids");
        }
        counts.check(vocab);
    }

    // z = raw, edited; `length` counts the path.
    void edit(const float* raw, int vocab, const Ids& path, size_t length, float* z) const {
        std::memcpy(z, raw, sizeof(float) * vocab);
        if (penalises()) {
            penalise(raw, path, z);
        }
        for (size_t i = 0; i < bias_ids.size(); ++i) {
            z[bias_ids[i]] += biases[i];
        }
        mask(banned, z);
        if (allowed) {
            std::vector<float> kept;
            for (const int32_t id : *allowed) {
                kept.push_back(z[id]);
            }
            std::fill_n(z, vocab, MASKED);
            for (size_t i = 0; i < kept.size(); ++i) {
                z[(*allowed)[i]] = kept[i];
            }
        }
        if (is_too_short(length)) {
            mask(ending, z);
        }
    }

  private:
    static void mask(const Ids& ids, float* z) {
        for (const int32_t id : ids) {
            z[id] = MASKED;
        }
    }
    void penalise(const float* raw, const Ids& path, float* z) const {
        for (const TokenCounts::Entry& entry : counts.entries()) {
            z[entry.id] = penalised(raw[entry.id], entry.emitted);
        }
        for (const int32_t id : path) {
            const auto more = static_cast<int>(std::count(path.begin(), path.end(), id));
            z[id] = penalised(raw[id], counts.emitted(id) + more);
        }
    }
    float penalised(float value, int emitted) const {
        if (repeats()) {
            value = value > 0.0f ? value / repetition : value * repetition;
        }
        if (emitted) {
            value -= frequency * static_cast<float>(emitted);
            value -= presence;
        }
        return value;
    }
};

// The token of each column of the logits, where they have not every token.
struct Columns {
    const int64_t* ids = nullptr;
    int count = 0;
};

// Raises std::invalid_argument where `count` ids are not one token of the vocabulary for each of the columns.
Columns columns_of(const int64_t* ids, size_t count, int columns, int vocab);

struct Job {
    const float* logits;
    const SamplingRules* rules;
    Ids path;
    size_t length;          // tokens before the one to be emitted, path included
    std::string_view mask;  // one bit per token, set where it is allowed; without data: all are
    Columns columns;        // without ids: column i is token i

    bool is_edited() const { return has_mask() || rules->edits(length); }
    bool has_mask() const { return mask.data() != nullptr; }

    // Tokens beyond the mask's end are not allowed either.
    void apply_mask(int vocab, float* z) const {
        for (int first = 0; first < vocab; first += 8) {
            const size_t at = static_cast<size_t>(first) / 8;
            const auto bits = at < mask.size() ? static_cast<unsigned char>(mask[at]) : 0u;
            if (bits == 0xFFu) {
                continue;
            }
            const int end = std::min(vocab - first, 8);
            for (int i = 0; i < end; ++i) {
                if (!(bits >> i & 1u)) {
                    z[first + i] = MASKED;
                }
            }
        }
    }
};

// Memory of one thread; it only grows.
struct Memory {
    std::vector<float> block_max, edited, whole;
    std::vector<Candidate> list;

    SamplerScratch scratch(int vocab) {
        const size_t size = vocab;
        if (list.size() < size) {
            block_max.resize(sampler_blocks(vocab));
            edited.resize(size);
            list.resize(size);
        }
        return {block_max.data(), list.data()};
    }

    // The logits of all tokens: MASKED where there is no column.
    const float* spread(const float* logits, const Columns& columns, int vocab) {
        whole.assign(vocab, MASKED);
        for (int i = 0; i < columns.count; ++i) {
            whole[columns.ids[i]] = logits[i];
        }
        return whole.data();
    }
};

Memory& memory();

// What a row of this request needs before its jobs: tokens counted, and ids within the vocabulary.
// Raises std::invalid_argument where they are not. `token_at(i)` is the request's i-th token.
template <typename TokenAt>
void prepare(SamplingRules& rules, size_t length, const TokenAt& token_at, const Job& job,
             int vocab) {
    if (rules.penalises()) {
        check_ids(job.path, vocab, "paths");
        rules.counts.follow(length, token_at, rules.prompt_len, rules.repeats());
    }
    if (rules.edits(job.length)) {
        rules.check(vocab);
    }
}

// The k best of one row. Returns how many there are, or -1; `edited` is where the logits ended up.
int best_of(const Job& job, int vocab, int k, int64_t* ids, double* scores, const float** edited);

}  // namespace paceline
