#include "forward/batch.h"

#include <algorithm>
#include <stdexcept>

namespace paceline {
namespace {

void check(bool holds, const char* message) {
    if (!holds) {
        throw std::invalid_argument(message);
    }
}

}  // namespace

Batch::Batch(std::vector<NodeSpan> all, int vocab, int max_len, int num_blocks, bool are_blocks)
    : vocab_(vocab), max_len_(max_len), num_blocks_(num_blocks), are_blocks_(are_blocks) {
    tables_.reserve(all.size());  // spans and rows point into what these vectors hold
    for (std::vector<int32_t>* each : {&tokens, &write_slots, &span_of, &sample_rows}) {
        each->reserve(all.size());
    }
    rows.reserve(all.size());
    spans.reserve(all.size());
    sample_offsets.reserve(all.size() + 1);
    sample_offsets.push_back(0);
    for (NodeSpan& span : all) {
        add(std::move(span));
    }
    check(!tokens.empty(), "a batch needs at least one row");
}

void Batch::add(NodeSpan span) {
    const std::vector<int32_t>&ids = span.tokens, &parents = span.parents;
    const int start = span.start, cached = span.cached;
    const int count = static_cast<int>(ids.size());
    tables_.push_back(std::move(span.blocks));
    const std::vector<int32_t>& blocks = tables_.back();
    check(parents.size() == ids.size(), "a span needs one parent per token");
    check(0 <= cached && cached < count, "a span has no node to compute");
    check(start >= 0 && start <= static_cast<int>(blocks.size()) * TILE - count,
          "a span's slots are not reserved");
    for (const int32_t block : blocks) {
        check(0 <= block && block < num_blocks_, "a block table leaves the cache");
    }
    const int first_row = num_rows();
    first_rows.push_back(first_row);
    spans.push_back({blocks.data(), start});
    bool chain = true;
    for (int node = 0; node < count; ++node) {
        check(-1 <= parents[node] && parents[node] < node && (parents[node] < 0) == (node == 0),
              "a node's parent is not before it");
        chain = chain && parents[node] == node - 1;
        if (node < cached) {
            continue;
        }
        check(0 <= ids[node] && ids[node] < vocab_, "a token is outside the vocabulary");
        const int slot = start + node;
        tokens.push_back(ids[node]);
        write_slots.push_back(blocks[slot / TILE] * TILE + slot % TILE);
        span_of.push_back(static_cast<int>(spans.size()) - 1);
        this->parents.push_back(parents[node]);
        rows.push_back({slot, nullptr, are_blocks_ ? start + count - 1 : slot});  // of a chain
    }
    check(chain || !are_blocks_, "a block is no tree");
    if (!chain) {
        add_paths(parents, cached);
    }
    for (size_t row = static_cast<size_t>(first_row); row < rows.size(); ++row) {
        check(rows[row].position < max_len_, "a position is beyond the context");
        last_position = std::max(last_position, rows[row].position);
    }
    for (const int32_t node : span.samples) {
        check(cached <= node && node < count, "a sampled node is not computed");
        sample_rows.push_back(first_row - cached + node);
    }
    sample_offsets.push_back(static_cast<int32_t>(sample_rows.size()));
}

void Batch::add_paths(const std::vector<int32_t>& parents, int cached) {
    const int count = static_cast<int>(parents.size());
    const size_t first = paths_.size();
    for (int node = 0; node < count; ++node) {
        std::vector<int32_t> path;
        if (node > 0) {
            path = paths_[first + static_cast<size_t>(parents[node])];
        }
        path.push_back(node);
        paths_.push_back(std::move(path));  // moving a vector leaves its elements where they are
    }
    for (int node = cached; node < count; ++node) {
        const std::vector<int32_t>& path = paths_[first + static_cast<size_t>(node)];
        AttentionRow& row = rows[rows.size() - static_cast<size_t>(count - node)];
        row.position = spans.back().start + static_cast<int>(path.size()) - 1;
        row.path = path.data();
        row.last = row.position;
    }
}

std::vector<BatchSlice> Batch::slices(int most) const {
    std::vector<BatchSlice> parts;
    const int samples = static_cast<int>(sample_rows.size());
    for (int first = 0, sample = 0; first < num_rows(); first = parts.back().end) {
        parts.push_back({first, slice_end(first, most), sample, sample});
        while (sample < samples && sample_rows[sample] < parts.back().end) {
            ++sample;
        }
        parts.back().samples_end = sample;
    }
    return parts;
}

int Batch::slice_end(int first, int most) const {
    int end = std::min(first + most, num_rows());
    const auto cuts = [&](int row) {  // whether a block or a tree goes on there
        if (row == num_rows()) {
            return false;
        }
        const int span = span_of[row], node = row - first_rows[span];
        const bool in_tree = !states.empty() && node > states[span].certain;
        return in_tree || rows[row - 1].last > rows[row - 1].position;
    };
    while (end > first && cuts(end)) {
        --end;
    }
    if (end > first) {
        return end;
    }
    do {  // one that is larger than a slice
        ++end;
    } while (cuts(end));
    return end;
}

}  // namespace paceline
