// What draft nodes are estimated at, learnt from what was accepted: paceline/planner/acceptance.py in
// C++, where it is described. Its arithmetic is that of the Python code, so that both estimate alike
// to the last bit. Knows no Python.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "drafts/draft.h"

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
    using Rows = std::vector<std::vector<double>>;  // log-odds by depth, then kSteps * estimate
    struct Error {
        int32_t origin;
        double value;  // outcome less estimate
    };
    static constexpr int kSteps = 256;
    static constexpr int kRows = 10;  // by depth; the last one is for all that is deeper

    size_t num_origins() const { return rows_.size(); }
    size_t num_requests() const { return own_.size(); }
    // The next origin: kRows rows of kSteps + 1.
    void add_origin(Rows rows);

    // Requests of an adapter, which is above 0, share what those without, of 0, do not; at first it is
    // the same.
    void adapt(int64_t request, size_t adapter);
    // Replaces estimates in 0..1 of nodes of these origins.
    void calibrate(int64_t request, const std::vector<int32_t>& origins, const Parents& parents,
                   std::vector<double>* probs) const;
    double estimate(int64_t request, int32_t origin, int64_t depth, double prob) const;
    void learn(int64_t request, const std::vector<Error>& errors);
    void finish(int64_t request) {
        own_.erase(request);
        adapters_.erase(request);
    }

  private:
    struct Offset {
        double value = 0.0, drift = 0.0;
        void learn(double count, double error);
    };
    struct Offsets {
        const std::vector<Offset>* own;  // null: nothing was learnt
        const std::vector<double>& shared;
    };
    double probability(const Offsets& offsets, int32_t origin, int64_t depth, double prob) const;
    Offsets offsets_of(int64_t request) const;
    size_t adapter_of(int64_t request) const;

    std::vector<Rows> rows_;                               // by origin
    std::vector<std::vector<double>> shared_{std::vector<double>()};  // by adapter, then origin
    std::unordered_map<int64_t, size_t> adapters_;         // of requests that have one
    std::unordered_map<int64_t, std::vector<Offset>> own_;  // by request, then origin
};

}  // namespace paceline
