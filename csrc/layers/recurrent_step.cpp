#include "layers/recurrent_step.h"

#include <algorithm>
#include <stdexcept>

#include "threads/thread_pool.h"

namespace paceline {
namespace {

constexpr int WALKS_PER_THREAD = 8;
constexpr int TILES_OF_WALK = 2;   // of a head, that a piece of work walks at least
constexpr int LEAST_COLUMNS = 4;    // of a convolution, times 16

void check_states(bool holds, const char* message) {
    if (!holds) {
        throw std::invalid_argument(message);
    }
}

}  // namespace

void check_span(const std::vector<int32_t>& parents, const StateSpan& where,
                const LayerStates& states) {
    const int rows = int(parents.size()), certain = where.certain;
    check_states(0 <= where.read && where.read < states.slots && 0 <= where.write &&
              where.write < states.slots && 0 <= where.lane && where.lane < states.lanes,
          "a span's state has no such slot or lane");
    check_states(0 <= certain && certain <= rows && rows - certain <= states.nodes,
          "a span has more rows than a log has entries");
    for (int row = 0; row < rows; ++row) {
        const bool follows = row < certain ? parents[row] == row - 1 : parents[row] >= certain - 1;
        check_states(parents[row] >= -1 && parents[row] < row && follows,
              "a row's parent is not before it, or a certain row has other children");
    }
    for (const int32_t entry : where.path) {
        check_states(0 <= entry && entry < states.nodes, "a path leaves the log");
    }
}

LayerStates LayerStates::of_layer(size_t index, const Convolution& conv,
                                  const RecurrentShape& shape) const {
    const size_t held = index * size_t(slots), rows = index * size_t(lanes) * size_t(nodes);
    LayerStates found = *this;
    found.conv += held * size_t(conv.channels) * size_t(conv.kernel - 1);
    found.state += held * shape.state_floats();
    found.log_conv += rows * size_t(conv.channels);
    found.log_key += rows * size_t(shape.keys());
    found.log_added += rows * size_t(shape.inner());
    found.log_decay += rows * size_t(shape.heads);
    found.due += index * size_t(lanes);
    return found;
}

void RecurrentStep::clear(int kernel) {
    kernel_ = kernel;
    num_requests_ = 0;
    num_rows_ = branches_ = 0;
    steps_.clear();
    windows_.clear();
    request_of_.clear();
}

void RecurrentStep::add(const std::vector<int32_t>& parents, StateSpan where) {
    if (num_requests_ == requests_.size()) {
        requests_.emplace_back();
    }
    Request& r = requests_[num_requests_];
    r.first = num_rows_;
    r.count = int(parents.size());
    r.first_step = int(steps_.size());
    r.first_window = int(windows_.size());
    branches_ = std::max(branches_, add_walk(parents, where.certain, steps_));
    r.num_steps = int(steps_.size()) - r.first_step;
    add_windows(parents, where.certain, kernel_, windows_, r.last_window);
    r.where = std::move(where);
    request_of_.insert(request_of_.end(), parents.size(), int(num_requests_));
    num_rows_ += r.count;
    ++num_requests_;
}

void RecurrentStep::begin(const LayerStates& states) {
    int folded = 0;
    for (size_t i = 0; i < num_requests_; ++i) {
        Request& r = requests_[i];
        r.num_folded = states.due[r.where.lane] ? int(r.where.path.size()) : 0;
        r.first_folded = folded;
        folded += r.num_folded;
    }
    folded_inputs_.resize(size_t(folded));
    folded_.resize(size_t(folded));
}

void RecurrentStep::end(const LayerStates& states) {
    for (size_t i = 0; i < num_requests_; ++i) {
        states.due[requests_[i].where.lane] = 0;
    }
}

// Calls work(request, begin, end) for parts of so many units of every request.
template <typename Work>
void RecurrentStep::each_part(int units, int least, const Work& work) const {
    const int requests = int(num_requests_), wanted = pool().size() * WALKS_PER_THREAD;
    const int parts = std::clamp((wanted + requests - 1) / requests, 1, (units + least - 1) / least);
    pool().each(requests * parts, [&](int piece, int thread) {
        const int part = piece % parts;
        work(requests_[size_t(piece / parts)], units * part / parts, units * (part + 1) / parts,
             thread);
    });
}

void RecurrentStep::convolve(const Convolution& conv, const LayerStates& states, const float* x,
                             ptrdiff_t ld_x, float* y, ptrdiff_t ld_y) {
    const size_t channels = size_t(conv.channels), held = channels * size_t(conv.kernel - 1);
    logged_inputs_.resize(size_t(num_rows_));
    for (size_t i = 0; i < num_requests_; ++i) {
        const Request& r = requests_[i];
        const auto logged = [&](int node) {
            return states.log_conv + states.entry(r.where.lane, node) * channels;
        };
        for (int k = 0; k < r.num_folded; ++k) {
            folded_inputs_[size_t(r.first_folded + k)] = logged(r.where.path[size_t(k)]);
        }
        for (int row = 0; row < r.count; ++row) {
            const int node = row - r.where.certain;
            logged_inputs_[size_t(r.first + row)] = node < 0 ? nullptr : logged(node);
        }
    }
    each_part((conv.channels + TILE - 1) / TILE, LEAST_COLUMNS,
              [&](const Request& r, int begin, int end, int) {
        const ConvolvedRows rows{states.conv + size_t(r.where.read) * held,
                                 states.conv + size_t(r.where.write) * held,
                                 folded_inputs_.data() + r.first_folded, r.num_folded,
                                 x + r.first * ld_x, y + r.first * ld_y, ld_x, ld_y, r.count,
                                 windows_.data() + r.first_window,
                                 logged_inputs_.data() + r.first,
                                 r.where.certain > 0 ? r.last_window.data() : nullptr};
        kernels().recurrent->convolve(conv, rows, begin * TILE, std::min(end * TILE, conv.channels));
    });
}

void RecurrentStep::prepare(const RecurrentShape& shape, const RecurrentNumbers& numbers,
                            const RecurrentRows& in) {
    const size_t rows = size_t(num_rows_), heads = size_t(shape.heads);
    match_.need(rows * size_t(shape.groups));
    rates_.need(rows * heads);
    added_.need(rows * size_t(shape.inner()));
    pool().each(num_rows_, [&](int row, int) {
        float *query = in.query + row * in.ld, *key = in.key + row * in.ld;
        float *decay = in.decay + row * in.ld_numbers, *rate = rates_.get() + size_t(row) * heads;
        if (in.rate) {
            std::copy_n(in.rate + row * in.ld_numbers, heads, rate);
        }
        kernels().recurrent->numbers(shape, numbers, query, key, rate, decay,
                                     match_.get() + size_t(row) * size_t(shape.groups));
    });
}

void RecurrentStep::log_rows(const RecurrentShape& shape, const LayerStates& states,
                             const RecurrentRows& in) {
    const size_t heads = size_t(shape.heads), keys = size_t(shape.keys());
    pool().each(num_rows_, [&](int row, int) {
        const Request& r = requests_[size_t(request_of_[size_t(row)])];
        const int node = row - r.first - r.where.certain;
        if (node >= 0) {
            const size_t entry = states.entry(r.where.lane, node);
            std::copy_n(in.key + row * in.ld, keys, states.log_key + entry * keys);
            std::copy_n(in.decay + row * in.ld_numbers, heads, states.log_decay + entry * heads);
        }
    });
}

void RecurrentStep::find_rows(const RecurrentShape& shape, const LayerStates& states,
                              const RecurrentRows& in, float* y, ptrdiff_t ld_y) {
    const size_t heads = size_t(shape.heads), inner = size_t(shape.inner());
    const auto logged = [&](const Request& r, int node) {
        return states.log_added + states.entry(r.where.lane, node) * inner;
    };
    rows_.resize(size_t(num_rows_));
    for (int row = 0; row < num_rows_; ++row) {
        const Request& r = requests_[size_t(request_of_[size_t(row)])];
        const int node = row - r.first - r.where.certain;
        rows_[size_t(row)] = {in.query + row * in.ld, in.key + row * in.ld,
                              match_.get() + size_t(row) * size_t(shape.groups),
                              in.value + row * in.ld, in.decay + row * in.ld_numbers,
                              rates_.get() + size_t(row) * heads,
                              node < 0 ? added_.get() + size_t(row) * inner : logged(r, node),
                              y + row * ld_y};
    }
    for (size_t i = 0; i < num_requests_; ++i) {
        const Request& r = requests_[i];
        for (int k = 0; k < r.num_folded; ++k) {
            const int node = r.where.path[size_t(k)];
            const size_t entry = states.entry(r.where.lane, node);
            folded_[size_t(r.first_folded + k)] = {states.log_key + entry * size_t(shape.keys()),
                                                   logged(r, node),
                                                   states.log_decay + entry * heads};
        }
    }
}

void RecurrentStep::recur(const RecurrentShape& shape, const RecurrentNumbers& numbers,
                          const float* skip, const LayerStates& states, const RecurrentRows& in,
                          float* y, ptrdiff_t ld_y) {
    prepare(shape, numbers, in);
    find_rows(shape, states, in, y, ld_y);
    const size_t stack = size_t(branches_) * 2 * shape.tile_floats();
    stacks_.need(stack * size_t(pool().size()));
    const int per_head = (shape.tiles() + TILES_OF_WALK - 1) / TILES_OF_WALK;
    each_part(shape.heads * per_head, 1, [&](const Request& r, int begin, int end, int thread) {
        const RecurrentWalk walk{states.state + size_t(r.where.read) * shape.state_floats(),
                                 states.state + size_t(r.where.write) * shape.state_floats(),
                                 folded_.data() + r.first_folded, r.num_folded,
                                 steps_.data() + r.first_step, r.num_steps,
                                 rows_.data() + r.first, skip};
        for (int unit = begin; unit < end; ++unit) {
            const int tile = unit % per_head * TILES_OF_WALK;
            kernels().recurrent->walk(shape, walk, unit / per_head, tile,
                                      std::min(tile + TILES_OF_WALK, shape.tiles()),
                                      stacks_.get() + stack * size_t(thread));
        }
    });
    log_rows(shape, states, in);  // after the walks, which fold entries that these may overwrite
}

}  // namespace paceline
