// What computes mixtures of experts for the rows of a slice, whose experts may have to be read from
// disk, and counts them. Knows no way to choose.
#pragma once

#include <vector>

#include "disk/expert_cache.h"
#include "layers/experts.h"
#include "layers/feed_forward.h"
#include "forward/workspace.h"

namespace paceline {

// Of one forward.
struct ExpertCounts {
    int read = 0;     // pairs of a layer and an expert
    int fetched = 0;  // experts that had to be read from disk
    std::vector<std::vector<int>> chosen;  // [layers][rows, per_token]; empty where none is a mixture
};

class Mixtures {
  public:
    Mixtures(Workspace& shared, FeedForwards& dense) : shared_(shared), dense_(dense) {}

    // What brings experts that do not stay in memory.
    void set_cache(ExpertCache* cache) { cache_ = cache; }
    bool reads_from_disk() const { return cache_; }
    // Before a forward of so many layers.
    void begin(size_t layers);
    // A layer's, from the residual stream to the stream or the branch.
    void run(const DecoderLayer& layer);
    const ExpertCounts& counts() const { return counts_; }

  private:
    // An expert whose weights are there, with the rows that take it.
    struct Ready {
        Assignment::Group group;
        const FeedForward* weights;
    };

    void choose(const DecoderLayer& layer);
    // Counts experts that no slice before has read in this layer.
    void count(const DecoderLayer& layer);
    // The results of all entries of the assignment, to `results_`; and of some experts' entries.
    void run_all(const Mixture& mixture, size_t layer);
    void run_some(const Mixture& mixture, const std::vector<Ready>& ready);
    void take(const Mixture& mixture, const Ready& expert, int row, const Inputs& inputs, int thread);
    std::vector<Inputs> inputs_of(const std::vector<Ready>& ready, int width);
    // One linear of each of these experts, its tiles shared out among all threads.
    void run_linears(const std::vector<Ready>& ready, Linear FeedForward::*which,
                     const std::vector<Inputs>& inputs, const RowBuffer& to);
    void run_shared(const DecoderLayer& layer);
    // A row's results, weighed and added up: sum[hidden].
    void add_up(const Mixture& mixture, int row, float* sum);

    Workspace& shared_;
    FeedForwards& dense_;
    ExpertCache* cache_ = nullptr;
    RowBuffer normed_, routed_, gate_up_, results_, shared_results_;
    InputBuffer inputs_;
    Assignment assignment_;
    std::vector<std::vector<bool>> is_read_;  // [layers][experts], of the latest forward
    ExpertCounts counts_;
};

}  // namespace paceline
