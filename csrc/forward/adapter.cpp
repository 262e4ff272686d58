#include "forward/adapter.h"

#include <algorithm>
#include <functional>

#include "forward/forward.h"

namespace paceline {
namespace {

constexpr int LEAST_TILES = 4;  // of a piece of products with few inputs
// Pieces quantise the ranks that they made, so none may end within a stretch.
static_assert(LEAST_TILES * TILE % STRETCH == 0 && TILES_TOGETHER * TILE % STRETCH == 0);

// Of two pieces of memory what lies together, from the first on.
NextRead together(const NextRead& first, const NextRead& second) {
    const bool follows = first.at + first.bytes == second.at;
    return {first.at, first.bytes + (follows ? second.bytes : 0)};
}

NextRead memory_before(const Linear& linear, NextRead next) {
    for (int i = linear.num_parts; i-- > 0;) {
        next = together(linear.parts[i].memory(), next);
    }
    return next;
}

}  // namespace

void find_next(std::vector<AddedLayer>& layers) {
    NextRead next{};
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
        for (AddedLinear* each : {&layer->down, &layer->gate_up, &layer->o, &layer->qkv}) {
            for (auto part = each->parts.rbegin(); part != each->parts.rend(); ++part) {
                next = memory_before(*part->up, next);
            }
            each->next = next;
            next = each->down ? memory_before(*each->down, {}) : next;
        }
    }
}

void AddedLinears::plan(const Batch& batch, int first, int end) {
    rows_.clear();
    if (batch.adapters.empty()) {
        return;
    }
    int ranks = 0;
    for (int row = first; row < end; ++row) {
        const Adapter* adapter = batch.adapters[batch.span_of[row]];
        const bool goes_on = !rows_.empty() && rows_.back().adapter == adapter &&
                             rows_.back().first + rows_.back().count == row - first;
        if (adapter && goes_on) {
            ++rows_.back().count;
        } else if (adapter) {
            rows_.push_back({row - first, 1, adapter});
            ranks = std::max(ranks, adapter->most_ranks);
        }
    }
    std::stable_sort(rows_.begin(), rows_.end(), [](const auto& a, const auto& b) {
        return std::less<const Adapter*>()(a.adapter, b.adapter);
    });
    groups_.clear();
    for (int run = 0; run < static_cast<int>(rows_.size()); ++run) {
        if (groups_.empty() || groups_.back().adapter != rows_[run].adapter) {
            groups_.push_back({rows_[run].adapter, run, run});
        }
        groups_.back().runs_end = run + 1;
    }
    ranks_ = ranks_buffer_.view(end - first, ranks);
}

void AddedLinears::cut(size_t layer, AddedLinear AddedLayer::*which, bool ups) {
    const auto each_whole = [&](const auto& visit) {
        for (const AdaptedGroup& group : groups_) {
            const AddedLinear& added = group.adapter->layers[layer].*which;
            if (!ups && added.down) {
                visit(AddedPiece{&added, nullptr, group, 0, added.down->tiles()});
            }
            for (size_t i = 0; ups && i < added.parts.size(); ++i) {
                const LowRank& part = added.parts[i];
                visit(AddedPiece{&added, &part, group, 0, part.up->tiles()});
            }
        }
    };
    int tiles = 0;
    each_whole([&](const AddedPiece& whole) { tiles += whole.tiles_end; });
    const int step = std::max(LEAST_TILES, tiles_per_piece(tiles));
    pieces_.clear();
    each_whole([&](AddedPiece piece) {
        for (const int end = piece.tiles_end; piece.tile < end; piece.tile += step) {
            piece.tiles_end = std::min(piece.tile + step, end);
            pieces_.push_back(piece);
        }
    });
}

void AddedLinears::run(size_t layer, const Linear& weights, AddedLinear AddedLayer::*which,
                       const Inputs& x, const LinearOut& out) {
    if (rows_.empty()) {
        run_linear(weights, x, out);
        return;
    }
    cut(layer, which, false);
    const Inputs read = weights.first_inputs(x);
    const int per_piece = tiles_per_piece(weights.tiles());
    const int downs = static_cast<int>(pieces_.size());
    const int own = (weights.tiles() + per_piece - 1) / per_piece, all = downs + own;
    pool().each(all, [&](int piece, int) {  // in turns: some wait for memory, others compute
        const int before = piece * downs / all, index = piece - before;
        if ((piece + 1) * downs / all > before) {
            run_down(pieces_[before], read);
        } else {
            LinearOut to = out;
            to.next = share_of_next(layer, which, index, own);
            const int tile = index * per_piece;
            weights.run(x, to, tile, std::min(tile + per_piece, weights.tiles()));
        }
    });
    cut(layer, which, true);
    pool().each(static_cast<int>(pieces_.size()),
                [&](int piece, int) { run_up(pieces_[piece], out); });
}

NextRead AddedLinears::share_of_next(size_t layer, AddedLinear AddedLayer::*which, int piece,
                                int pieces) const {
    // As if all adapters' lay one after another: pieces before `piece` have fetched so many of them.
    const int groups = static_cast<int>(groups_.size());
    const int group = piece * groups / pieces;
    const int first = (group * pieces + groups - 1) / groups;
    const int end = ((group + 1) * pieces + groups - 1) / groups;
    const NextRead& all = (groups_[group].adapter->layers[layer].*which).next;
    const ptrdiff_t begin = all.bytes * (piece - first) / (end - first);
    return {all.at + begin, all.bytes * (piece + 1 - first) / (end - first) - begin};
}

void AddedLinears::run_down(const AddedPiece& piece, const Inputs& x) const {
    const AddedLinear& added = *piece.added;
    const FloatRows& ranks = ranks_.floats;
    const int code_ranks = std::min(piece.tiles_end * TILE, added.code_ranks);
    for (int run = piece.group.runs; run < piece.group.runs_end; ++run) {
        const int first = rows_[run].first, count = rows_[run].count;
        added.down->run(x.some(first, count),
                        {ranks.x + ptrdiff_t(first) * ranks.stride, nullptr, ranks.stride, 1.0f},
                        piece.tile, piece.tiles_end);
        for (int rank = piece.tile * TILE; rank < code_ranks; rank += STRETCH) {
            QuantRows codes = ranks_.codes;
            codes.data = codes.at(rank / STRETCH, 0);
            codes.k = STRETCH;
            for (int row = first; row < first + count; ++row) {
                kernels().quantize(ranks.x + ptrdiff_t(row) * ranks.stride + rank, codes, row);
            }
        }
    }
}

void AddedLinears::run_up(const AddedPiece& piece, const LinearOut& out) const {
    const LowRank& part = *piece.part;
    Inputs ranks = ranks_;
    ranks.codes.data = ranks.codes.at(part.first_rank / STRETCH, 0);
    ranks.floats.x += part.first_rank;
    ranks.codes.k = ranks.floats.k = part.up->k();
    for (int run = piece.group.runs; run < piece.group.runs_end; ++run) {
        const int first = rows_[run].first, count = rows_[run].count;
        float* y = out.y + ptrdiff_t(first) * out.ld + part.first;
        part.up->run(ranks.some(first, count), {y, y, out.ld, out.alpha * part.scale}, piece.tile,
                     piece.tiles_end);
    }
}

}  // namespace paceline
