#include "drafts/drafts.h"

#include <algorithm>
#include <utility>

#include "drafts/merge.h"

namespace paceline {
namespace {

std::vector<double> path_probs_of(const Parents& parents, const std::vector<double>& probs) {
    std::vector<double> found(parents.size());
    for (size_t i = 0; i < parents.size(); ++i) {
        found[i] = parents[i] < 0 ? probs[i] : found[parents[i]] * probs[i];
    }
    return found;
}

}  // namespace

void Drafts::begin(const std::vector<int64_t>& ids) {
    parts_.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
        parts_[i].id = ids[i];
        parts_[i].trees.clear();
        parts_[i].whole = {};
        parts_[i].is_whole = false;
        parts_[i].chosen.clear();
    }
}

void Drafts::add(size_t index, int32_t source, DraftNodes tree) {
    if (tree.tokens.empty()) {
        return;
    }
    Part& part = parts_[index];
    if (calibrates_) {
        calibration_.calibrate(part.id, tree.origins, tree.parents, &tree.probs);
    }
    for (const int32_t origin : tree.origins) {
        if (static_cast<size_t>(origin) >= source_of_.size()) {
            source_of_.resize(origin + 1, -1);
        }
        source_of_[origin] = source;
    }
    part.trees.push_back(std::move(tree));
    part.is_whole = false;
}

double Drafts::expected(size_t index) const {
    double most = 0.0;
    for (const DraftNodes& tree : parts_[index].trees) {
        double sum = 0.0;
        for (const double prob : path_probs_of(tree.parents, tree.probs)) {
            sum += prob;
        }
        most = std::max(most, sum);
    }
    return most;
}

int32_t Drafts::depth(int32_t source) const {
    int32_t most = 1;
    for (const Part& part : parts_) {
        for (const DraftNodes& tree : part.trees) {
            if (source_of_[tree.origins[0]] != source) {
                continue;
            }
            std::vector<int32_t> depths;
            for (const int32_t parent : tree.parents) {
                depths.push_back(parent < 0 ? 1 : depths[parent] + 1);
                most = std::max(most, depths.back());
            }
        }
    }
    return most;
}

const Drafts::Part& Drafts::whole(size_t index) {
    Part& part = parts_[index];
    if (!part.is_whole && !part.trees.empty()) {
        part.whole = part.trees.size() > 1 ? merge(part.trees) : part.trees[0];
        part.path_probs = path_probs_of(part.whole.parents, part.whole.probs);
        part.is_whole = true;
    }
    return part;
}

size_t Drafts::num_merges() const {
    size_t count = 0;
    for (const Part& part : parts_) {
        count += part.trees.empty() ? 0 : part.trees.size() - 1;
    }
    return count;
}

size_t Drafts::choose(Plan plan) {
    for (size_t i = 0; i < parts_.size(); ++i) {
        const DraftNodes& tree = whole(i).whole;
        plan.requests[i].first = static_cast<int>(plan.parents.size());
        plan.requests[i].count = static_cast<int>(tree.parents.size());
        plan.parents.insert(plan.parents.end(), tree.parents.begin(), tree.parents.end());
        plan.accept_probs.insert(plan.accept_probs.end(), tree.probs.begin(), tree.probs.end());
    }
    const size_t most = static_cast<size_t>(std::max<int64_t>(0, plan.most_nodes() + 1));
    plan.growth.resize(std::min(plan.growth.size(), most));
    std::vector<std::vector<int32_t>> chosen = choose_nodes(plan);
    size_t count = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
        parts_[i].chosen = std::move(chosen[i]);
        count += parts_[i].chosen.size();
    }
    return count;
}

double Drafts::gain(int32_t source, const std::vector<size_t>& indices, double price) const {
    double sum = 0.0;
    for (const size_t index : indices) {
        const Part& part = parts_[index];
        for (const int32_t node : part.chosen) {
            if (source_of_[part.whole.origins[node]] == source) {
                sum += part.path_probs[node] - price;
            }
        }
    }
    return sum;
}

void Drafts::learn(int64_t id, const std::vector<int64_t>& emitted) {
    for (size_t tried = 0; tried < parts_.size(); ++tried) {
        latest_ = latest_ + 1 < parts_.size() ? latest_ + 1 : 0;  // they are usually told in turn
        if (parts_[latest_].id != id) {
            continue;
        }
        const DraftNodes& tree = whole(latest_).whole;
        if (!calibrates_ || tree.tokens.empty()) {
            return;
        }
        std::vector<Calibration::Error> errors;
        for (const Outcome& label : outcomes(tree.tokens, tree.parents, emitted)) {
            const double error = label.value - tree.probs[label.node];
            if (tree.claims.ends.empty()) {
                errors.push_back({tree.origins[label.node], error});
                continue;
            }
            const Claim* const begin = tree.claims.begin(label.node);
            const Claim* const end = tree.claims.end(label.node);
            double sum = 0.0;
            for (const Claim* claim = begin; claim != end; ++claim) {
                sum += claim->prob;
            }
            for (const Claim* claim = begin; claim != end; ++claim) {
                errors.push_back({claim->origin, error * claim->prob / sum});
            }
        }
        calibration_.learn(id, errors);
        return;
    }
}

}  // namespace paceline
