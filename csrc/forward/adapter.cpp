#include "forward/adapter.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "forward/forward.h"
#include "bind/linear_objects.h"

namespace nb = nanobind;

namespace paceline {
namespace {

constexpr int LEAST_TILES = 4;  // of a piece of products with few inputs
// Pieces quantise the ranks that they made, so none may end within a stretch.
static_assert(LEAST_TILES * TILE % STRETCH == 0 && TILES_TOGETHER * TILE % STRETCH == 0);

void check(bool holds, const std::string& message) {
    if (!holds) {
        throw nb::value_error(message.c_str());
    }
}

bool is_plain(const Linear& linear) {
    return linear.num_orders == 1 && !linear.orders[0] && linear.takes_codes != linear.takes_floats;
}

// A part is (first output, outputs' weights, scale).
AddedLinear added_of(nb::handle fields, const Linear& to, const std::string& name) {
    AddedLinear added;
    if (fields.is_none()) {
        return added;
    }
    const auto [down, parts] = nb::cast<std::pair<nb::object, nb::list>>(fields);
    added.down = &linear_of(down);
    int ranks = 0;
    for (nb::handle each : parts) {
        const auto part = nb::cast<nb::tuple>(each);
        const Linear& up = linear_of(part[1]);
        added.parts.push_back({nb::cast<int>(part[0]), &up, nb::cast<float>(part[2]), ranks});
        check(is_plain(up) && added.parts.back().first >= 0 &&
                  added.parts.back().first <= to.n() - up.n(),
              name + ": a part of an adapter has other outputs");
        check(!up.takes_codes || ranks == added.code_ranks, name + ": codes come before floats");
        ranks += round_up(up.k(), up.takes_codes ? STRETCH : TILE);
        added.code_ranks = up.takes_codes ? ranks : added.code_ranks;
    }
    check(to.num_parts > 0 && is_plain(*added.down) && added.down->k() == to.k() &&
              added.down->takes_floats == to.parts[0].is_float && added.down->n() == ranks &&
              added.down->tiles() * TILE == ranks,
          name + ": an adapter has other inputs");
    return added;
}

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

void make_adapter(Adapter* place, nb::object of, nb::list layers) {
    const Decoder& decoder = nb::cast<const Decoder&>(of);
    const std::vector<DecoderLayer>& all = decoder.all_layers();
    check(layers.size() == all.size(), "an adapter of another number of layers");
    check(!decoder.has_entry(), "adapters are for decoders that read tokens alone");
    auto self = std::make_unique<Adapter>(Adapter{&decoder, {}, 0, nb::make_tuple(of, layers)});
    for (size_t index = 0; index < all.size(); ++index) {
        const auto fields = nb::cast<nb::dict>(layers[index]);
        const DecoderLayer& layer = all[index];
        check(!layer.latent && !layer.altup, "adapters are for plain attention and one stream");
        const auto added = [&](const char* name, const Linear& to) {
            return added_of(fields[name], to, name);
        };
        self->layers.push_back({added("qkv", layer.qkv), added("o", layer.o),
                                added("gate_up", layer.mlp.gate_up), added("down", layer.mlp.down)});
        const AddedLayer& last = self->layers.back();
        for (const AddedLinear* each : {&last.qkv, &last.o, &last.gate_up, &last.down}) {
            self->most_ranks = std::max(self->most_ranks, each->down ? each->down->n() : 0);
        }
    }
    find_next(self->layers);
    new (place) Adapter(std::move(*self));
}

}  // namespace

void Batch::adapt(nb::sequence of_spans, const Decoder& decoder) {
    check(nb::len(of_spans) == spans.size(), "as many adapters as spans are needed");
    std::vector<const Adapter*> found;
    for (nb::handle each : of_spans) {
        found.push_back(each.is_none() ? nullptr : nb::cast<const Adapter*>(each));
        check(!found.back() || found.back()->decoder == &decoder, "an adapter is of another decoder");
    }
    adapters = std::move(found);
    keep_adapters_ = nb::tuple(of_spans);
}

void Decoder::plan_adapters(const Batch& batch, const Slice& slice) {
    adapted_.clear();
    if (batch.adapters.empty()) {
        return;
    }
    int ranks = 0;
    for (int row = slice.first; row < slice.end; ++row) {
        const Adapter* adapter = batch.adapters[batch.span_of[row]];
        const bool goes_on = !adapted_.empty() && adapted_.back().adapter == adapter &&
                             adapted_.back().first + adapted_.back().count == row - slice.first;
        if (adapter && goes_on) {
            ++adapted_.back().count;
        } else if (adapter) {
            adapted_.push_back({row - slice.first, 1, adapter});
            ranks = std::max(ranks, adapter->most_ranks);
        }
    }
    std::stable_sort(adapted_.begin(), adapted_.end(), [](const auto& a, const auto& b) {
        return std::less<const Adapter*>()(a.adapter, b.adapter);
    });
    adapted_groups_.clear();
    for (int run = 0; run < static_cast<int>(adapted_.size()); ++run) {
        if (adapted_groups_.empty() || adapted_groups_.back().adapter != adapted_[run].adapter) {
            adapted_groups_.push_back({adapted_[run].adapter, run, run});
        }
        adapted_groups_.back().runs_end = run + 1;
    }
    added_ranks_ = added_ranks_buffer_.view(slice.end - slice.first, ranks);
}

void Decoder::cut_added(size_t layer, AddedLinear AddedLayer::*which, bool ups) {
    const auto each_whole = [&](const auto& visit) {
        for (const AdaptedGroup& group : adapted_groups_) {
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
    added_pieces_.clear();
    each_whole([&](AddedPiece piece) {
        for (const int end = piece.tiles_end; piece.tile < end; piece.tile += step) {
            piece.tiles_end = std::min(piece.tile + step, end);
            added_pieces_.push_back(piece);
        }
    });
}

void Decoder::adapted_linear(const DecoderLayer& layer, const Linear& weights,
                             AddedLinear AddedLayer::*which, const Inputs& x,
                             const LinearOut& out) {
    if (adapted_.empty()) {
        linear(weights, x, out);
        return;
    }
    const size_t layer_index = size_t(&layer - layers_.data());
    cut_added(layer_index, which, false);
    const Inputs read = weights.first_inputs(x);
    const int per_piece = tiles_per_piece(weights.tiles());
    const int downs = static_cast<int>(added_pieces_.size());
    const int own = (weights.tiles() + per_piece - 1) / per_piece, all = downs + own;
    pool().each(all, [&](int piece, int) {  // in turns: some wait for memory, others compute
        const int before = piece * downs / all, index = piece - before;
        if ((piece + 1) * downs / all > before) {
            run_down(added_pieces_[before], read);
        } else {
            LinearOut to = out;
            to.next = share_of_next(layer_index, which, index, own);
            const int tile = index * per_piece;
            weights.run(x, to, tile, std::min(tile + per_piece, weights.tiles()));
        }
    });
    cut_added(layer_index, which, true);
    pool().each(static_cast<int>(added_pieces_.size()),
                [&](int piece, int) { run_up(added_pieces_[piece], out); });
}

NextRead Decoder::share_of_next(size_t layer, AddedLinear AddedLayer::*which, int piece,
                                int pieces) const {
    // As if all adapters' lay one after another: pieces before `piece` have fetched so many of them.
    const int groups = static_cast<int>(adapted_groups_.size());
    const int group = piece * groups / pieces;
    const int first = (group * pieces + groups - 1) / groups;
    const int end = ((group + 1) * pieces + groups - 1) / groups;
    const NextRead& all = (adapted_groups_[group].adapter->layers[layer].*which).next;
    const ptrdiff_t begin = all.bytes * (piece - first) / (end - first);
    return {all.at + begin, all.bytes * (piece + 1 - first) / (end - first) - begin};
}

void Decoder::run_down(const AddedPiece& piece, const Inputs& x) const {
    const AddedLinear& added = *piece.added;
    const FloatRows& ranks = added_ranks_.floats;
    const int code_ranks = std::min(piece.tiles_end * TILE, added.code_ranks);
    for (int run = piece.group.runs; run < piece.group.runs_end; ++run) {
        const int first = adapted_[run].first, count = adapted_[run].count;
        added.down->run(x.some(first, count),
                        {ranks.x + ptrdiff_t(first) * ranks.stride, nullptr, ranks.stride, 1.0f},
                        piece.tile, piece.tiles_end);
        for (int rank = piece.tile * TILE; rank < code_ranks; rank += STRETCH) {
            QuantRows codes = added_ranks_.codes;
            codes.data = codes.at(rank / STRETCH, 0);
            codes.k = STRETCH;
            for (int row = first; row < first + count; ++row) {
                kernels().quantize(ranks.x + ptrdiff_t(row) * ranks.stride + rank, codes, row);
            }
        }
    }
}

void Decoder::run_up(const AddedPiece& piece, const LinearOut& out) const {
    const LowRank& part = *piece.part;
    Inputs ranks = added_ranks_;
    ranks.codes.data = ranks.codes.at(part.first_rank / STRETCH, 0);
    ranks.floats.x += part.first_rank;
    ranks.codes.k = ranks.floats.k = part.up->k();
    for (int run = piece.group.runs; run < piece.group.runs_end; ++run) {
        const int first = adapted_[run].first, count = adapted_[run].count;
        float* y = out.y + ptrdiff_t(first) * out.ld + part.first;
        part.up->run(ranks.some(first, count), {y, y, out.ld, out.alpha * part.scale}, piece.tile,
                     piece.tiles_end);
    }
}

void bind_adapter(nb::module_& module) {
    nb::class_<Adapter>(module, "Adapter", "What is added to a decoder's linears for some rows.")
        .def("__init__", &make_adapter, nb::arg("decoder"), nb::arg("layers"));
}

}  // namespace paceline
