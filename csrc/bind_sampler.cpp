// The sampler's Python side: what a request asks for, its penalties, and the calls for many rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "sampler.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ColumnIds = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = std::vector<int32_t>;

constexpr float MASKED = -std::numeric_limits<float>::infinity();
constexpr size_t RELEASED_WORK = 1 << 14;  // floats; less is done with the interpreter's lock held
constexpr size_t SHARED_WORK = 1 << 16;    // floats; less is done on one thread

void check_ids(const Ids& ids, int vocab, const char* whose) {
    for (const int32_t id : ids) {
        if (id < 0 || id >= vocab) {
            throw nb::value_error((std::string(whose) + " hold token " + std::to_string(id) +
                                   "; the logits' vocabulary is 0 to " + std::to_string(vocab - 1))
                                      .c_str());
        }
    }
}

// How often each token occurs. Follows a list that grows at its end.
class TokenCounts {
  public:
    struct Entry {
        int32_t id, emitted;
    };

    // `prompt_counts`: whether tokens of the prompt are wanted at all.
    void follow(const nb::list& tokens, size_t prompt_len, bool prompt_counts) {
        const size_t length = tokens.size();
        if (length < length_ || (length_ && nb::cast<int32_t>(tokens[length_ - 1]) != last_)) {
            *this = TokenCounts();  // not the list that it was
        }
        for (size_t i = prompt_counts ? length_ : std::max(length_, prompt_len); i < length; ++i) {
            const int32_t id = nb::cast<int32_t>(tokens[i]);
            const auto [place, fresh] = places_.try_emplace(id, entries_.size());
            if (fresh) {
                entries_.push_back({id, 0});
                lowest_ = std::min(lowest_, id);
                highest_ = std::max(highest_, id);
            }
            entries_[place->second].emitted += i >= prompt_len;
        }
        length_ = length;
        last_ = length ? nb::cast<int32_t>(tokens[length - 1]) : 0;
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
// is that of docs/losslessness.md; the arithmetic is float32, as in runtime/sampler.py.
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

// --- rows of a call -------------------------------------------------------------------------------

// The token of each column of the logits, where they have not every token.
struct Columns {
    const int64_t* ids = nullptr;
    int count = 0;
};

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

Memory& memory() {
    thread_local Memory found;
    return found;
}

// Calls work(row) for every row; several threads share them where that pays.
template <typename Work> void for_rows(int rows, int vocab, const Work& work) {
    const size_t size = static_cast<size_t>(rows) * vocab;
    if (size < RELEASED_WORK) {
        for (int row = 0; row < rows; ++row) {
            work(row);
        }
        return;
    }
    const nb::gil_scoped_release released;
    if (rows == 1 || size < SHARED_WORK) {
        for (int row = 0; row < rows; ++row) {
            work(row);
        }
        return;
    }
    pool().each(rows, [&](int row, int) { work(row); });
}

int vocabulary(const Logits& logits) {
    if (logits.shape(1) < 1 || logits.shape(1) > (1u << 30)) {
        throw nb::value_error("logits need 1 to 2^30 columns");
    }
    return static_cast<int>(logits.shape(1));
}

const float* row_of(const Logits& logits, size_t row) {
    if (row >= logits.shape(0)) {
        throw nb::value_error("a row lies beyond the logits");
    }
    return logits.data() + row * logits.shape(1);
}

std::vector<Job> jobs_of(const Logits& logits, const nb::list& rules, const nb::list& tokens,
                         const nb::list& paths, const nb::list& masks,
                         const std::optional<std::vector<size_t>>& at, int vocab) {
    const size_t count = rules.size();
    if (tokens.size() != count || paths.size() != count || masks.size() != count ||
        (at ? at->size() : logits.shape(0)) != count) {
        throw nb::value_error("rules, token lists, paths, masks and rows of logits differ in number");
    }
    std::vector<Job> jobs(count);
    for (size_t i = 0; i < count; ++i) {
        auto& row = nb::cast<SamplingRules&>(rules[i]);
        const nb::list list = nb::cast<nb::list>(tokens[i]);
        Job& job = jobs[i];
        job = {row_of(logits, at ? (*at)[i] : i), &row, nb::cast<Ids>(paths[i]), 0, {}, {}};
        if (!masks[i].is_none()) {
            const nb::bytes mask = nb::cast<nb::bytes>(masks[i]);  // the list keeps it alive
            job.mask = {mask.c_str(), mask.size()};
        }
        job.length = list.size() + job.path.size();
        if (row.penalises()) {
            check_ids(job.path, vocab, "paths");
            row.counts.follow(list, row.prompt_len, row.repeats());
        }
        if (row.edits(job.length)) {
            row.check(vocab);
        }
    }
    return jobs;
}

// The k best columns of a row whose logits are what they will be.
int best_columns(const float* logits, int columns, const int64_t* tokens, const Job& job, int k,
                 const SamplerScratch& scratch, int64_t* ids, double* scores) {
    const SamplerKernels& sampler = *kernels().sampler;
    const SamplingRules& rules = *job.rules;
    if (rules.is_greedy() && k == 1) {
        const bool valid = sampler.argmax(logits, columns, scratch, ids);
        *scores = logits[*ids];
        return valid ? 1 : -1;
    }
    if (rules.is_greedy()) {
        return sampler.top(logits, columns, k, scratch, ids, scores);
    }
    const NoiseKey key{rules.seed, static_cast<uint32_t>(job.length), rules.sample};
    return sampler.perturbed_top(logits, columns, tokens, rules.filter, key, k, scratch, ids,
                                 scores);
}

// The k best of one row. Returns how many there are, or -1; `edited` is where the logits ended up.
int best_of(const Job& job, int vocab, int k, int64_t* ids, double* scores, const float** edited) {
    const SamplerScratch scratch = memory().scratch(vocab);
    const Columns& columns = job.columns;
    *edited = job.logits;
    if (columns.ids && !job.is_edited()) {
        const int found =
            best_columns(job.logits, columns.count, columns.ids, job, k, scratch, ids, scores);
        std::transform(ids, ids + std::max(found, 0), ids,
                       [&](int64_t column) { return columns.ids[column]; });
        return found;
    }
    if (columns.ids) {
        *edited = memory().spread(job.logits, columns, vocab);
    }
    if (job.is_edited()) {
        float* z = memory().edited.data();
        job.rules->edit(*edited, vocab, job.path, job.length, z);
        if (job.has_mask()) {
            job.apply_mask(vocab, z);  // last is as good as first: no edit brings -inf back
        }
        *edited = z;
    }
    return best_columns(*edited, vocab, nullptr, job, k, scratch, ids, scores);
}

nb::tuple tokens_and_validity(const std::vector<int64_t>& tokens, const std::vector<char>& valid) {
    nb::list first, second;
    for (size_t i = 0; i < tokens.size(); ++i) {
        first.append(tokens[i]);
        second.append(valid[i] != 0);
    }
    return nb::make_tuple(first, second);
}

// --- the calls ------------------------------------------------------------------------------------

nb::tuple argmax_rows(const Logits& logits) {
    const int rows = static_cast<int>(logits.shape(0)), vocab = vocabulary(logits);
    std::vector<int64_t> tokens(rows);
    std::vector<char> valid(rows);
    for_rows(rows, vocab, [&](int row) {
        valid[row] = kernels().sampler->argmax(logits.data() + static_cast<size_t>(row) * vocab,
                                               vocab, memory().scratch(vocab), &tokens[row]);
    });
    return tokens_and_validity(tokens, valid);
}

nb::tuple sample_tokens(const Logits& logits, const nb::list& rules, const nb::list& token_ids,
                        const nb::list& paths, const nb::list& masks,
                        const std::optional<std::vector<size_t>>& at) {
    const int vocab = vocabulary(logits);
    const std::vector<Job> jobs = jobs_of(logits, rules, token_ids, paths, masks, at, vocab);
    const int rows = static_cast<int>(jobs.size());
    std::vector<int64_t> tokens(rows);
    std::vector<char> valid(rows);
    for_rows(rows, vocab, [&](int row) {
        double score;
        const float* edited;
        valid[row] = best_of(jobs[row], vocab, 1, &tokens[row], &score, &edited) > 0;
        if (!valid[row]) {
            kernels().sampler->argmax(edited, vocab, memory().scratch(vocab), &tokens[row]);
        }
    });
    return tokens_and_validity(tokens, valid);
}

template <typename T> nb::ndarray<nb::numpy, T> to_array(std::vector<T>&& values, size_t columns) {
    auto* kept = new std::vector<T>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(kept->data(), {kept->size() / columns, columns}, owner);
}

Columns columns_of(const ColumnIds& ids, size_t count, int vocab) {
    const int64_t* data = ids.data();
    const bool inside = std::all_of(data, data + ids.shape(0),
                                    [&](int64_t id) { return id >= 0 && id < vocab; });
    if (ids.shape(0) != count || !inside) {
        throw nb::value_error("the tokens of the columns do not fit the logits and the vocabulary");
    }
    return {data, static_cast<int>(count)};
}

nb::tuple rank_candidates(const Logits& logits, const nb::list& rules, const nb::list& token_ids,
                          const nb::list& paths, const nb::list& masks, int k,
                          const std::optional<ColumnIds>& column_ids, int vocab_size) {
    const int width = vocabulary(logits), vocab = column_ids ? vocab_size : width;
    if (k < 1 || k > width || vocab < width) {
        throw nb::value_error("k is not in 1..columns, or there are more columns than tokens");
    }
    std::vector<Job> jobs = jobs_of(logits, rules, token_ids, paths, masks, {}, vocab);
    const int rows = static_cast<int>(jobs.size());
    if (column_ids) {
        const Columns columns = columns_of(*column_ids, width, vocab);
        for (Job& job : jobs) {
            job.columns = columns;
        }
    }
    const size_t size = static_cast<size_t>(rows) * k;
    std::vector<int64_t> tokens(size);
    std::vector<double> scores(size, MASKED);
    for_rows(rows, vocab, [&](int row) {
        const float* edited;
        const size_t first = static_cast<size_t>(row) * k;
        if (best_of(jobs[row], vocab, k, &tokens[first], &scores[first], &edited) < 0) {
            std::fill_n(&scores[first], k, std::numeric_limits<double>::quiet_NaN());
        }
    });
    return nb::make_tuple(to_array(std::move(tokens), k), to_array(std::move(scores), k));
}

// For each row: log-probability and rank of its token, and its `top[row]` best as (id, logprob).
nb::list token_logprobs(const Logits& logits, const Ids& token_ids, const std::vector<int>& top) {
    const int rows = static_cast<int>(logits.shape(0)), vocab = vocabulary(logits);
    if (token_ids.size() != logits.shape(0) || top.size() != logits.shape(0)) {
        throw nb::value_error("token ids, counts and rows of logits differ in number");
    }
    check_ids(token_ids, vocab, "token ids");
    struct Found {
        float own;
        int rank;
        std::vector<int64_t> ids;
        std::vector<double> best;
    };
    std::vector<Found> found(rows);
    for_rows(rows, vocab, [&](int row) {
        const SamplerKernels& sampler = *kernels().sampler;
        const SamplerScratch scratch = memory().scratch(vocab);
        float* table = memory().edited.data();
        sampler.log_softmax(logits.data() + static_cast<size_t>(row) * vocab, vocab, scratch, table);
        Found& one = found[row];
        one.own = table[token_ids[row]];
        one.rank = sampler.count_above(table, vocab, one.own) + 1;
        const int count = std::min(std::max(top[row], 0), vocab);
        one.ids.resize(count);
        one.best.resize(count);
        if (count && sampler.top(table, vocab, count, scratch, one.ids.data(),
                                 one.best.data()) < 0) {
            std::fill(one.best.begin(), one.best.end(), std::nan(""));
        }
    });
    nb::list result;
    for (const Found& one : found) {
        nb::list best;
        for (size_t i = 0; i < one.ids.size(); ++i) {
            best.append(nb::make_tuple(one.ids[i], one.best[i]));
        }
        result.append(nb::make_tuple(static_cast<double>(one.own), one.rank, nb::tuple(best)));
    }
    return result;
}

// x of `count` tokens from `first` on.
nb::ndarray<nb::numpy, uint32_t> noise_words(uint64_t seed, uint32_t position, uint32_t sample,
                                             int first, int count) {
    if (first < 0 || count < 1 || first > (1 << 30) - count) {
        throw nb::value_error("the tokens are not in 0..2^30");
    }
    std::vector<uint32_t> words(count);
    for (int i = 0; i < count;) {
        uint32_t x[SAMPLER_BLOCK];
        const int at = (first + i) % SAMPLER_BLOCK;
        const int fits = std::min(count - i, SAMPLER_BLOCK - at);
        kernels().sampler->noise_words({seed, position, sample}, (first + i) / SAMPLER_BLOCK, x);
        std::copy_n(x + at, fits, words.begin() + i);
        i += fits;
    }
    return to_array(std::move(words), count);
}

void make_rules(SamplingRules* rules, double temperature, int top_k, double top_p, double log_min_p,
                uint64_t seed, uint32_t sample_index, size_t prompt_len, size_t min_tokens,
                float repetition_penalty, float presence_penalty, float frequency_penalty,
                Ids bias_ids, std::vector<float> biases, std::optional<Ids> allowed, Ids banned,
                Ids ending) {
    if (bias_ids.size() != biases.size()) {
        throw nb::value_error("bias ids and biases differ in number");
    }
    new (rules) SamplingRules{{temperature, top_k, top_p, log_min_p},
                              seed,
                              sample_index,
                              prompt_len,
                              min_tokens,
                              repetition_penalty,
                              presence_penalty,
                              frequency_penalty,
                              std::move(bias_ids),
                              std::move(banned),
                              std::move(ending),
                              std::move(biases),
                              std::move(allowed),
                              {}};
}

}  // namespace
}  // namespace paceline

void bind_sampler(nb::module_& module) {
    using namespace paceline;
    using nb::arg;
    nb::class_<SamplingRules>(module, "SamplingRules")
        .def("__init__", &make_rules, nb::kw_only(), arg("temperature"), arg("top_k"),
             arg("top_p"), arg("log_min_p"), arg("seed"), arg("sample_index"), arg("prompt_len"),
             arg("min_tokens"), arg("repetition_penalty"), arg("presence_penalty"),
             arg("frequency_penalty"), arg("bias_ids"), arg("biases"), arg("allowed").none(),
             arg("banned"), arg("ending"));
    module.def("argmax_rows", &argmax_rows, arg("logits"));
    module.def("sample_tokens", &sample_tokens, arg("logits"), arg("rules"), arg("token_ids"),
               arg("paths"), arg("masks"), arg("at").none());
    module.def("rank_candidates", &rank_candidates, arg("logits"), arg("rules"), arg("token_ids"),
               arg("paths"), arg("masks"), arg("k"), arg("column_ids").none() = nb::none(),
               arg("vocab_size") = 0);
    module.def("token_logprobs", &token_logprobs, arg("logits"), arg("token_ids"), arg("top"));
    module.def("noise_words", &noise_words, arg("seed"), arg("position"), arg("sample_index"),
               arg("first"), arg("count"));
}
