#include "layers/experts.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

bool comes_before(float a, float b) {
    return std::isnan(a) ? !std::isnan(b) : a > b;
}

// The id of the best value in first..end - 1 that is not gone, which it is from then on.
int take_best(const float* values, int first, int end, std::vector<char>& gone) {
    int best = -1;
    for (int id = first; id < end; ++id) {
        if (!gone[id] && (best < 0 || comes_before(values[id], values[best]))) {
            best = id;
        }
    }
    gone[best] = true;
    return best;
}

float logistic(float x) {
    return 1.0f / (1.0f + std::exp(-x));
}

std::vector<float> sigmoids(const float* logits, int count) {
    std::vector<float> found(count);
    std::transform(logits, logits + count, found.begin(), logistic);
    return found;
}

std::vector<float> softmax(const float* logits, int count) {
    const float largest = *std::min_element(logits, logits + count, comes_before);
    std::vector<float> found(count);
    float total = 0.0f;
    for (int i = 0; i < count; ++i) {
        found[i] = std::exp(logits[i] - largest);
        total += found[i];
    }
    for (float& each : found) {
        each /= total;
    }
    return found;
}

}  // namespace

void Mixture::choose(const float* logits, int* ids, float* weights) const {
    const int number = int(experts.size());
    std::vector<float> scores, wanted;
    if (by_score()) {
        scores = sigmoid ? sigmoids(logits, number) : softmax(logits, number);
        wanted = scores;
        for (int id = 0; choice_bias && id < number; ++id) {
            wanted[id] += choice_bias[id];
        }
    }
    // Scores may be equal where logits are not.
    const bool by_logits = !choice_bias && (!sigmoid || groups == 1);
    const float* values = by_logits ? logits : wanted.data();
    std::vector<char> gone(number, false);
    if (groups > 1) {
        close_groups(values, gone);
    }
    for (int rank = 0; rank < per_token; ++rank) {
        ids[rank] = take_best(values, 0, number, gone);
    }
    if (by_score()) {
        weigh_scores(scores.data(), ids, weights);
    } else if (jitter > 0.0f) {
        weigh_one_by_one(logits, ids, weights);
    } else {
        weigh_logits(logits, ids, weights);
    }
    for (int rank = 0; rank < per_token; ++rank) {
        weights[rank] *= scales ? scale * scales[ids[rank]] : scale;
    }
}

void Mixture::close_groups(const float* values, std::vector<char>& closed) const {
    const int each = int(experts.size()) / groups;
    std::vector<float> worth(groups, 0.0f);
    for (int group = 0; group < groups; ++group) {
        std::vector<char> gone(closed);
        for (int i = 0; i < group_best; ++i) {
            worth[group] += values[take_best(values, group * each, (group + 1) * each, gone)];
        }
    }
    std::vector<char> open(groups, false);
    for (int i = 0; i < groups_per_token; ++i) {
        take_best(worth.data(), 0, groups, open);
    }
    for (int id = 0; id < int(experts.size()); ++id) {
        closed[id] = !open[id / each];
    }
}

void Mixture::weigh_logits(const float* logits, const int* ids, float* weights) const {
    const int number = int(experts.size());
    float largest = logits[ids[0]], total = 0.0f;
    for (int i = 0; i < (renormalise ? per_token : number); ++i) {
        total += std::exp(logits[renormalise ? ids[i] : i] - largest);
    }
    for (int rank = 0; rank < per_token; ++rank) {
        weights[rank] = std::exp(logits[ids[rank]] - largest) / total;
    }
}

void Mixture::weigh_scores(const float* scores, const int* ids, float* weights) const {
    float total = 0.0f;
    for (int rank = 0; rank < per_token; ++rank) {
        weights[rank] = scores[ids[rank]];
        total += weights[rank];
    }
    for (int rank = 0; renormalise && rank < per_token; ++rank) {
        weights[rank] /= std::max(total, least_sum);  // a NaN stays one
    }
}

void Mixture::weigh_one_by_one(const float* logits, const int* ids, float* weights) const {
    for (int rank = 0; rank < per_token; ++rank) {
        const float best = logits[ids[rank]];
        float total = 0.0f;
        for (int id = 0; id < int(experts.size()); ++id) {
            const bool gone = std::find(ids, ids + rank, id) != ids + rank;
            const float share = (best - logits[id]) / std::max(std::fabs(logits[id]), best);
            if (!gone && !(share > 2.0f * jitter)) {
                total += std::exp(logits[id] - best);
            }
        }
        weights[rank] = 1.0f / total;
    }
}

float Mixture::shared_weight(const float* logits) const {
    return shared_gate ? logistic(logits[experts.size()]) : 1.0f;
}

void Assignment::need(int count, int per_token) {
    const size_t size = size_t(count) * per_token;
    ids.resize(size);
    weights.resize(size);
    rows.resize(size);
    entry_weights.resize(size);
    entries.resize(size);
}

void Assignment::sort(int count, const Mixture& mixture) {
    const int each = mixture.per_token, size = count * each;
    std::vector<int> next(mixture.experts.size() + 1, 0);  // of each expert, its next entry
    for (int i = 0; i < size; ++i) {
        ++next[ids[i] + 1];
    }
    groups.clear();
    for (int expert = 0; expert < int(mixture.experts.size()); ++expert) {
        if (next[expert + 1] > 0) {
            groups.push_back({expert, next[expert], next[expert + 1]});
        }
        next[expert + 1] += next[expert];
    }
    for (int i = 0; i < size; ++i) {
        const int entry = next[ids[i]]++;
        rows[entry] = i / each;
        entry_weights[entry] = weights[i];
        entries[i] = entry;
    }
}

}  // namespace paceline
