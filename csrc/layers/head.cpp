#include "layers/head.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

constexpr int HEAD_TILES = 32;  // tiles of logits that the greedy head holds at a time

}  // namespace

Inputs Head::take(int samples) {
    const Inputs x = shared_.inputs(samples, shared_.shape.hidden);
    pool().each(samples, [&](int row, int thread) {
        weights_.take(sampled_.row(row), x, row, shared_.spare(thread));
    });
    return x;
}

void Head::run(int samples, float* logits) {
    const int count = shared_.shape.num_logits;
    if (samples == 0) {
        return;
    }
    run_linear(weights_, take(samples), out(logits, count));
    pool().each(shared_.shape.logits_softcap != 0.0f ? samples : 0, [&](int row, int) {
        softcap(logits + static_cast<size_t>(row) * count, count);
    });
}

void Head::run_greedy(int samples, int32_t* tokens) {
    if (samples == 0) {
        return;
    }
    const Inputs x = take(samples);
    constexpr int width = HEAD_TILES * TILE;
    const int threads = pool().size(), tiles = weights_.tiles();
    chunks_.need(static_cast<size_t>(threads) * samples * width);
    best_values_.assign(static_cast<size_t>(threads) * samples, -INFINITY);
    best_tokens_.assign(static_cast<size_t>(threads) * samples, 0);
    pool().each((tiles + HEAD_TILES - 1) / HEAD_TILES, [&](int piece, int thread) {
        const size_t own = static_cast<size_t>(thread) * samples;
        float* chunk = chunks_.get() + own * width;
        const int begin = piece * HEAD_TILES, first = begin * TILE;
        const int count = std::min(width, shared_.shape.num_logits - first);
        weights_.run(x, out(chunk - first, width), begin, std::min(begin + HEAD_TILES, tiles));
        for (int row = 0; row < samples; ++row, chunk += width) {
            softcap(chunk, count);
            compare(chunk, first, count, own + row);
        }
    });
    for (int row = 0; row < samples; ++row) {
        float value = -INFINITY;
        int32_t token = 0;
        for (int thread = 0; thread < threads; ++thread) {
            const size_t at = static_cast<size_t>(thread) * samples + row;
            if (best_values_[at] > value || (best_values_[at] == value && best_tokens_[at] < token)) {
                value = best_values_[at];
                token = best_tokens_[at];
            }
        }
        tokens[row] = std::isfinite(value) ? token : -1;
    }
}

void Head::compare(const float* logits, int first, int count, size_t best) {
    // A thread's pieces ascend, so the first of equal values has the lowest id.
    float& value = best_values_[best];
    for (int i = 0; i < count; ++i) {
        if (logits[i] > value) {
            value = logits[i];
            best_tokens_[best] = first + i;
        } else if (!(logits[i] <= value)) {
            value = INFINITY;  // a NaN: nothing is larger, and it is not finite
        }
    }
}

}  // namespace paceline
