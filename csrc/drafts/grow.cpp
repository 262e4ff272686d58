#include "drafts/grow.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "threads/thread_pool.h"

namespace paceline {
namespace {

constexpr int ROOT = -1;

struct Node {
    size_t growth;
    int node;
};

// Estimates out of scores, descending; NaN where they are no numbers.
void estimate(double sureness, double blur, int count, double* scores) {
    const double best = scores[0];
    double sum = 0.0;
    for (int i = 0; i < count; ++i) {
        scores[i] = std::exp((scores[i] - best) / blur);
        sum += scores[i];
    }
    for (int i = 0; i < count; ++i) {
        scores[i] = sureness * scores[i] / sum;
    }
}

class Grower {
  public:
    Grower(Decoder& decoder, int tap, bool reads_outputs, const Ranking& ranking,
           std::vector<Growth>* growths)
        : decoder_(decoder), ranking_(ranking), growths_(*growths),
          taps_(reads_outputs ? std::vector<int>{tap} : std::vector<int>{}),
          width_(reads_outputs ? static_cast<size_t>(decoder.weights().shape.hidden) : 0) {}

    const Forwards& forwards() const { return forwards_; }

    // Forwards rows whose samples are these nodes, and hangs their candidates below them.
    void forward(const Batch& batch, const float* inputs, const std::vector<Node>& nodes) {
        const size_t columns = static_cast<size_t>(decoder_.weights().shape.num_logits);
        float* logits = logits_.need(nodes.size() * columns + TILE);
        float* features = features_.need(static_cast<size_t>(batch.num_rows()) * width_);
        decoder_.forward(batch, {inputs, taps_, features}, logits);
        ++forwards_.count;
        forwards_.rows += batch.num_rows();
        std::vector<int64_t> ids(nodes.size() * ranking_.ranked);
        std::vector<double> probs(ids.size(), MASKED);
        const auto rank = [&](int row, int) { this->rank(nodes[row], logits + row * columns, row,
                                                         ids.data(), probs.data()); };
        const int rows = static_cast<int>(nodes.size());
        if (rows > 1) {
            pool().each(rows, rank);
        } else {
            rank(0, 0);
        }
        for (int row = 0; row < rows; ++row) {
            Growth& growth = growths_[nodes[row].growth];
            const float* output = features + batch.sample_rows[row] * width_;
            growth.outputs.insert(growth.outputs.end(), output, output + width_);
            const size_t first = static_cast<size_t>(row) * ranking_.ranked;
            growth.add(nodes[row].node, ranking_.branching, &ids[first], &probs[first],
                       ranking_.min_path_prob);
        }
    }

    // The next level of these growths, all of which have a frontier.
    void level(const std::vector<size_t>& chosen) {
        std::vector<NodeSpan> spans;
        std::vector<Node> nodes;
        inputs_.clear();
        for (const size_t index : chosen) {
            Growth& growth = growths_[index];
            const int cached = static_cast<int>(growth.kv_tokens.size());
            for (const int32_t node : growth.frontier) {
                const int parent = growth.parents[node];
                const int above = parent < 0 ? 0 : growth.kv_nodes[parent];
                growth.kv_nodes[node] = static_cast<int32_t>(growth.kv_tokens.size());
                growth.kv_tokens.push_back(growth.tokens[node]);
                growth.kv_parents.push_back(above);
                nodes.push_back({index, node});
                const float* output = growth.outputs.data() + above * width_;
                inputs_.insert(inputs_.end(), output, output + width_);
            }
            std::vector<int32_t> samples(growth.frontier.size());
            std::iota(samples.begin(), samples.end(), cached);
            spans.push_back({growth.kv_tokens, growth.kv_parents, std::move(samples), growth.start,
                             cached, growth.blocks});
        }
        const DecoderShape& s = decoder_.weights().shape;
        const Batch batch(std::move(spans), s.vocab, s.max_len, decoder_.num_blocks(), false);
        forward(batch, width_ ? inputs_.data() : nullptr, nodes);
    }

  private:
    void rank(const Node& at, const float* logits, int row, int64_t* ids, double* probs) const {
        const Growth& growth = growths_[at.growth];
        Job job{logits, growth.rules, growth.way_down(at.node, growth.tokens), 0, {},
                ranking_.columns};
        job.length = growth.length + job.path.size();
        const size_t first = static_cast<size_t>(row) * ranking_.ranked;
        const float* edited;
        const int found =
            best_of(job, ranking_.vocab, ranking_.ranked, ids + first, probs + first, &edited);
        if (found < 0) {
            std::fill_n(probs + first, ranking_.ranked, std::numeric_limits<double>::quiet_NaN());
        }
        estimate(ranking_.sureness, growth.blur, ranking_.ranked, probs + first);
    }

    Decoder& decoder_;
    const Ranking& ranking_;
    std::vector<Growth>& growths_;
    const std::vector<int> taps_;
    const size_t width_;  // of what children read
    std::vector<float> inputs_;
    Buffer<float> logits_, features_;
    Forwards forwards_{0, 0};
};

}  // namespace

void Growth::add(int parent, int count, const int64_t* ids, const double* candidates,
                 double min_path_prob) {
    const double above = parent < 0 ? 1.0 : path_probs[parent];
    for (int i = 0; i < count; ++i) {
        const double path_prob = above * candidates[i];
        if (path_prob >= min_path_prob && path_prob > 0.0) {  // neither is true for NaN
            tokens.push_back(static_cast<int32_t>(ids[i]));
            parents.push_back(parent);
            probs.push_back(candidates[i]);
            path_probs.push_back(path_prob);
            kv_nodes.push_back(-1);
        }
    }
}

bool Growth::choose() {
    const int first = last_level, size = static_cast<int>(tokens.size());
    last_level = size;
    ++num_levels;
    frontier.clear();
    if (first == size || num_levels >= max_depth) {
        return false;
    }
    // The last of the best is not worth a forward: its children rank behind it.
    std::vector<int32_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return path_probs[a] > path_probs[b]; });
    order.resize(std::min(size, max_nodes - 1));
    std::copy_if(order.begin(), order.end(), std::back_inserter(frontier),
                 [&](int32_t node) { return node >= first; });
    return !frontier.empty();
}

Forwards grow(Decoder& decoder, const Batch& batch, const float* inputs, int tap,
              const Ranking& ranking, const Asked& asked, std::vector<Growth>* growths) {
    Grower grower(decoder, tap, inputs != nullptr, ranking, growths);
    std::vector<Node> roots;
    std::vector<size_t> alive(growths->size());
    std::iota(alive.begin(), alive.end(), 0);
    for (const size_t index : alive) {
        Growth& growth = (*growths)[index];
        growth.kv_tokens = {growth.last_token};
        growth.kv_parents = {ROOT};
        roots.push_back({index, ROOT});
    }
    grower.forward(batch, inputs, roots);
    while (true) {
        std::vector<Promise> promises;
        for (const size_t index : alive) {
            Growth& growth = (*growths)[index];
            if (growth.choose()) {
                promises.push_back({index, growth.way_down(growth.frontier.front(), growth.probs)});
            }
        }
        if (promises.empty()) {
            break;
        }
        const std::vector<char> pays =
            asked.pays ? asked.pays(promises) : std::vector<char>(promises.size(), 1);
        alive.clear();
        for (size_t i = 0; i < promises.size(); ++i) {
            const size_t index = promises[i].growth;
            const Growth& growth = (*growths)[index];
            const size_t drafted = growth.kv_tokens.size() - 1 + growth.frontier.size();
            if (pays[i] && asked.reserve(index, static_cast<int>(drafted))) {
                alive.push_back(index);
            }
        }
        if (alive.empty()) {
            break;
        }
        grower.level(alive);
    }
    return grower.forwards();
}

}  // namespace paceline
