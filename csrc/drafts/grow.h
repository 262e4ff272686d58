// Draft trees that grow level by level over a decoder's KV: paceline/proposers/base/drafter.py and
// growth.py in C++, where they are described. Knows no Python: who reserves slots and what a level
// must promise is asked of the caller.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "forward/forward.h"
#include "sampling/sampling_rules.h"

namespace paceline {

// How candidates are ranked and estimated, of all requests.
struct Ranking {
    int ranked, branching;  // candidates that are ranked, and children of a node at most
    double min_path_prob, sureness;
    Columns columns;
    int vocab;
};

// One request's tree while it grows.
struct Growth {
    const SamplingRules* rules;
    size_t length;  // of the request's tokens
    int max_nodes, max_depth;
    double blur;
    int start;  // the slot of the last committed token, which is node 0 of the draft's span
    int32_t last_token;
    std::vector<int32_t> blocks;

    // Nodes, parents first.
    std::vector<int32_t> tokens, parents, kv_nodes;
    std::vector<double> probs, path_probs;
    // The draft's span: the last committed token, then the nodes that were forwarded.
    std::vector<int32_t> kv_tokens, kv_parents;
    std::vector<float> outputs;  // of the span's nodes, where their children read them
    std::vector<int32_t> frontier;
    int last_level = 0, num_levels = 0;

    // What nodes have on the way from the top down to one; nothing above the first level.
    template <typename T> std::vector<T> way_down(int node, const std::vector<T>& of_nodes) const {
        std::vector<T> found;
        for (; node >= 0; node = parents[node]) {
            found.push_back(of_nodes[node]);
        }
        std::reverse(found.begin(), found.end());
        return found;
    }
    void add(int parent, int count, const int64_t* ids, const double* probs, double min_path_prob);
    bool choose();
};

struct Promise {
    size_t growth;
    std::vector<double> estimates;
};

struct Asked {
    // Which growths may have another level. Not set: all.
    std::function<std::vector<char>(const std::vector<Promise>&)> pays;
    // Makes room for so many drafted nodes in a growth's blocks; false where there is none.
    std::function<bool(size_t growth, int drafted)> reserve;
};

struct Forwards {
    int count, rows;
};

// Reads a batch whose samples are the growths' last tokens, in order, and grows their trees.
// `inputs`: of the batch's rows, for a decoder with an entry, whose further rows read what tap `tap`
// is of their parents; null for any other.
Forwards grow(Decoder& decoder, const Batch& batch, const float* inputs, int tap,
              const Ranking& ranking, const Asked& asked, std::vector<Growth>* growths);

}  // namespace paceline
