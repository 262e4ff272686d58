// The rows of one step as recurrent layers see them, and each layer's phases over all requests. Owns
// what is made once and shared by the layers; knows no linears.
#pragma once

#include <vector>

#include "forward/buffers.h"
#include "kernels/recurrent.h"
#include "layers/walk.h"

namespace paceline {

// Where a request's layers begin, and what they keep: see StateSpan in paceline/models/backend.py.
struct StateSpan {
    int read, write, lane;
    std::vector<int32_t> path;  // entries of the lane's log
    int certain;                // leading rows, a chain
};

// What a layer keeps, over all slots and lanes.
struct LayerStates {
    float *conv, *state;                   // [slots, kernel - 1, channels]; [slots, state_floats]
    float *log_conv;                       // [lanes, nodes, channels]
    float *log_key, *log_added, *log_decay;  // [lanes, nodes, ...]: see LoggedRow
    uint8_t* due;                          // [lanes], whether the path of a log is still to be folded
    int slots, lanes, nodes;

    size_t entry(int lane, int node) const { return size_t(lane) * size_t(nodes) + size_t(node); }
    // Those of another layer where all layers' follow one another, of these as the first ones.
    LayerStates of_layer(size_t index, const Convolution& conv, const RecurrentShape& shape) const;
};

// Raises std::invalid_argument where a span's parents, slots, lane or path are not such as a step can
// have.
void check_span(const std::vector<int32_t>& parents, const StateSpan& where,
                const LayerStates& states);

// Parts of the rows of a batch. Queries and keys are changed in place.
struct RecurrentRows {
    float *query, *key;        // [rows, ld]
    const float* value;        // [rows, ld]
    float *rate, *decay;       // [rows, ld_numbers], raw; without rates a Mamba-2's `rate` is null
    ptrdiff_t ld, ld_numbers;
};

class RecurrentStep {
  public:
    void clear(int kernel);
    // The next rows of the batch are those of a request: their parents, from -1 on.
    void add(const std::vector<int32_t>& parents, StateSpan where);

    // A layer is `begin`, `convolve`, where it has a recurrence `recur`, and `end`: what was due of
    // the logs is folded in both.
    void begin(const LayerStates& states);
    void convolve(const Convolution& conv, const LayerStates& states, const float* x, ptrdiff_t ld_x,
                  float* y, ptrdiff_t ld_y);
    void recur(const RecurrentShape& shape, const RecurrentNumbers& numbers, const float* skip,
               const LayerStates& states, const RecurrentRows& in, float* y, ptrdiff_t ld_y);
    void end(const LayerStates& states);

    int num_rows() const { return num_rows_; }

  private:
    struct Request {
        StateSpan where;
        int first, count;
        int first_step, num_steps, first_window;
        std::vector<int32_t> last_window;
        int num_folded;    // in this layer
        int first_folded;  // of `folded_`
    };

    void prepare(const RecurrentShape& shape, const RecurrentNumbers& numbers,
                 const RecurrentRows& in);
    // Keys and decays; the walk has logged what it added.
    void log_rows(const RecurrentShape& shape, const LayerStates& states, const RecurrentRows& in);
    // Where the walk finds the rows, and what it folds.
    void find_rows(const RecurrentShape& shape, const LayerStates& states, const RecurrentRows& in,
                   float* y, ptrdiff_t ld_y);
    template <typename Work> void each_part(int units, int least, const Work& work) const;

    std::vector<Request> requests_;
    size_t num_requests_ = 0;  // of those, the rest being kept for their memory
    int num_rows_ = 0, kernel_ = 0, branches_ = 0;
    std::vector<WalkStep> steps_;
    std::vector<int32_t> windows_;
    std::vector<int> request_of_;         // [rows]
    std::vector<float*> logged_inputs_;   // [rows]
    std::vector<const float*> folded_inputs_;
    std::vector<LoggedRow> folded_;
    std::vector<RecurrentRow> rows_;
    Buffer<float> match_, rates_, added_, stacks_;
};

}  // namespace paceline
