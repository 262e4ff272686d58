#include "forward/experts.h"

#include <algorithm>
#include <cmath>

#include "forward/forward.h"

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

void Decoder::mixture(const DecoderLayer& layer, int rows) {
    const Mixture& mixture = *layer.mixture;
    const int each = mixture.per_token, count = rows * each, outputs = mixture.router.n();
    const int ld_router = round_up(outputs, TILE), ld_expert = round_up(2 * mixture.width(), TILE);
    normed_.need(size_t(rows) * ld_hidden_);
    routed_.need(size_t(rows) * ld_router);
    expert_gate_up_.need(size_t(count) * ld_expert);
    expert_out_.need(size_t(count) * ld_hidden_);
    assignment_.need(rows, each);
    const auto normed_row = [&](int row) { return normed_.get() + size_t(row) * ld_hidden_; };
    const auto router_row = [&](int row) { return routed_.get() + size_t(row) * ld_router; };
    pool().each(rows, [&](int row, int thread) {
        if (layer.post_attention_norm) {
            add_branch(row, layer.post_attention_norm);
        }
        const MixtureNorms& norms = mixture.norms;
        normed(x_row(row), norms.experts ? norms.experts : layer.mlp_norm, normed_row(row));
        if (norms.router) {
            normed(x_row(row), norms.router, scratch(thread));
        }
        mixture.router.take(norms.router ? scratch(thread) : normed_row(row), in_hidden_, row,
                            spare(thread));
    });
    run_linear(mixture.router, in_hidden_, {routed_.get(), nullptr, ld_router, 1.0f});
    pool().each(rows, [&](int row, int) {
        const size_t at = size_t(row) * each;
        mixture.choose(router_row(row), &assignment_.ids[at], &assignment_.weights[at]);
    });
    assignment_.sort(rows, mixture);
    count_experts(layer, count);
    experts(mixture, &layer - layers_.data(), rows);
    if (mixture.shared) {
        pool().each(rows, [&](int row, int thread) {
            if (mixture.norms.experts) {
                norm_for(mixture.shared->gate_up, row, layer.mlp_norm, thread);
            } else {
                mixture.shared->gate_up.take(normed_row(row), in_hidden_, row, spare(thread));
            }
        });
        shared_.need(size_t(rows) * ld_hidden_);
        feed(layer, *mixture.shared, rows, {shared_.get(), nullptr, ld_hidden_, 1.0f});
    }
    pool().each(rows, [&](int row, int thread) {
        float* sum = scratch(thread);
        for (int rank = 0; rank < each; ++rank) {
            const size_t at = size_t(row) * each + rank;
            const float weight = mixture.weighs_inputs ? 1.0f : assignment_.weights[at];
            const float* found = expert_out_.get() + size_t(assignment_.entries[at]) * ld_hidden_;
            for (int i = 0; i < shape_.hidden; ++i) {
                sum[i] = rank ? sum[i] + weight * found[i] : weight * found[i];
            }
        }
        if (mixture.norms.routed) {
            normed(sum, mixture.norms.routed, sum);
        }
        if (mixture.shared) {
            const float weight = mixture.shared_weight(router_row(row));
            float* shared = shared_.get() + size_t(row) * ld_hidden_;
            if (mixture.norms.shared) {
                normed(shared, mixture.norms.shared, shared);
            }
            for (int i = 0; i < shape_.hidden; ++i) {
                sum[i] += weight * shared[i];
            }
        }
        float* branch = branch_.get() + size_t(row) * ld_hidden_;
        float* x = x_row(row);
        for (int i = 0; i < shape_.hidden; ++i) {
            if (layer.post_mlp_norm) {
                branch[i] = sum[i];
            } else {
                x[i] += shape_.residual_multiplier * sum[i];
            }
        }
    });
}

void Decoder::count_experts(const DecoderLayer& layer, int entries) {
    const size_t index = &layer - layers_.data();
    const std::vector<int>& ids = assignment_.ids;
    chosen_[index].insert(chosen_[index].end(), ids.begin(), ids.begin() + entries);
    std::vector<bool>& is_read = is_read_[index];
    is_read.resize(layer.mixture->experts.size());
    for (const Assignment::Group& group : assignment_.groups) {
        experts_read_ += !is_read[group.expert];
        is_read[group.expert] = true;
    }
}

void Decoder::experts(const Mixture& mixture, size_t index, int rows) {
    const std::vector<Assignment::Group>& groups = assignment_.groups;
    std::vector<ReadyExpert> ready;
    if (!cache_ || cache_->number(index) == 0) {
        for (const Assignment::Group& group : groups) {
            ready.push_back({group, &mixture.experts[group.expert]});
        }
        run_experts(mixture, ready);
        return;
    }
    std::vector<ExpertCache::Wish> wishes;
    for (const Assignment::Group& group : groups) {
        wishes.push_back({group.expert, group.count});
    }
    ExpertCache::Use use(*cache_, index, wishes, rows);
    experts_fetched_ += use.read();
    // In the order in which they come: each has its own rows of the results.
    std::vector<FeedForward> moved(groups.size());
    for (std::vector<int> some = use.next(); !some.empty(); some = use.next()) {
        ready.clear();
        for (const int wish : some) {
            moved[wish] = mixture.experts[groups[wish].expert].moved(use.shift(wish));
            ready.push_back({groups[wish], &moved[wish]});
        }
        run_experts(mixture, ready);
    }
}

void Decoder::run_experts(const Mixture& mixture, const std::vector<ReadyExpert>& ready) {
    const int orders = most_orders_, ld_expert = round_up(2 * mixture.width(), TILE);
    const int count = int(assignment_.rows.size());
    const auto inputs_of = [&](int width) {
        const Inputs all = expert_inputs_.view(count, width, orders);
        std::vector<Inputs> found;
        for (const ReadyExpert& each : ready) {
            found.push_back(rows_of(all, each.group.first, each.group.count, orders));
        }
        return found;
    };
    struct Entry {
        int index, row;  // of the expert, and among its rows
    };
    std::vector<Entry> entries;
    for (int index = 0; index < int(ready.size()); ++index) {
        for (int row = 0; row < ready[index].group.count; ++row) {
            entries.push_back({index, row});
        }
    }
    std::vector<Inputs> inputs = inputs_of(shape_.hidden);
    pool().each(int(entries.size()), [&](int piece, int thread) {
        const auto [index, row] = entries[piece];
        const int entry = ready[index].group.first + row;
        const float* x = normed_.get() + size_t(assignment_.rows[entry]) * ld_hidden_;
        if (mixture.weighs_inputs) {
            const float weight = assignment_.entry_weights[entry];
            std::transform(x, x + ld_hidden_, scratch(thread),
                           [&](float value) { return weight * value; });
            x = scratch(thread);
        }
        ready[index].weights->gate_up.take(x, inputs[index], row, spare(thread));
    });
    grouped(ready, &FeedForward::gate_up, inputs, expert_gate_up_.get(), ld_expert);
    inputs = inputs_of(mixture.width());
    pool().each(int(entries.size()), [&](int piece, int thread) {
        const auto [index, row] = entries[piece];
        const float* up =
            expert_gate_up_.get() + size_t(ready[index].group.first + row) * ld_expert;
        if (shape_.gated) {
            kernels().gated(up, mixture.width(), shape_.activation, scratch(thread));
        } else {
            kernels().activate(up, mixture.width(), shape_.activation, nullptr, scratch(thread));
        }
        ready[index].weights->down.take(scratch(thread), inputs[index], row, spare(thread));
    });
    grouped(ready, &FeedForward::down, inputs, expert_out_.get(), ld_hidden_);
}

void Decoder::grouped(const std::vector<ReadyExpert>& ready, Linear FeedForward::*which,
                      const std::vector<Inputs>& inputs, float* y, int ld) {
    const int tiles = (ready.front().weights->*which).tiles();
    const int all = tiles * int(ready.size());
    const int per_piece = std::min(tiles_per_piece(all), tiles);
    const int pieces = (tiles + per_piece - 1) / per_piece;  // of each expert
    pool().each(pieces * int(ready.size()), [&](int piece, int) {
        const auto& [group, weights] = ready[piece / pieces];
        const int begin = piece % pieces * per_piece, end = std::min(begin + per_piece, tiles);
        const LinearOut out{y + size_t(group.first) * ld, nullptr, ld, 1.0f};
        (weights->*which).run(inputs[piece / pieces], out, begin, end);
    });
}

}  // namespace paceline
