// What draft nodes are estimated at, learnt from what was accepted: paceline/policy/acceptance.py in
// C++, where it is described. Its arithmetic is that of the Python code, so that both estimate alike
// to the last bit. Knows no Python.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "draft.h"

namespace paceline {

struct Outcome {
    int32_t node;
    double value;  // 1 for a node that carries the target's token, else 0
};

// The labelled nodes of a draft in place of which the target emitted these tokens, at least one.
std::vector<Outcome> outcomes(const std::vector<int64_t>& tokens, const Parents& parents,
                              const std::vector<int64_t>& emitted);

class Calibration {
  public:
    struct Estimate {
        int32_t cell;
        double logit;
    };
    using Row = std::vector<Estimate>;  // by kSteps * estimate
    struct Error {
        int32_t cell;
        double value;  // outcome less estimate
    };
    static constexpr int kSteps = 256;
    static constexpr int kRows = 10;  // by depth; the last one is for all that is deeper

    size_t num_origins() const { return rows_.size(); }
    size_t num_cells() const { return corrections_.size(); }
    size_t num_requests() const { return fits_.size(); }
    // The next origin: kRows rows of kSteps + 1, and the log-odds of its cells.
    void add_origin(std::vector<Row> rows, const std::vector<double>& logits);

    // Replaces estimates in 0..1 of nodes, at least one, of these origins; returns their cells.
    std::vector<int32_t> calibrate(int64_t request, const std::vector<int32_t>& origins,
                                   const Parents& parents, std::vector<double>* probs);
    double estimate(int64_t request, int32_t origin, int64_t depth, double prob);
    void learn(int64_t request, const std::vector<Error>& errors);
    void finish(int64_t request);

  private:
    struct Fit {
        double offset = 0.0, slope = 1.0, drift = 0.0;
        void learn(double count, double error, double tilt, double spread);
    };
    // What was learnt of a request; where it lacks one of so many origins, all are added.
    std::vector<Fit>& fits_of(int64_t request, size_t least);
    const Estimate& at(int32_t origin, int64_t depth, double prob) const;
    double calibrated(const Fit& fit, const Estimate& found) const;

    std::vector<std::vector<Row>> rows_;                  // by origin, then depth
    std::vector<double> corrections_, logits_;            // by cell
    std::unordered_map<int64_t, std::vector<Fit>> fits_;  // by request, then origin
};

}  // namespace paceline
