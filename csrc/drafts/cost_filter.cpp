#include "drafts/cost_filter.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace paceline {
namespace {

constexpr double kNoise = 0.06, kDrift = 0.1, kSurprise = 3.0;
constexpr double kMostVisits = 6.0, kMemory = 300.0;
constexpr double kUnseenSlope = (0.1 / kNoise) * (0.1 / kNoise);
constexpr double kKeep = 1.0 - 1.0 / 1000.0;

}  // namespace

CostFilter::CostFilter(double spread, bool is_relative)
    : knows_unit_(!is_relative), trust_((kNoise / spread) * (kNoise / spread)),
      slope_variance_(kUnseenSlope) {}

size_t CostFilter::place(size_t width) {
    static const std::vector<uint8_t> places = [] {
        std::vector<uint8_t> found(kMaxWidth + 1);
        for (size_t wide = 2; wide <= kMaxWidth; ++wide) {
            const double octaves = std::log2(static_cast<double>(wide) / kFullWidth);
            found[wide] = static_cast<uint8_t>(
                wide <= kFullWidth ? wide - 1 : kFullWidth - 1 + std::ceil(8.0 * octaves));
        }
        return found;
    }();
    return places[std::min(width, kMaxWidth)];
}

double CostFilter::share(size_t place) {
    static const std::vector<double> shares = [] {
        std::vector<double> found(kPlaces);
        for (size_t width = 1; width <= kMaxWidth; ++width) {  // the widest step of a place counts
            const double octaves = std::log2(static_cast<double>(width));
            found[CostFilter::place(width)] = std::min(1.0, octaves / 4.0);
        }
        return found;
    }();
    return shares[place];
}

double CostFilter::weight_of(const Residual& residual) const {
    return residual.weight == 0.0 ? 0.0
                                  : residual.weight * std::exp((residual.at - steps_) / kMemory);
}

CostFilter::State CostFilter::state_of(const Residual& residual) const {
    const double weight = weight_of(residual), total = trust_ + weight;
    return {weight * residual.seen / total, 1.0 / total};
}

double CostFilter::factor_at(size_t place) const {
    const Residual& residual = residuals_[place];
    const double level = scale_ + share(place) * slope_;
    return std::exp(residual.is_known ? level + state_of(residual).mean : level);
}

void CostFilter::correct(size_t width, std::vector<double>* times) const {
    size_t latest = kPlaces;
    double factor = 1.0;
    for (size_t i = 0; i < times->size(); ++i) {
        const size_t at = place(width + i);
        if (at != latest) {
            latest = at;
            factor = factor_at(at);
        }
        (*times)[i] *= factor;
    }
}

std::vector<double> CostFilter::doubts(size_t width, size_t count) const {
    const double unseen = 1.0 / trust_;
    std::vector<double> found(count + 1);
    for (size_t i = 0; i <= count; ++i) {
        const size_t at = place(width + i);
        const Residual& residual = residuals_[at];
        const double of_share = share(at) * share(at);
        double variance = of_share * slope_variance_ + unseen;
        if (residual.is_known) {
            variance += state_of(residual).variance - unseen;
        }
        found[i] = std::sqrt(std::min(1.0, variance / (of_share * kUnseenSlope + unseen)));
    }
    return found;
}

double CostFilter::deviation(size_t width) const {
    const size_t at = place(width);
    const Residual& residual = residuals_[at];
    const double spread = residual.is_known ? state_of(residual).variance : 1.0 / trust_;
    return kNoise * std::sqrt(std::max(0.0, uncertainty(share(at)) + spread));
}

CostFilter::Surprise CostFilter::observe(size_t width, double level) {
    const size_t at = place(width);
    Residual& residual = residuals_[at];
    steps_ += 1.0;
    residual.is_known = true;
    auto [mean, spread] = state_of(residual);
    if (!knows_unit_) {
        knows_unit_ = true;
        scale_ = level - mean;
    }
    double error = level - scale_ - share(at) * slope_ - mean;
    double doubt = uncertainty(share(at));
    const double bound = kSurprise * kNoise * std::sqrt(doubt + spread + 1.0);
    if (std::fabs(error) <= bound) {
        latest_surprise_ = residual.surprise = 0;
    } else {
        error = surprised(at, error, bound);
        doubt = uncertainty(share(at));
        spread = state_of(residual).variance;
    }
    settle(share(at), error, spread);
    const double worth = 1.0 / (1.0 + doubt), left = weight_of(residual);
    residual.weight = left + worth;
    residual.at = steps_;
    residual.seen += worth / residual.weight * (mean + error - residual.seen);
    residual.weight = std::min(residual.weight, kMostVisits);
    return {error, doubt + spread + 1.0};
}

void CostFilter::settle(double share, double error, double spread) {
    const double of_scale = scale_variance_ + share * covariance_;
    const double of_slope = covariance_ + share * slope_variance_;
    const double total = of_scale + share * of_slope + spread + 1.0;
    const double scale_gain = of_scale / total, slope_gain = of_slope / total;
    scale_ += scale_gain * error;
    slope_ = kKeep * (slope_ + slope_gain * error);
    scale_variance_ += kDrift - scale_gain * of_scale;
    covariance_ = kKeep * (covariance_ - scale_gain * of_slope);
    const double left = slope_variance_ - slope_gain * of_slope - kUnseenSlope;
    slope_variance_ = kKeep * kKeep * left + kUnseenSlope;
}

double CostFilter::surprised(size_t place, double error, double bound) {
    Residual& residual = residuals_[place];
    const int direction = std::signbit(error) ? -1 : 1;
    if (direction == latest_surprise_) {
        const double jump = (error / kNoise) * (error / kNoise);
        scale_variance_ += jump;
        slope_variance_ += share(place) * jump;
        bound = std::fabs(error);
    } else if (direction == residual.surprise) {
        residual.weight *= 0.05;
        slope_variance_ += share(place) / trust_;
        const double variance = uncertainty(share(place)) + state_of(residual).variance + 1.0;
        bound = std::min(std::fabs(error), kSurprise * kNoise * std::sqrt(variance));
    }
    latest_surprise_ = residual.surprise = direction;
    return direction * bound;
}

double CostFilter::uncertainty(double share) const {
    const double further = 2.0 * covariance_ + share * slope_variance_;
    return scale_variance_ + share * further;
}

}  // namespace paceline
