// What a cost table has wrong now: CostFilter of paceline/planner/corrections.py in C++, where it is
// described. Its arithmetic is that of the Python code, to the last bit. Knows no Python.
#pragma once

#include <cstddef>
#include <vector>

namespace paceline {

class CostFilter {
  public:
    struct Surprise {
        double error, variance;
    };

    CostFilter(double spread, bool is_relative);

    bool knows_unit() const { return knows_unit_; }
    double factor(size_t width) const { return factor_at(place(width)); }
    // Times of `width` rows and more, one after another, each by its factor.
    void correct(size_t width, std::vector<double>* times) const;
    std::vector<double> doubts(size_t width, size_t count) const;
    double deviation(size_t width) const;
    Surprise observe(size_t width, double level);

  private:
    static constexpr size_t kFullWidth = 16, kMaxWidth = 1024, kPlaces = 64;

    // Observations of one width, drawn towards 0.
    struct Residual {
        double seen = 0.0, weight = 0.0, at = 0.0;
        bool is_known = false;
        int surprise = 0;  // direction of the latest error if it was not believed
    };
    struct State {
        double mean, variance;
    };

    static size_t place(size_t width);
    static double share(size_t place);
    double factor_at(size_t place) const;
    double weight_of(const Residual& residual) const;
    State state_of(const Residual& residual) const;
    double uncertainty(double share) const;
    double surprised(size_t place, double error, double bound);
    void settle(double share, double error, double spread);

    bool knows_unit_;
    double trust_;
    double scale_ = 0.0, slope_ = 0.0;
    double scale_variance_ = 1.0, slope_variance_, covariance_ = 0.0;
    int latest_surprise_ = 0;
    double steps_ = 0.0;
    std::vector<Residual> residuals_ = std::vector<Residual>(kPlaces);
};

}  // namespace paceline
