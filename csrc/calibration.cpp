#include "calibration.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

constexpr int kOriginShift = 7;
constexpr double kCellRate = 0.02, kShrinkage = 0.05;
constexpr double kOffsetRate = 0.1, kSlopeRate = 0.03, kDriftRate = 0.08, kHaste = 6.0;
constexpr double kMaxOffset = 8.0, kMaxSlope = 4.0, kCurvature = 0.25;

double between(double value, double low, double high) {
    return std::min(std::max(value, low), high);
}

void limit_siblings(const Parents& parents, std::vector<double>* probs) {
    std::vector<double> total(probs->size() + 1, 0.0);  // by parent; the last place is the top's
    const auto at = [&](size_t i) { return parents[i] < 0 ? probs->size() : parents[i]; };
    for (size_t i = 0; i < probs->size(); ++i) {
        total[at(i)] += (*probs)[i];
    }
    for (size_t i = 0; i < probs->size(); ++i) {
        (*probs)[i] /= std::max(1.0, total[at(i)]);
    }
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

void Calibration::add_origin(std::vector<Row> rows, const std::vector<double>& logits) {
    rows_.push_back(std::move(rows));
    logits_.insert(logits_.end(), logits.begin(), logits.end());
    corrections_.resize(logits_.size(), 0.0);
}

std::vector<Calibration::Fit>& Calibration::fits_of(int64_t request, size_t least) {
    std::vector<Fit>& fits = fits_[request];
    if (fits.size() < least) {
        fits.resize(num_origins());
    }
    return fits;
}

const Calibration::Estimate& Calibration::at(int32_t origin, int64_t depth, double prob) const {
    const int64_t row = std::min<int64_t>(depth, kRows - 1);
    return rows_[origin][row][static_cast<int>(prob * kSteps)];
}

double Calibration::calibrated(const Fit& fit, const Estimate& found) const {
    const double correction = corrections_[found.cell];
    return 1.0 / (1.0 + std::exp(-fit.slope * found.logit - fit.offset - correction));
}

std::vector<int32_t> Calibration::calibrate(int64_t request, const std::vector<int32_t>& origins,
                                            const Parents& parents, std::vector<double>* probs) {
    const int32_t last = *std::max_element(origins.begin(), origins.end());
    const std::vector<Fit>& fits = fits_of(request, last + 1);
    std::vector<int32_t> cells, depths;
    cells.reserve(parents.size());
    depths.reserve(parents.size());
    for (size_t i = 0; i < parents.size(); ++i) {
        depths.push_back(parents[i] < 0 ? 1 : depths[parents[i]] + 1);
        const Estimate& found = at(origins[i], depths[i], (*probs)[i]);
        cells.push_back(found.cell);
        (*probs)[i] = calibrated(fits[origins[i]], found);
    }
    if (static_cast<size_t>(depths.back()) < depths.size()) {  // it branches
        limit_siblings(parents, probs);
    }
    return cells;
}

double Calibration::estimate(int64_t request, int32_t origin, int64_t depth, double prob) {
    return calibrated(fits_of(request, origin + 1)[origin], at(origin, depth, prob));
}

void Calibration::learn(int64_t request, const std::vector<Error>& errors) {
    struct Sums {
        double count, error, tilt, spread;
    };
    std::vector<Sums> sums(num_origins(), Sums{});
    for (const Error& each : errors) {
        double& correction = corrections_[each.cell];
        correction += kCellRate * (each.value - kShrinkage * correction);
        Sums& found = sums[each.cell >> kOriginShift];
        const double logit = logits_[each.cell];
        found.count += 1.0;
        found.error += each.value;
        found.tilt += each.value * logit;
        found.spread += logit * logit;
    }
    std::vector<Fit>& fits = fits_of(request, num_origins());
    for (size_t origin = 0; origin < sums.size(); ++origin) {
        const Sums& found = sums[origin];
        if (found.count > 0.0) {
            fits[origin].learn(found.count, found.error, found.tilt, found.spread);
        }
    }
}

void Calibration::Fit::learn(double count, double error, double tilt, double spread) {
    drift = (drift + kDriftRate * error) / (1.0 + kDriftRate * count);
    const double rate = kOffsetRate + kHaste * (drift * drift);
    offset = between(offset + rate * error / (1.0 + rate * kCurvature * count), -kMaxOffset,
                     kMaxOffset);
    slope = between(slope + kSlopeRate * tilt / (1.0 + kSlopeRate * kCurvature * spread), 0.0,
                    kMaxSlope);
}

void Calibration::finish(int64_t request) { fits_.erase(request); }

}  // namespace paceline
