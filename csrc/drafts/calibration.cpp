#include "drafts/calibration.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace paceline {
namespace {

constexpr double kOffsetRate = 0.1, kDriftRate = 0.08, kHaste = 6.0;
constexpr double kCurvature = 0.25, kMaxOffset = 8.0;
constexpr double kSharedRate = 0.02, kShrinkage = 0.05;

double between(double value, double low, double high) {
    return std::min(std::max(value, low), high);
}

}  // namespace

std::vector<Outcome> outcomes(const std::vector<int64_t>& tokens, const Parents& parents,
                              const std::vector<int64_t>& emitted) {
    std::vector<Outcome> found;
    // By node of the emitted path, the last one at the end: the token that followed it.
    std::vector<int32_t> path{-1};
    for (size_t node = 0; node < tokens.size(); ++node) {
        for (size_t at = path.size(); at-- > 0;) {
            if (path[at] == parents[node]) {
                const bool is_accepted = tokens[node] == emitted[at];
                found.push_back({static_cast<int32_t>(node), is_accepted ? 1.0 : 0.0});
                if (is_accepted && path.size() < emitted.size()) {
                    path.push_back(static_cast<int32_t>(node));
                }
                break;
            }
        }
    }
    return found;
}

void Calibration::add_origin(Rows rows) {
    rows_.push_back(std::move(rows));
    for (std::vector<double>& shared : shared_) {
        shared.push_back(0.0);
    }
}

void Calibration::adapt(int64_t request, size_t adapter) {
    adapters_[request] = adapter;
    while (shared_.size() <= adapter) {
        shared_.push_back(std::vector<double>(shared_[0]));
    }
}

size_t Calibration::adapter_of(int64_t request) const {
    const auto found = adapters_.find(request);
    return found == adapters_.end() ? 0 : found->second;
}

Calibration::Offsets Calibration::offsets_of(int64_t request) const {
    const auto found = own_.find(request);
    return {found == own_.end() ? nullptr : &found->second, shared_[adapter_of(request)]};
}

double Calibration::probability(const Offsets& offsets, int32_t origin, int64_t depth,
                                double prob) const {
    const int64_t row = std::min<int64_t>(depth, kRows - 1);
    const double logit = rows_[origin][row][static_cast<int>(prob * kSteps)];
    const std::vector<Offset>* const own = offsets.own;
    const bool is_known = own && static_cast<size_t>(origin) < own->size();
    const double offset = is_known ? (*own)[origin].value : 0.0;
    return 1.0 / (1.0 + std::exp(-logit - offset - offsets.shared[origin]));
}

void Calibration::calibrate(int64_t request, const std::vector<int32_t>& origins,
                            const Parents& parents, std::vector<double>* probs) const {
    const Offsets offsets = offsets_of(request);
    std::vector<int32_t> depths;
    depths.reserve(parents.size());
    for (size_t i = 0; i < parents.size(); ++i) {
        depths.push_back(parents[i] < 0 ? 1 : depths[parents[i]] + 1);
        (*probs)[i] = probability(offsets, origins[i], depths[i], (*probs)[i]);
    }
}

double Calibration::estimate(int64_t request, int32_t origin, int64_t depth, double prob) const {
    return probability(offsets_of(request), origin, depth, prob);
}

void Calibration::learn(int64_t request, const std::vector<Error>& errors) {
    struct Sums {
        double count, error;
    };
    std::vector<Sums> sums(num_origins(), Sums{});
    std::vector<double>& all_shared = shared_[adapter_of(request)];
    for (const Error& each : errors) {
        double& shared = all_shared[each.origin];
        shared += kSharedRate * (each.value - kShrinkage * shared);
        sums[each.origin].count += 1.0;
        sums[each.origin].error += each.value;
    }
    if (errors.empty()) {
        return;
    }
    std::vector<Offset>& own = own_[request];
    own.resize(num_origins());
    for (size_t origin = 0; origin < sums.size(); ++origin) {
        const auto [count, error] = sums[origin];
        if (count > 0.0) {
            own[origin].learn(count, error);
        }
    }
}

void Calibration::Offset::learn(double count, double error) {
    drift = (drift + kDriftRate * error) / (1.0 + kDriftRate * count);
    const double rate = kOffsetRate + kHaste * (drift * drift);
    value = between(value + rate * error / (1.0 + rate * kCurvature * count), -kMaxOffset,
                    kMaxOffset);
}

}  // namespace paceline
