// paceline._native.Adapter: what is added to a decoder's linears, checked when it is made.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <memory>
#include <string>

#include "bind/arrays.h"
#include "bind/decoder.h"
#include "bind/linear_objects.h"
#include "forward/forward.h"

namespace nb = nanobind;

namespace paceline {
namespace {

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
        require(is_plain(up) && added.parts.back().first >= 0 &&
                  added.parts.back().first <= to.n() - up.n(),
              name + ": a part of an adapter has other outputs");
        require(!up.takes_codes || ranks == added.code_ranks, name + ": codes come before floats");
        ranks += round_up(up.k(), up.takes_codes ? STRETCH : TILE);
        added.code_ranks = up.takes_codes ? ranks : added.code_ranks;
    }
    require(to.num_parts > 0 && is_plain(*added.down) && added.down->k() == to.k() &&
              added.down->takes_floats == to.parts[0].is_float && added.down->n() == ranks &&
              added.down->tiles() * TILE == ranks,
          name + ": an adapter has other inputs");
    return added;
}

void make_adapter(Adapter* place, nb::object of, nb::list layers) {
    const Decoder& decoder = nb::cast<const Decoder&>(of);
    const std::vector<DecoderLayer>& all = decoder.weights().layers;
    require(layers.size() == all.size(), "an adapter of another number of layers");
    require(!decoder.weights().entry, "adapters are for decoders that read tokens alone");
    auto self = std::make_unique<Adapter>(Adapter{&decoder, {}, 0, kept(nb::make_tuple(of, layers))});
    for (size_t index = 0; index < all.size(); ++index) {
        const auto fields = nb::cast<nb::dict>(layers[index]);
        const DecoderLayer& layer = all[index];
        require(!layer.latent && !layer.altup, "adapters are for plain attention and one stream");
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

// `of_spans`: an adapter or None for each span. They are kept alive.
void adapt(const Decoder& decoder, Batch& batch, const nb::sequence& of_spans) {
    require(nb::len(of_spans) == batch.spans.size(), "as many adapters as spans are needed");
    std::vector<const Adapter*> found;
    for (nb::handle each : of_spans) {
        found.push_back(each.is_none() ? nullptr : nb::cast<const Adapter*>(each));
        require(!found.back() || found.back()->decoder == &decoder, "an adapter is of another decoder");
    }
    batch.adapters = std::move(found);
    batch.keep_adapters = kept(nb::tuple(of_spans));
}

void bind_adapter(nb::module_& module) {
    nb::class_<Adapter>(module, "Adapter", "What is added to a decoder's linears for some rows.")
        .def("__init__", &make_adapter, nb::arg("decoder"), nb::arg("layers"));
}

}  // namespace paceline
