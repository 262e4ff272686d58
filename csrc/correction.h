// What a cost table has wrong at this moment: paceline/policy/cost_correction.py in C++, where it is
// described. Its arithmetic is that of the Python code, to the last bit. Knows no Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace paceline {

// What all corrections share: the bin of each width, of which the last stands for all wider steps,
// what a visit to one bin counts for another, and by bin how far the tilt counts there.
struct CorrectionTables {
    std::vector<size_t> bins;
    std::vector<std::vector<double>> kernel;
    std::vector<double> slopes;
    double tilt_decay;  // what is left of a tilt after a step
};

class Correction {
  public:
    // Of a table that is worth so many visits, which count 1/e after `memory` steps.
    Correction(const CorrectionTables& tables, double shrinkage, double memory, bool knows_unit)
        : tables_(tables), shrinkage_(shrinkage), decay_(1.0 - 1.0 / memory),
          knows_unit_(knows_unit), surprises_(tables.kernel.size(), 0.0),
          heard_(tables.kernel.size()) {}

    bool knows_unit() const { return knows_unit_; }

    // Whether steps have changed of which none was so narrow.
    bool is_ambiguous(size_t width) const { return tables_.slopes[bin(width)] < ambiguous_; }

    // What the table's time of a step of so many rows is multiplied with.
    double factor(size_t width) {
        const size_t at = bin(width);
        const Sum& heard = hear(at);
        return std::exp(mood_ + tables_.slopes[at] * tilt_ +
                        heard.seen / (heard.weight + shrinkage_));
    }

    void observe(size_t width, double level) {
        const size_t at = bin(width);
        const double slope = tables_.slopes[at];
        const Sum heard = hear(at);
        const double spread = 1.0 / (heard.weight + shrinkage_);
        const double residual = heard.seen * spread;
        if (!knows_unit_) {
            knows_unit_ = true;
            mood_ = level - residual;
        }
        if (slope < ambiguous_) {
            ambiguous_ = 0.0;
        }
        const auto [error, variance] =
            believe(at, level - mood_ - slope * tilt_ - residual, spread);
        remember(at, residual + error);
        settle(slope, error, variance);
        std::fill(heard_.begin(), heard_.end(), Sum{});
    }

  private:
    static constexpr double kNoise = 0.06, kDrift = 0.1, kSurprise = 3.0, kMaxVisits = 6.0;
    static constexpr double kTiltVariance = (0.1 / kNoise) * (0.1 / kNoise);
    static constexpr double kAfterChange = 0.05, kForgotten = 1e-6;

    struct Sum {
        double weight = -1.0, seen = 0.0;  // less than no weight where nobody summed up yet
    };
    struct Visits {
        size_t bin;
        double weight, seen;
    };

    size_t bin(size_t width) const { return tables_.bins[std::min(width, tables_.bins.size() - 1)]; }

    const Sum& hear(size_t at) {
        Sum& heard = heard_[at];
        if (heard.weight < 0.0) {
            const std::vector<double>& row = tables_.kernel[at];
            double weight = 0.0, seen = 0.0;
            for (const Visits& each : visits_) {
                weight += row[each.bin] * each.weight;
                seen += row[each.bin] * each.seen;
            }
            heard = {weight * worth_, seen * worth_};
        }
        return heard;
    }

    // Moves mood and tilt by their parts of an error; then lets a step pass.
    void settle(double slope, double error, double spread) {
        const double of_mood = mood_variance_ + slope * covariance_;
        const double of_tilt = covariance_ + slope * tilt_variance_;
        const double total = of_mood + slope * of_tilt + spread + 1.0;
        const double mood_gain = of_mood / total, tilt_gain = of_tilt / total;
        const double decay = tables_.tilt_decay;
        mood_ += mood_gain * error;
        tilt_ = decay * (tilt_ + tilt_gain * error);
        mood_variance_ += kDrift - mood_gain * of_mood;
        covariance_ = decay * (covariance_ - mood_gain * of_tilt);
        const double left = tilt_variance_ - tilt_gain * of_tilt - kTiltVariance;
        tilt_variance_ = decay * decay * left + kTiltVariance;
    }

    // Variance of what mood and tilt make of a step.
    double uncertainty(double slope) const {
        const double further = 2.0 * covariance_ + slope * tilt_variance_;
        return mood_variance_ + slope * further;
    }

    double bound(double slope, double spread) const {
        return kSurprise * kNoise * std::sqrt(uncertainty(slope) + spread + 1.0);
    }

    // The part of an error that is believed, and how uncertain that makes the residual.
    std::pair<double, double> believe(size_t at, double error, double spread) {
        const double slope = tables_.slopes[at];
        double most = bound(slope, spread);
        if (std::abs(error) <= most) {
            last_surprise_ = surprises_[at] = 0.0;
            return {error, spread};
        }
        const double direction = std::copysign(1.0, error);
        if (direction == last_surprise_) {
            const double jump = (error / kNoise) * (error / kNoise);
            mood_variance_ += jump;
            tilt_variance_ += slope * jump;
            ambiguous_ = slope;
            most = std::abs(error);
        } else if (direction == surprises_[at]) {
            Visits& visits = visits_of(at);
            visits.weight *= kAfterChange;
            visits.seen *= kAfterChange;
            spread = 1.0 / shrinkage_;
            tilt_variance_ += slope * spread;
            most = std::min(std::abs(error), bound(slope, spread));
        }
        last_surprise_ = surprises_[at] = direction;
        return {direction * most, spread};
    }

    // Adds a visit, which is worth less the less certain mood and tilt are.
    void remember(size_t at, double residual) {
        worth_ *= decay_;
        const double weight = 1.0 / ((1.0 + uncertainty(tables_.slopes[at])) * worth_);
        Visits& visits = visits_of(at);
        visits.weight += weight;
        visits.seen += weight * residual;
        const double keep = std::min(1.0, kMaxVisits / (visits.weight * worth_));
        visits.weight *= keep;
        visits.seen *= keep;
        if (worth_ < kForgotten) {
            renew();
        }
    }

    Visits& visits_of(size_t at) {
        for (Visits& each : visits_) {
            if (each.bin == at) {
                return each;
            }
        }
        visits_.push_back({at, 0.0, 0.0});
        return visits_.back();
    }

    // Begins to count in whole visits again, without those that are forgotten.
    void renew() {
        const double worth = std::exchange(worth_, 1.0);
        std::vector<Visits> kept;
        for (const Visits& each : visits_) {
            if (each.weight * worth > kForgotten) {
                kept.push_back({each.bin, each.weight * worth, each.seen * worth});
            }
        }
        visits_ = std::move(kept);
    }

    const CorrectionTables& tables_;
    double shrinkage_, decay_;
    bool knows_unit_;
    double mood_ = 0.0, tilt_ = 0.0;
    double mood_variance_ = 1.0, tilt_variance_ = kTiltVariance, covariance_ = 0.0;
    double ambiguous_ = 0.0;  // slope of steps that have changed, until a narrower one is seen
    double worth_ = 1.0;          // of the unit that visits are counted in
    std::vector<Visits> visits_;  // in the order of their first ones
    std::vector<double> surprises_;
    double last_surprise_ = 0.0;
    std::vector<Sum> heard_;  // by bin, what hear() said since the last visit
};

}  // namespace paceline
