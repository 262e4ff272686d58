// From hidden states of sampled rows to logits, or to the token of the largest one.
#pragma once

#include <cstdint>
#include <vector>

#include "forward/workspace.h"

namespace paceline {

class Head {
  public:
    Head(const Linear& weights, Workspace& shared) : weights_(weights), shared_(shared) {}

    void begin(int samples) { sampled_.need(samples, shared_.shape.hidden); }
    // Where the last norm of a sampled row goes.
    float* row(int sample) const { return sampled_.row(sample); }
    // [samples, num_logits].
    void run(int samples, float* logits);
    // Of each row the lowest id of its maximum; -1 where a logit is not a finite number.
    void run_greedy(int samples, int32_t* tokens);

  private:
    Inputs take(int samples);
    LinearOut out(float* y, int ld) const {
        return {y, nullptr, ld, 1.0f / shared_.shape.logits_divisor};
    }
    void softcap(float* logits, int count) const {
        if (shared_.shape.logits_softcap != 0.0f) {
            kernels().softcap(logits, count, shared_.shape.logits_softcap);
        }
    }
    // Some logits of a row, from `first` on, against the best that a thread has seen.
    void compare(const float* logits, int first, int count, size_t best);

    const Linear& weights_;
    Workspace& shared_;
    RowBuffer sampled_;
    Buffer<float> chunks_;              // [threads, samples, logits of some tiles]
    std::vector<float> best_values_;    // [threads, samples]
    std::vector<int32_t> best_tokens_;  // [threads, samples]
};

}  // namespace paceline
