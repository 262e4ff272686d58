// What the target's noise says of the tokens that it may sample: paceline/proposers/base/noise.py in
// C++, where it is described. Its arithmetic is that of the Python code, to the last bit. Knows no
// Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

class TargetNoise {
  public:
    // Of a request whose tokens are not sampled.
    TargetNoise() = default;
    TargetNoise(uint64_t seed, uint32_t sample, double weight, double mean)
        : seed_(seed), sample_(sample), weight_(weight), mean_(mean) {}

    // How much likelier the noise makes a token, which is `mean` on average.
    double factor(size_t position, uint32_t token) const;

    // Makes probabilities of candidates for the token at a position, which sum to at most 1, those
    // in view of the noise. Each has a `token` and a `prob`.
    template <typename Candidate>
    void weigh(size_t position, std::vector<Candidate>* candidates) const {
        if (weight_ == 0.0 || candidates->empty()) {
            return;
        }
        double rest = 1.0, total = 0.0;
        for (Candidate& each : *candidates) {
            rest -= each.prob;
            each.prob *= factor(position, static_cast<uint32_t>(each.token));
            total += each.prob;
        }
        total += mean_ * (rest > 0.0 ? rest : 0.0);
        for (Candidate& each : *candidates) {
            each.prob /= total;
        }
    }

  private:
    uint64_t seed_ = 0;
    uint32_t sample_ = 0;
    double weight_ = 0.0, mean_ = 1.0;
};

}  // namespace paceline
