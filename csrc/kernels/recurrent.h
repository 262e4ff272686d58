// Recurrent layers: what their kernels read and write. The order in which a step's rows are walked is
// made by walk.h; knows no threads, no requests and no Python.
//
// A layer has for each text a convolution's last inputs [kernel - 1, channels], the oldest first, and
// for each head a matrix S [key_dim, value_dim]. A row with key k, query q, value v, decay d and rate
// r makes of the S of its parent
//     added = r (v - d k'S)               the delta rule; Mamba-2: added = r v
//     y     = d q'S + (q'k) added         Mamba-2: plus skip v
//     S     = d S + k added'
// Mamba-2's B, C, x and time step are k, q, v and r here, and its S the transpose of its papers'.
//
// A step is a transaction. A slot holds a committed state, and a lane the log of one request: of each
// node of its running step the convolution's input, k, added and d, but never a state. What was
// accepted of a log is folded into the state when the next step reads it, by the operations that the
// walk would have used, so that the bits are those of a text that was read without a draft. What was
// rolled back is only forgotten. Leading rows of a chain that are certain, such as a prompt's, are not
// logged: the state behind them is written to a slot.
//
// Columns of S do not depend on each other. A kernel computes one or two tiles of 16 columns, which
// stay in the first cache while it walks the rows of one request depth first. A slot's S is
// [heads, tiles, key_dim, 16]; columns past value_dim are never looked at.
//
// Bits: every row goes through one fixed order of operations, whatever the step's rows, their order
// and their number, and whatever the tiles that are computed together. Sums over keys have two
// accumulators, of even and of odd keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace paceline {

struct RecurrentShape {
    int heads, groups;  // head h has the key and query of group h / (heads / groups)
    int key_dim, value_dim;
    bool corrects;      // the delta rule

    int tiles() const { return (value_dim + TILE - 1) / TILE; }
    size_t tile_floats() const { return size_t(key_dim) * TILE; }
    size_t state_floats() const { return size_t(heads) * tiles() * tile_floats(); }
    int keys() const { return groups * key_dim; }
    int inner() const { return heads * value_dim; }
    int group_of(int head) const { return head / (heads / groups); }
};

// What a log has of a row: [groups, key_dim], [heads, value_dim] and [heads].
struct LoggedRow {
    const float *key, *added, *decay;
};

// A row of the recurrence. `added` is written, and read again where the row's children are walked.
struct RecurrentRow {
    const float *query, *key;           // [groups, key_dim]
    const float *match;                 // [groups], q'k
    const float *value;                 // [heads, value_dim]
    const float *decay, *rate;          // [heads]
    float *added, *y;                   // [heads, value_dim]
};

// Slices of S that a walk reads from and stores to: the state that was committed, the slot where the
// state behind the certain rows (or the folded one) goes, and from FIRST_BRANCH on the stack.
enum Slice : int { NO_SLICE = -1, COMMITTED = 0, KEPT = 1, FIRST_BRANCH = 2 };

// One pass over a slice: adds what row `parent` adds (none: -1), stores the sum in slice `to`, and
// computes row `row` from it (none: -1).
struct WalkStep {
    int row, parent, from, to;
};

// A request's walk. The first step folds `folded`, and stores where `committed` is not `kept` or there
// is something to fold.
struct RecurrentWalk {
    const float* committed;  // [state_floats]
    float* kept;             // [state_floats]; may be `committed`
    const LoggedRow* folded;
    int num_folded;
    const WalkStep* steps;
    int num_steps;
    const RecurrentRow* rows;
    const float* skip;  // [heads] or null
};

constexpr int MAX_KERNEL = 8;  // rows that a convolution sees

// y = activation(bias + sum of weight[j] times the j-th of the rows that a row sees, the oldest first).
struct Convolution {
    int channels, kernel;
    const float *weight, *bias;  // [kernel, channels]; [channels] or null
    bool silu;
};

// A request's rows, by their convolutions. Windows are of kernel - 1 inputs, the oldest first: row i of
// x as i, the j-th of those that are held as -1 - j.
struct ConvolvedRows {
    const float* committed;      // [kernel - 1, channels]
    float* kept;                 // the same; may be `committed`
    const float* const* folded;  // the logged inputs that are behind the committed ones
    int num_folded;
    const float* x;              // [rows, ld_x]
    float* y;                    // [rows, ld_y]; not x
    ptrdiff_t ld_x, ld_y;
    int rows;
    const int32_t* windows;      // [rows, kernel - 1]
    float* const* log;           // [rows], where a row's input is logged, or null
    const int32_t* last_window;  // what is kept behind the certain rows; null where none is certain
};

// What makes of a row's raw numbers those of a RecurrentRow.
struct RecurrentNumbers {
    const float *decay, *step_bias;  // [heads]: below 0, and what is added to a step
    float rate_scale;                // of the delta rule's rates
    float least_step, most_step;     // of Mamba-2
};

enum class GatedNorm : int { before_gate, after_gate, none };
// The norm of a name, such as "before_gate". False where there is none.
inline bool find_norm(const char* name, GatedNorm* found) {
    static const char* const NAMES[] = {"before_gate", "after_gate", "none"};  // as in the enum
    for (int i = 0; i < 3; ++i) {
        if (std::strcmp(name, NAMES[i]) == 0) {
            *found = static_cast<GatedNorm>(i);
            return true;
        }
    }
    return false;
}

struct RecurrentKernels {
    // Columns [begin, end) of all rows of a request; begin is a multiple of 16.
    void (*convolve)(const Convolution&, const ConvolvedRows&, int begin, int end);

    // One row, in place. Delta rule: queries and keys become unit vectors, queries also divided by the
    // root of key_dim; rate: the sigmoid of its number. Both: steps are softplus(number + bias), and
    // decay e^(decay * step). Mamba-2: rate is the step, within its limits, and is not read.
    void (*numbers)(const RecurrentShape&, const RecurrentNumbers&, float* query, float* key,
                    float* rate, float* decay, float* match);

    // Tiles [tile_begin, tile_end) of one head of a request. `stack` has room for two tiles of each
    // slice from FIRST_BRANCH on.
    void (*walk)(const RecurrentShape&, const RecurrentWalk&, int head, int tile_begin, int tile_end,
                 float* stack);

    // y = norm(x) silu(gate), norm(x silu(gate)) or x silu(gate): the RMS norms of `groups` parts of a
    // row, with weights [n]. Not in place; y is padded with zeros.
    void (*gated_norm)(const float* x, const float* gate, const float* weight, GatedNorm, float eps,
                       int n, int groups, float* y);

    // y = x sigmoid(gate), in place where y is x; nothing past the n-th is written.
    void (*gate)(const float* x, const float* gate, int n, float* y);
};

}  // namespace paceline
