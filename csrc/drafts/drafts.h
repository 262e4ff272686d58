// What was drafted for the requests of a step: paceline/planner/drafts.py in C++, where it is
// described. Its arithmetic is that of the Python code, so that both choose alike to the last bit.
// Knows no Python; requests are named by their place in the step, proposers and origins by numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafts/calibration.h"
#include "drafts/draft.h"
#include "drafts/plan.h"

namespace paceline {

class Drafts {
  public:
    // What is there of one request.
    struct Part {
        int64_t id;
        std::vector<DraftNodes> trees;
        DraftNodes whole;  // all of them as one, once it was asked for
        bool is_whole = false;
        std::vector<double> path_probs;  // of the nodes of `whole`
        std::vector<int32_t> chosen;     // of the nodes of `whole`
    };

    explicit Drafts(bool calibrates) : calibrates_(calibrates) {}

    Calibration& calibration() { return calibration_; }
    bool calibrates() const { return calibrates_; }

    void begin(const std::vector<int64_t>& ids);
    size_t size() const { return parts_.size(); }
    // A tree that is one, with its estimates in 0..1. `source`: who drafted it.
    void add(size_t index, int32_t source, DraftNodes tree);
    // The most tokens that one draft of a request is expected to bring.
    double expected(size_t index) const;
    // Levels of the deepest tree of a source; 1 where it drafted nothing.
    int32_t depth(int32_t source) const;
    const Part& whole(size_t index);
    // Trees beyond the first of each request.
    size_t num_merges() const;

    // Chooses from all that was drafted; the plan has the requests' limits. Returns how many nodes.
    size_t choose(Plan plan);
    // What the chosen nodes of a source promise beyond their price, in tokens.
    double gain(int32_t source, const std::vector<size_t>& indices, double price) const;
    // Learns from what the target emitted after a request of this step, at least a token.
    void learn(int64_t id, const std::vector<int64_t>& emitted);

  private:
    bool calibrates_;
    Calibration calibration_;
    std::vector<Part> parts_;
    size_t latest_ = 0;                // the part that was looked for last
    std::vector<int32_t> source_of_;  // by origin
};

}  // namespace paceline
