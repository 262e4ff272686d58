// Draft trees as flat arrays, as paceline/request/span.py describes them. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

using Parents = std::vector<int32_t>;  // of each node, lower than its own; -1 at the top

// What one proposer says of a node.
struct Claim {
    int32_t origin;
    double prob;
};

// Claims on the nodes of a merged tree, node after node.
struct Claims {
    std::vector<Claim> all;
    std::vector<int32_t> ends;  // by node

    const Claim* begin(size_t node) const { return all.data() + (node ? ends[node - 1] : 0); }
    const Claim* end(size_t node) const { return all.data() + ends[node]; }
};

// A draft of one request, or several merged. Lists by node, but for claims.
struct DraftNodes {
    std::vector<int64_t> tokens;
    Parents parents;
    std::vector<double> probs;
    std::vector<int32_t> origins;
    Claims claims;  // of a merged one
};

// What is drafted below a text's last token.
struct TextDraft {
    std::vector<int64_t> tokens;
    Parents parents;
    std::vector<double> probs;
};

// Drafts for one text, which only grows, and keeps what it has read of it.
class TextDrafter {
  public:
    virtual ~TextDrafter() = default;
    // Of a text of that length the first token that `draft` is to be given.
    virtual size_t first_unread(size_t length) const = 0;
    // `tail`: the text's tokens from there on, each from 0 to INT32_MAX.
    virtual TextDraft draft(const std::vector<int32_t>& tail, size_t length, size_t max_nodes,
                            size_t max_depth) = 0;
    // Tokens at the text's end that are known to have occurred before and gone on; 0 where that
    // cannot be told at once. `tail` as above.
    virtual size_t matched(const std::vector<int32_t>&, size_t) { return 0; }
};

// A trie whose nodes' children are chained.
class Trie {
  public:
    // The child of a node, -1 at the top, that carries a token; a new one if there was none.
    int32_t child(int32_t parent, int64_t token) {
        int32_t* link = parent < 0 ? &top_ : &first_[parent];
        while (*link >= 0 && tokens_[*link] != token) {
            link = &next_[*link];
        }
        if (*link < 0) {
            const int32_t node = *link = static_cast<int32_t>(tokens_.size());
            tokens_.push_back(token);
            first_.push_back(-1);
            next_.push_back(-1);
            return node;
        }
        return *link;
    }

  private:
    int32_t top_ = -1;
    std::vector<int64_t> tokens_;
    std::vector<int32_t> first_, next_;
};

}  // namespace paceline
