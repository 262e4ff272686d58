#include "layers/altup.h"

#include <algorithm>
#include <cmath>

#include "forward/workspace.h"

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

// The sum of `term` of all elements, in sixteen lanes that are added up in their order.
template <typename Term> double sum_of(const float* x, int n, const Term& term) {
    double lanes[TILE] = {}, total = 0.0;
    int at = 0;
    for (; at + TILE <= n; at += TILE) {
        for (int i = 0; i < TILE; ++i) {
            lanes[i] += term(x[at + i]);
        }
    }
    for (int i = 0; at < n; ++at, ++i) {
        lanes[i] += term(x[at]);
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

const AltUp& ResidualStreams::altup() const {
    return *weights_.altup;
}

void ResidualStreams::score(const AltUpLayer& w, const float* x, float* scores, float* spare) const {
    const int n = shared_.shape.hidden;
    kernels().rms_norm(x, w.router_norm, shared_.shape.norm_eps, n, spare);
    for (int i = 0; i < altup().streams; ++i) {
        scores[i] = std::tanh(dot(spare, w.router + size_t(i) * n, n));
    }
}

template <typename From> void ResidualStreams::project(const Linear& linear, const From& from) {
    pool().each(shared_.rows(), [&](int row, int thread) {
        shared_.norm_for(linear, row, from(row), nullptr, thread);
    });
    run_linear(linear, shared_.hidden, shared_.branch.out());
}

void ResidualStreams::spread() {
    const int n = shared_.shape.hidden, count = altup().streams, rows = shared_.rows();
    const RowBuffer& x = shared_.x;
    streams_.need(rows * count, n);
    pool().each(rows, [&](int row, int) { std::copy_n(x.row(row), n, stream(row, 0)); });
    for (int i = 1; i < count; ++i) {
        project(altup().spread[size_t(i - 1)], [&](int row) { return x.row(row); });
        pool().each(rows, [&](int row, int) {
            const float* projected = shared_.branch.row(row);
            const float wanted = root_mean_square(x.row(row), n);
            const float size = root_mean_square(projected, n, LEAST_SQUARE);
            std::transform(projected, projected + n, stream(row, i),
                           [&](float value) { return value * wanted / size; });
        });
    }
}

void ResidualStreams::gather() {
    const int n = shared_.shape.hidden, count = altup().streams, rows = shared_.rows();
    pool().each(rows, [&](int row, int) { std::copy_n(stream(row, 0), n, shared_.x.row(row)); });
    for (int i = 1; i < count; ++i) {
        project(altup().gather[size_t(i - 1)], [&](int row) { return stream(row, i); });
        pool().each(rows, [&](int row, int) {
            const float* projected = shared_.branch.row(row);
            const float wanted = root_mean_square(stream(row, 0), n);
            const float size = root_mean_square(projected, n, LEAST_SQUARE);
            float* x = shared_.x.row(row);
            for (int at = 0; at < n; ++at) {
                x[at] += projected[at] * wanted / size;
                x[at] = i + 1 == count ? x[at] / float(count) : x[at];
            }
        });
    }
}

void ResidualStreams::predict(const DecoderLayer& layer) {
    const AltUpLayer& w = *layer.altup;
    const int n = shared_.shape.hidden, count = altup().streams, rows = shared_.rows();
    laurel_.need(rows, n);
    ranks_.need(rows, w.left.n());
    pool().each(rows, [&](int row, int thread) {
        std::vector<float> scores(count), weights(count), old(size_t(count) * n);
        score(w, stream(row, altup().active), scores.data(), shared_.scratch(thread));
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
        std::copy_n(stream(row, altup().active), n, shared_.x.row(row));
        shared_.norm_for(w.left, row, layer.input_norm, thread);
    });
    run_linear(w.left, shared_.hidden, ranks_.out());
    const Inputs inner = shared_.inputs(rows, w.left.n());
    pool().each(rows, [&](int row, int thread) {
        w.right.take(ranks_.row(row), inner, row, shared_.spare(thread));
    });
    run_linear(w.right, inner, laurel_.out());
    pool().each(rows, [&](int row, int thread) {
        float *laurel = laurel_.row(row), *normed = shared_.scratch(thread);
        shared_.normed(laurel, w.norm, laurel);
        shared_.normed(shared_.x.row(row), layer.input_norm, normed);
        for (int at = 0; at < n; ++at) {
            laurel[at] += normed[at];
        }
        layer.qkv.take(normed, shared_.hidden, row, shared_.spare(thread));
    });
}

void ResidualStreams::add_laurel(int row) const {
    const float *laurel = laurel_.row(row), half = std::sqrt(0.5f);
    float* x = shared_.x.row(row);
    for (int at = 0; at < shared_.shape.hidden; ++at) {
        x[at] = (x[at] + laurel[at]) * half;
    }
}

void ResidualStreams::correct(const DecoderLayer& layer, int row, float* spare) const {
    const AltUpLayer& w = *layer.altup;
    const int n = shared_.shape.hidden, count = altup().streams;
    std::vector<float> scores(count), change(n);
    float* x = shared_.x.row(row);
    score(w, x, scores.data(), spare);
    const float* active = stream(row, altup().active);
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

void ResidualStreams::end(const DecoderLayer& layer, int row) const {
    float* branch = shared_.branch.row(row);
    shared_.norm(branch, layer.gate->norm, branch);
    for (int k = 1; k < altup().streams; ++k) {
        float* x = stream(row, k);
        for (int at = 0; at < shared_.shape.hidden; ++at) {
            x[at] += branch[at];
        }
    }
    std::copy_n(stream(row, altup().active), shared_.shape.hidden, shared_.x.row(row));
}

}  // namespace paceline
