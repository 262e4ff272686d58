#include "sampling/sampling_rules.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/kernels.h"

namespace paceline {

void check_ids(const Ids& ids, int vocab, const char* whose) {
    for (const int32_t id : ids) {
        if (id < 0 || id >= vocab) {
            throw std::invalid_argument(std::string(whose) + " hold token " + std::to_string(id) +
                                        "; the logits' vocabulary is 0 to " +
                                        std::to_string(vocab - 1));
        }
    }
}

Columns columns_of(const int64_t* ids, size_t count, int columns, int vocab) {
    const bool inside =
        std::all_of(ids, ids + count, [&](int64_t id) { return id >= 0 && id < vocab; });
    if (count != static_cast<size_t>(columns) || !inside) {
        throw std::invalid_argument(
            "the tokens of the columns do not fit the logits and the vocabulary");
    }
    return {ids, columns};
}

Memory& memory() {
    thread_local Memory found;
    return found;
}

namespace {

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

}  // namespace

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

}  // namespace paceline
