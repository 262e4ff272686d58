#include "forward/altup.h"

#include <algorithm>
#include <cmath>

#include "forward/forward.h"

namespace paceline {
namespace {

constexpr float LEAST_SQUARE = 1e-5f;  // of a stream's mean square that another is divided by

// The sum of x[i] * y[i], in sixteen lanes that are added up in their order.
float dot(const float* x, const float* y, int n) {
    float lanes[TILE] = {}, total = 0.0f;
    int at = 0;
    for (; at + TILE <= n; at += TILE) {
        for (int i = 0; i < TILE; ++i) {
            lanes[i] += x[at + i] * y[at + i];
        }
    }
    for (int i = 0; at < n; ++at, ++i) {
        lanes[i] += x[at] * y[at];
    }
    for (const float lane : lanes) {
        total += lane;
    }
    return total;
}

float root_mean_square(const float* x, int n, float least = 0.0f) {
    return std::sqrt(std::max(dot(x, x, n) / float(n), least));
}

// The sum of `each` of all elements, in sixteen lanes that are added up in their order.
template <typename Each> double sum_of(const float* x, int n, const Each& each) {
    double lanes[TILE] = {}, total = 0.0;
    int at = 0;
    for (; at + TILE <= n; at += TILE) {
        for (int i = 0; i < TILE; ++i) {
            lanes[i] += each(x[at + i]);
        }
    }
    for (int i = 0; at < n; ++at, ++i) {
        lanes[i] += each(x[at]);
    }
    for (const double lane : lanes) {
        total += lane;
    }
    return total;
}

}  // namespace

void cut_gates(float* gates, int width, float deviations) {
    const double mean = sum_of(gates, width, [](float x) { return double(x); }) / width;
    const double squares = sum_of(gates, width, [&](float x) { return (x - mean) * (x - mean); });
    const float bound = float(mean + std::sqrt(squares / width) * deviations);
    for (int i = 0; i < width; ++i) {
        gates[i] = gates[i] < bound ? 0.0f : gates[i] - bound;  // a NaN stays one
    }
}

// What a row says of its streams: scores[streams].
void Decoder::stream_scores(const AltUpLayer& w, const float* x, float* scores, float* spare) const {
    const int n = shape_.hidden;
    kernels().rms_norm(x, w.router_norm, shape_.norm_eps, n, spare);
    for (int i = 0; i < altup_->streams; ++i) {
        scores[i] = std::tanh(dot(spare, w.router + size_t(i) * n, n));
    }
}

void Decoder::spread_streams(int rows) {
    const int n = shape_.hidden, count = altup_->streams;
    streams_.need(size_t(rows) * count * ld_hidden_);
    pool().each(rows, [&](int row, int) { std::copy_n(x_row(row), n, stream(row, 0)); });
    for (int i = 1; i < count; ++i) {
        const Linear& to = altup_->spread[size_t(i - 1)];
        pool().each(rows, [&](int row, int thread) {
            normed(x_row(row), nullptr, scratch(thread));
            to.take(scratch(thread), in_hidden_, row, spare(thread));
        });
        run_linear(to, in_hidden_, {branch_.get(), nullptr, ld_hidden_, 1.0f});
        pool().each(rows, [&](int row, int) {
            const float* found = branch_.get() + size_t(row) * ld_hidden_;
            const float wanted = root_mean_square(x_row(row), n);
            const float size = root_mean_square(found, n, LEAST_SQUARE);
            std::transform(found, found + n, stream(row, i),
                           [&](float each) { return each * wanted / size; });
        });
    }
}

void Decoder::gather_streams(int rows) {
    const int n = shape_.hidden, count = altup_->streams;
    pool().each(rows, [&](int row, int) { std::copy_n(stream(row, 0), n, x_row(row)); });
    for (int i = 1; i < count; ++i) {
        const Linear& from = altup_->gather[size_t(i - 1)];
        pool().each(rows, [&](int row, int thread) {
            normed(stream(row, i), nullptr, scratch(thread));
            from.take(scratch(thread), in_hidden_, row, spare(thread));
        });
        run_linear(from, in_hidden_, {branch_.get(), nullptr, ld_hidden_, 1.0f});
        pool().each(rows, [&](int row, int) {
            const float* found = branch_.get() + size_t(row) * ld_hidden_;
            const float wanted = root_mean_square(stream(row, 0), n);
            const float size = root_mean_square(found, n, LEAST_SQUARE);
            float* x = x_row(row);
            for (int at = 0; at < n; ++at) {
                x[at] += found[at] * wanted / size;
                x[at] = i + 1 == count ? x[at] / float(count) : x[at];
            }
        });
    }
}

void Decoder::predict_streams(const DecoderLayer& layer, int rows) {
    const AltUpLayer& w = *layer.altup;
    const int n = shape_.hidden, count = altup_->streams, ld_rank = round_up(w.left.n(), TILE);
    laurel_.need(size_t(rows) * ld_hidden_);
    ranks_.need(size_t(rows) * ld_rank);
    pool().each(rows, [&](int row, int thread) {
        std::vector<float> scores(count), weights(count), old(size_t(count) * n);
        stream_scores(w, stream(row, altup_->active), scores.data(), scratch(thread));
        for (int j = 0; j < count; ++j) {
            std::copy_n(stream(row, j), n, old.begin() + ptrdiff_t(j) * n);
        }
        for (int k = 0; k < count; ++k) {
            for (int j = 0; j < count; ++j) {
                weights[j] = dot(scores.data(), w.predict + size_t(k * count + j) * count, count);
            }
            float* x = stream(row, k);
            for (int at = 0; at < n; ++at) {
                float sum = weights[0] * old[at];
                for (int j = 1; j < count; ++j) {
                    sum += weights[j] * old[size_t(j) * n + at];
                }
                x[at] += sum;
            }
        }
        std::copy_n(stream(row, altup_->active), n, x_row(row));
        norm_for(w.left, row, layer.input_norm, thread);
    });
    run_linear(w.left, in_hidden_, {ranks_.get(), nullptr, ld_rank, 1.0f});
    const Inputs inner = inputs_.view(rows, w.left.n(), most_orders_);
    pool().each(rows, [&](int row, int thread) {
        w.right.take(ranks_.get() + size_t(row) * ld_rank, inner, row, spare(thread));
    });
    run_linear(w.right, inner, {laurel_.get(), nullptr, ld_hidden_, 1.0f});
    pool().each(rows, [&](int row, int thread) {
        float *laurel = laurel_.get() + size_t(row) * ld_hidden_, *read = scratch(thread);
        normed(laurel, w.norm, laurel);
        normed(x_row(row), layer.input_norm, read);
        for (int at = 0; at < n; ++at) {
            laurel[at] += read[at];
        }
        layer.qkv.take(read, in_hidden_, row, spare(thread));
    });
}

void Decoder::add_laurel(int row) {
    const float *laurel = laurel_.get() + size_t(row) * ld_hidden_, half = std::sqrt(0.5f);
    float* x = x_row(row);
    for (int at = 0; at < shape_.hidden; ++at) {
        x[at] = (x[at] + laurel[at]) * half;
    }
}

void Decoder::correct_streams(const DecoderLayer& layer, int row, float* spare) {
    const AltUpLayer& w = *layer.altup;
    const int n = shape_.hidden, count = altup_->streams;
    std::vector<float> scores(count), change(n);
    float* x = x_row(row);
    stream_scores(w, x, scores.data(), spare);
    const float* active = stream(row, altup_->active);
    std::transform(x, x + n, active, change.begin(), [](float a, float b) { return a - b; });
    for (int k = 0; k < count; ++k) {
        const float share = dot(scores.data(), w.correct + size_t(k) * count, count) + 1.0f;
        float* to = stream(row, k);
        for (int at = 0; at < n; ++at) {
            to[at] += share * change[at];
        }
    }
    for (int at = 0; at < n; ++at) {
        x[at] = w.scale ? active[at] * w.scale[at] : active[at];
    }
}

void Decoder::end_streams(const DecoderLayer& layer, int row) {
    float* branch = branch_.get() + size_t(row) * ld_hidden_;
    norm(branch, layer.gate->norm, branch);
    for (int k = 1; k < altup_->streams; ++k) {
        float* x = stream(row, k);
        for (int at = 0; at < shape_.hidden; ++at) {
            x[at] += branch[at];
        }
    }
    std::copy_n(stream(row, altup_->active), shape_.hidden, x_row(row));
}

}  // namespace paceline
