#include "adapter.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "forward.h"
#include "linear_objects.h"

namespace nb = nanobind;

namespace paceline {
namespace {

constexpr int ROWS_TOGETHER = 16;  // whose products are one piece of work, at most
constexpr int LEAST_TILES = 4;     // of a piece: products with few inputs are small

void check(bool holds, const std::string& message) {
    if (!holds) {
        throw nb::value_error(message.c_str());
    }
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
        const LowRank found{nb::cast<int>(part[0]), &linear_of(part[1]), nb::cast<float>(part[2])};
        check(!found.up->takes_codes && found.first >= 0 &&
                  found.first + found.up->n() <= to.n(),
              name + ": a part of an adapter is not floats, or has other outputs");
        ranks += round_up(found.up->k(), TILE);
        added.parts.push_back(found);
    }
    check(to.num_parts > 0 && !added.down->takes_codes && added.down->k() == to.k() &&
              added.down->n() == ranks,
          name + ": an adapter is not floats, or has other inputs");
    return added;
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
    new (place) Adapter(std::move(*self));
}

Inputs rows_at(float* x, int rows, int k, int stride) {
    Inputs inputs;
    inputs.floats = {x, rows, k, stride};
    return inputs;
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
    const size_t rows = size_t(slice.end - slice.first);
    ld_ranks_ = ranks;
    read_.need(rows * ld_read_);
    ranks_added_.need(rows * ld_ranks_);
}

void Decoder::add_adapted(const DecoderLayer& layer, AddedLinear AddedLayer::*which,
                          const LinearOut& out) {
    const size_t index = size_t(&layer - layers_.data());
    products_.clear();
    for (const AdaptedRows& run : adapted_) {
        const AddedLinear& added = run.adapter->layers[index].*which;
        for (int at = 0; added.down && at < run.count; at += ROWS_TOGETHER) {
            const int row = run.first + at, rows = std::min(ROWS_TOGETHER, run.count - at);
            products_.push_back({added.down,
                                 rows_at(read_.get() + size_t(row) * ld_read_, rows,
                                         added.down->k(), ld_read_),
                                 {ranks_added_.get() + size_t(row) * ld_ranks_, nullptr, ld_ranks_,
                                  1.0f}});
        }
    }
    run_products(1);
    products_.clear();
    for (const AdaptedRows& run : adapted_) {
        const AddedLinear& added = run.adapter->layers[index].*which;
        float* ranks = ranks_added_.get() + size_t(run.first) * ld_ranks_;
        for (const LowRank& part : added.parts) {
            float* y = out.y + size_t(run.first) * out.ld + part.first;
            products_.push_back({part.up, rows_at(ranks, run.count, part.up->k(), ld_ranks_),
                                 {y, y, out.ld, out.alpha * part.scale}});
            ranks += round_up(part.up->k(), TILE);
        }
    }
    run_products(LEAST_TILES);
}

void Decoder::run_products(int least_tiles) {
    int tiles = 0;
    for (const Product& each : products_) {
        tiles += each.weights->tiles();
    }
    const int step = std::max(least_tiles, tiles / (pool().size() * PIECES_PER_THREAD));
    product_pieces_.clear();
    for (size_t i = 0; i < products_.size(); ++i) {
        for (int tile = 0; tile < products_[i].weights->tiles(); tile += step) {
            product_pieces_.push_back({int(i), tile});
        }
    }
    pool().each(int(product_pieces_.size()), [&](int piece, int) {
        const auto [index, tile] = product_pieces_[piece];
        const Product& each = products_[index];
        each.weights->run(each.x, each.out, tile, std::min(tile + step, each.weights->tiles()));
    });
}

void bind_adapter(nb::module_& module) {
    nb::class_<Adapter>(module, "Adapter", "What is added to a decoder's linears for some rows.")
        .def("__init__", &make_adapter, nb::arg("decoder"), nb::arg("layers"));
}

}  // namespace paceline
