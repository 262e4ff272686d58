// Kernels of the sampler: one row of logits to its best tokens. Knows no requests: penalties, bias
// and masks have been applied to the row before.
//
// Everything is float64 and written without fused operations, so that a row's tokens and scores are
// the same bits at every instruction-set level.
#pragma once

#include <cstdint>

namespace paceline {

constexpr int SAMPLER_BLOCK = 64;  // tokens whose maximum is kept, and whose noise is made at once

inline int sampler_blocks(int vocab) { return (vocab + SAMPLER_BLOCK - 1) / SAMPLER_BLOCK; }

// Which tokens stay: exactly top_k (ties: the lower id), then top_p, then min_p.
struct SamplerFilter {
    double temperature;
    int top_k;         // anything outside 1..vocab - 1 keeps all
    double top_p;      // 1 keeps all
    double log_min_p;  // -inf keeps all
};

// Whose noise: Philox4x32-10 with key = seed and counter = (position, token / 4, sample, 0).
struct NoiseKey {
    uint64_t seed;
    uint32_t position, sample;
};

struct Candidate {
    float z;
    int32_t id;
    double weight;
};

// Of one thread.
struct SamplerScratch {
    float* block_max;  // [sampler_blocks(vocab)]
    Candidate* list;   // [vocab]
};

struct SamplerKernels {
    // Lowest id of the maximum; false where that is no finite number, and then the id is that of
    // the first NaN, else of the first infinity, else 0.
    bool (*argmax)(const float* z, int vocab, const SamplerScratch&, int64_t* id);

    // The k best by logit (ties: the lower id). Returns how many there are: min(k, vocab), or -1
    // for a row with NaN or infinity, or where every token is masked.
    int (*top)(const float* z, int vocab, int k, const SamplerScratch&, int64_t* ids,
               double* scores);

    // The k best survivors by z / temperature + noise (ties: the lower id). Returns how many there
    // are, or -1 as above. `tokens` says, ascending, which token each of the vocab columns is, whose
    // noise it has; null: column i is token i. The ids are columns.
    int (*perturbed_top)(const float* z, int vocab, const int64_t* tokens, const SamplerFilter&,
                         const NoiseKey&, int k, const SamplerScratch&, int64_t* ids,
                         double* scores);

    // y = log_softmax(z), rounded once to float32; all NaN for a row as above.
    void (*log_softmax)(const float* z, int vocab, const SamplerScratch&, float* y);

    int (*count_above)(const float* z, int vocab, float bound);

    // x of the tokens of block `block`: [SAMPLER_BLOCK].
    void (*noise_words)(const NoiseKey&, int block, uint32_t* x);
};

}  // namespace paceline
