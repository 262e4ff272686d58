// The sampler's Python side: what a request asks for, its penalties, and the calls for many rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bind/arrays.h"
#include "bind/sequences.h"
#include "kernels/kernels.h"
#include "sampling/sampling_rules.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using ColumnIds = Array<const int64_t, 1>;
constexpr size_t RELEASED_WORK = 1 << 14;  // floats; less is done with the interpreter's lock held
constexpr size_t SHARED_WORK = 1 << 16;    // floats; less is done on one thread

// --- rows of a call -------------------------------------------------------------------------------

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

int vocabulary(const Rows& logits) {
    if (logits.shape(1) < 1 || logits.shape(1) > (1u << 30)) {
        throw nb::value_error("logits need 1 to 2^30 columns");
    }
    return static_cast<int>(logits.shape(1));
}

const float* row_of(const Rows& logits, size_t row) {
    if (row >= logits.shape(0)) {
        throw nb::value_error("a row lies beyond the logits");
    }
    return logits.data() + row * logits.shape(1);
}

std::vector<Job> jobs_of(const Rows& logits, const nb::list& rules, const nb::list& tokens,
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
        prepare(row, list.size(), token_at(list), job, vocab);
    }
    return jobs;
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

nb::tuple argmax_rows(const Rows& logits) {
    const int rows = static_cast<int>(logits.shape(0)), vocab = vocabulary(logits);
    std::vector<int64_t> tokens(rows);
    std::vector<char> valid(rows);
    for_rows(rows, vocab, [&](int row) {
        valid[row] = kernels().sampler->argmax(logits.data() + static_cast<size_t>(row) * vocab,
                                               vocab, memory().scratch(vocab), &tokens[row]);
    });
    return tokens_and_validity(tokens, valid);
}

nb::tuple sample_tokens(const Rows& logits, const nb::list& rules, const nb::list& token_ids,
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

nb::tuple rank_candidates(const Rows& logits, const nb::list& rules, const nb::list& token_ids,
                          const nb::list& paths, const nb::list& masks, int k,
                          const std::optional<ColumnIds>& column_ids, int vocab_size) {
    const int width = vocabulary(logits), vocab = column_ids ? vocab_size : width;
    if (k < 1 || k > width || vocab < width) {
        throw nb::value_error("k is not in 1..columns, or there are more columns than tokens");
    }
    std::vector<Job> jobs = jobs_of(logits, rules, token_ids, paths, masks, {}, vocab);
    const int rows = static_cast<int>(jobs.size());
    if (column_ids) {
        const Columns columns =
            columns_of(column_ids->data(), column_ids->shape(0), width, vocab);
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
nb::list token_logprobs(const Rows& logits, const Ids& token_ids, const std::vector<int>& top) {
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

void bind_sampler(nb::module_& module) {
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

}  // namespace paceline
