// Mixtures of experts: a layer's weights, and which experts each row takes. Owns no memory of rows.
#pragma once

#include <optional>
#include <vector>

#include "layers/feed_forward.h"

namespace paceline {

// Norms [hidden] of a mixture whose parts have their own: before the router and the chosen experts,
// and of the sum of their results and the shared expert's result. Null: none.
struct MixtureNorms {
    const float *router, *experts, *routed, *shared;
};

struct Mixture {
    Linear router;  // floats; one output for each expert, and one more where `shared_gate`
    std::vector<FeedForward> experts;  // all of one width
    std::optional<FeedForward> shared;  // that every row takes besides
    int per_token;
    bool renormalise;  // the weights of a row's experts add up to 1, and not those of all
    bool shared_gate;  // a sigmoid weighs the shared expert
    float scale;       // of the weights of those that were chosen
    bool sigmoid;      // an expert's score is the sigmoid of its logit, and not the softmax of all
    const float* choice_bias;  // [experts], added to the scores for the choice; null: none
    // Experts are in groups of one size, of which a row chooses among the best few: those whose
    // `group_best` best experts have the largest sum.
    int groups, groups_per_token, group_best;
    float least_sum;  // what scores that add up to less are divided by
    const float* scales;  // [experts], of their weights besides; null: 1
    MixtureNorms norms;
    // Logits within twice this share of an expert's are weighed against it; 0: otherwise.
    float jitter;
    bool weighs_inputs;  // weights are those of what experts read, and not of their results

    int width() const { return experts.front().width(); }
    // A row's experts and their weights [per_token], from its router logits: the largest first, equal
    // ones by the lowest id, a NaN before all others; by scores where there is a reason to. A function
    // of these logits alone.
    void choose(const float* logits, int* ids, float* weights) const;
    bool by_score() const { return sigmoid || choice_bias; }
    // What weighs the shared expert's result of the row with these logits.
    float shared_weight(const float* logits) const;

  private:
    // Marks the experts of groups that a row with these values does not choose among.
    void close_groups(const float* values, std::vector<char>& closed) const;
    // The weights [per_token] of logits, or of scores, before they are scaled.
    void weigh_logits(const float* logits, const int* ids, float* weights) const;
    void weigh_scores(const float* scores, const int* ids, float* weights) const;
    // Those of SparseMixer (arXiv 2409.12136), of each expert against those that are left.
    void weigh_one_by_one(const float* logits, const int* ids, float* weights) const;
};

// The rows of a slice by the experts that they take. Entry i is a row with one of its experts; those
// of an expert follow one another, rows in order.
struct Assignment {
    struct Group {
        int expert, first, count;  // entries
    };
    std::vector<int> ids;        // [rows, per_token]
    std::vector<float> weights;  // [rows, per_token]
    std::vector<int> rows;       // [entries]
    std::vector<float> entry_weights;  // [entries]
    std::vector<int> entries;    // [rows, per_token]
    std::vector<Group> groups;   // experts that some row takes

    void need(int rows, int per_token);
    void sort(int rows, const Mixture& mixture);
};

}  // namespace paceline
