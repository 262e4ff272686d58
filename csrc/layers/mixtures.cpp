#include "layers/mixtures.h"

#include <algorithm>

namespace paceline {

void Mixtures::begin(size_t layers) {
    is_read_.assign(layers, {});
    counts_.read = counts_.fetched = 0;
    counts_.chosen.assign(layers, {});
}

void Mixtures::run(const DecoderLayer& layer) {
    const Mixture& mixture = *layer.mixture;
    choose(layer);
    count(layer);
    run_all(mixture, layer.index);
    if (mixture.shared) {
        run_shared(layer);
    }
    const DecoderShape& shape = shared_.shape;
    pool().each(shared_.rows(), [&](int row, int thread) {
        float *sum = shared_.scratch(thread), *x = shared_.x.row(row);
        add_up(mixture, row, sum);
        if (layer.post_mlp_norm) {
            std::copy_n(sum, shape.hidden, shared_.branch.row(row));
            return;
        }
        for (int i = 0; i < shape.hidden; ++i) {
            x[i] += shape.residual_multiplier * sum[i];
        }
    });
}

void Mixtures::choose(const DecoderLayer& layer) {
    const Mixture& mixture = *layer.mixture;
    const MixtureNorms& norms = mixture.norms;
    const int rows = shared_.rows(), per_token = mixture.per_token;
    normed_.need(rows, shared_.shape.hidden);
    routed_.need(rows, mixture.router.n());
    assignment_.need(rows, per_token);
    pool().each(rows, [&](int row, int thread) {
        const float* x = shared_.x.row(row);
        if (layer.post_attention_norm) {
            shared_.add_branch(row, layer.post_attention_norm);
        }
        shared_.normed(x, norms.experts ? norms.experts : layer.mlp_norm, normed_.row(row));
        if (norms.router) {
            shared_.norm_for(mixture.router, row, norms.router, thread);
        } else {
            mixture.router.take(normed_.row(row), shared_.hidden, row, shared_.spare(thread));
        }
    });
    run_linear(mixture.router, shared_.hidden, routed_.out());
    pool().each(rows, [&](int row, int) {
        const size_t at = size_t(row) * per_token;
        mixture.choose(routed_.row(row), &assignment_.ids[at], &assignment_.weights[at]);
    });
    assignment_.sort(rows, mixture);
}

void Mixtures::count(const DecoderLayer& layer) {
    std::vector<int>& chosen = counts_.chosen[layer.index];
    chosen.insert(chosen.end(), assignment_.ids.begin(), assignment_.ids.end());
    std::vector<bool>& is_read = is_read_[layer.index];
    is_read.resize(layer.mixture->experts.size());
    for (const Assignment::Group& group : assignment_.groups) {
        counts_.read += !is_read[group.expert];
        is_read[group.expert] = true;
    }
}

void Mixtures::run_all(const Mixture& mixture, size_t layer) {
    const std::vector<Assignment::Group>& groups = assignment_.groups;
    const int entries = int(assignment_.rows.size());
    gate_up_.need(entries, 2 * mixture.width());
    results_.need(entries, shared_.shape.hidden);
    std::vector<Ready> ready;
    if (!cache_ || cache_->number(layer) == 0) {
        for (const Assignment::Group& group : groups) {
            ready.push_back({group, &mixture.experts[group.expert]});
        }
        run_some(mixture, ready);
        return;
    }
    std::vector<ExpertCache::Wish> wishes;
    for (const Assignment::Group& group : groups) {
        wishes.push_back({group.expert, group.count});
    }
    ExpertCache::Use use(*cache_, layer, wishes, shared_.rows());
    counts_.fetched += use.read();
    // In the order in which they come: each has its own rows of the results.
    std::vector<FeedForward> moved(groups.size());
    for (std::vector<int> some = use.next(); !some.empty(); some = use.next()) {
        ready.clear();
        for (const int wish : some) {
            moved[wish] = mixture.experts[groups[wish].expert].moved(use.shift(wish));
            ready.push_back({groups[wish], &moved[wish]});
        }
        run_some(mixture, ready);
    }
}

void Mixtures::run_some(const Mixture& mixture, const std::vector<Ready>& ready) {
    struct Entry {
        int index, row;  // of the expert, and among its rows
    };
    std::vector<Entry> entries;
    for (int index = 0; index < int(ready.size()); ++index) {
        for (int row = 0; row < ready[index].group.count; ++row) {
            entries.push_back({index, row});
        }
    }
    std::vector<Inputs> inputs = inputs_of(ready, shared_.shape.hidden);
    pool().each(int(entries.size()), [&](int piece, int thread) {
        const auto [index, row] = entries[piece];
        take(mixture, ready[index], row, inputs[index], thread);
    });
    run_linears(ready, &FeedForward::gate_up, inputs, gate_up_);
    inputs = inputs_of(ready, mixture.width());
    pool().each(int(entries.size()), [&](int piece, int thread) {
        const auto [index, row] = entries[piece];
        const auto& [group, weights] = ready[index];
        float* y = shared_.scratch(thread);
        shared_.shape.activate(gate_up_.row(group.first + row), mixture.width(), nullptr, y);
        weights->down.take(y, inputs[index], row, shared_.spare(thread));
    });
    run_linears(ready, &FeedForward::down, inputs, results_);
}

void Mixtures::take(const Mixture& mixture, const Ready& expert, int row, const Inputs& inputs,
                    int thread) {
    const int entry = expert.group.first + row;
    const float* x = normed_.row(assignment_.rows[entry]);
    if (mixture.weighs_inputs) {
        const float weight = assignment_.entry_weights[entry];
        float* weighed = shared_.scratch(thread);
        std::transform(x, x + normed_.ld(), weighed, [&](float value) { return weight * value; });
        x = weighed;
    }
    expert.weights->gate_up.take(x, inputs, row, shared_.spare(thread));
}

std::vector<Inputs> Mixtures::inputs_of(const std::vector<Ready>& ready, int width) {
    const int orders = shared_.most_orders;
    const Inputs all = inputs_.view(int(assignment_.rows.size()), width, orders);
    std::vector<Inputs> parts;
    for (const auto& [group, weights] : ready) {
        parts.push_back(rows_of(all, group.first, group.count, orders));
    }
    return parts;
}

void Mixtures::run_linears(const std::vector<Ready>& ready, Linear FeedForward::*which,
                           const std::vector<Inputs>& inputs, const RowBuffer& to) {
    const int tiles = (ready.front().weights->*which).tiles();
    const int all = tiles * int(ready.size());
    const int per_piece = std::min(tiles_per_piece(all), tiles);
    const int pieces = (tiles + per_piece - 1) / per_piece;  // of each expert
    pool().each(pieces * int(ready.size()), [&](int piece, int) {
        const auto& [group, weights] = ready[piece / pieces];
        const int begin = piece % pieces * per_piece, end = std::min(begin + per_piece, tiles);
        const LinearOut out{to.row(group.first), nullptr, to.ld(), 1.0f};
        (weights->*which).run(inputs[piece / pieces], out, begin, end);
    });
}

void Mixtures::run_shared(const DecoderLayer& layer) {
    const Mixture& mixture = *layer.mixture;
    const Linear& first = mixture.shared->gate_up;
    pool().each(shared_.rows(), [&](int row, int thread) {
        if (mixture.norms.experts) {
            shared_.norm_for(first, row, layer.mlp_norm, thread);
        } else {
            first.take(normed_.row(row), shared_.hidden, row, shared_.spare(thread));
        }
    });
    shared_results_.need(shared_.rows(), shared_.shape.hidden);
    dense_.feed(layer, *mixture.shared, shared_results_.out());
}

void Mixtures::add_up(const Mixture& mixture, int row, float* sum) {
    const int hidden = shared_.shape.hidden;
    for (int rank = 0; rank < mixture.per_token; ++rank) {
        const size_t at = size_t(row) * mixture.per_token + rank;
        const float weight = mixture.weighs_inputs ? 1.0f : assignment_.weights[at];
        const float* result = results_.row(assignment_.entries[at]);
        for (int i = 0; i < hidden; ++i) {
            sum[i] = rank ? sum[i] + weight * result[i] : weight * result[i];
        }
    }
    if (mixture.norms.routed) {
        shared_.normed(sum, mixture.norms.routed, sum);
    }
    if (mixture.shared) {
        const float weight = mixture.shared_weight(routed_.row(row));
        float* shared = shared_results_.row(row);
        if (mixture.norms.shared) {
            shared_.normed(shared, mixture.norms.shared, shared);
        }
        for (int i = 0; i < hidden; ++i) {
            sum[i] += weight * shared[i];
        }
    }
}

}  // namespace paceline
