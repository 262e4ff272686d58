// Layers and experts that are read from disk, for Python: see paceline/disk/streaming.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "disk/expert_cache.h"
#include "disk/layer_stream.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
using Extents = std::vector<std::tuple<int, int64_t, int64_t>>;

std::vector<Extent> extents_of(const Extents& given, size_t files) {
    std::vector<Extent> extents;
    for (const auto& [file, offset, bytes] : given) {
        if (file < 0 || static_cast<size_t>(file) >= files || offset < 0 || bytes < 1) {
            throw nb::value_error("an extent is not of a file");
        }
        extents.push_back({file, offset, bytes});
    }
    return extents;
}

// An index that Python gave.
size_t checked(int64_t index, size_t number, const char* what) {
    if (index < 0 || static_cast<size_t>(index) >= number) {
        const std::string text = "no " + std::string(what) + " " + std::to_string(index) +
                                 "; there are " + std::to_string(number);
        throw nb::index_error(text.c_str());
    }
    return static_cast<size_t>(index);
}

Bytes bytes_of(const std::vector<Place>& places, int64_t extent, nb::object owner) {
    const Place& place = places[checked(extent, places.size(), "extent")];
    return Bytes(place.at, {place.bytes}, owner);
}

size_t layer_of(const LayerStream& stream, int64_t layer) {
    return checked(layer, stream.places().size(), "layer");
}

}  // namespace

void bind_stream(nb::module_& module) {
    nb::exception<ReadError>(module, "ReadError", PyExc_OSError);
    nb::class_<LayerStream>(module, "LayerStream")
        .def("__init__",
             [](LayerStream* self, const std::vector<std::string>& files,
                const std::vector<Extents>& layers, int slots, int readers) {
                 std::vector<std::vector<Extent>> extents;
                 for (const Extents& layer : layers) {
                     extents.push_back(extents_of(layer, files.size()));
                 }
                 if (slots < 1 || readers < 1) {
                     throw nb::value_error("slots and readers are at least 1");
                 }
                 new (self) LayerStream(files, std::move(extents), slots, readers);
             },
             nb::arg("files"), nb::arg("layers"), nb::arg("slots"), nb::arg("readers"))
        // The bytes of an extent, which are there between `begin` and `end` of the layer.
        .def("array", [](nb::object self, int64_t layer, int64_t extent) {
            const LayerStream& stream = nb::cast<LayerStream&>(self);
            return bytes_of(stream.places()[layer_of(stream, layer)], extent, self);
        })
        .def("begin", [](LayerStream& self, int64_t layer) {
            const size_t index = layer_of(self, layer);
            nb::gil_scoped_release release;
            self.begin(index);
        })
        .def("end", [](LayerStream& self, int64_t layer) { self.end(layer_of(self, layer)); })
        .def_prop_ro("bytes_read", &LayerStream::bytes_read)
        .def_prop_ro("seconds_waited", &LayerStream::seconds_waited);
    nb::class_<ExpertCache>(module, "ExpertCache")
        .def("__init__",
             [](ExpertCache* self, const std::vector<std::string>& files,
                const std::vector<std::vector<Extents>>& layers, int64_t bytes, int readers) {
                 std::vector<std::vector<std::vector<Extent>>> experts;
                 for (const std::vector<Extents>& layer : layers) {
                     experts.emplace_back();
                     for (const Extents& each : layer) {
                         experts.back().push_back(extents_of(each, files.size()));
                     }
                 }
                 if (bytes < 1 || readers < 1) {
                     throw nb::value_error("bytes and readers are at least 1");
                 }
                 new (self) ExpertCache(files, std::move(experts), bytes, readers);
             },
             nb::arg("files"), nb::arg("experts"), nb::arg("bytes"), nb::arg("readers"))
        // The bytes of an extent, which only a forward can read.
        .def("array", [](nb::object self, int64_t layer, int64_t expert, int64_t extent) {
            const ExpertCache& cache = nb::cast<ExpertCache&>(self);
            const size_t index = checked(layer, cache.num_layers(), "layer");
            const size_t id = checked(expert, cache.number(index), "expert");
            return bytes_of(cache.places(index, id), extent, self);
        })
        .def_prop_ro("bytes_read", &ExpertCache::bytes_read)
        .def_prop_ro("seconds_waited", &ExpertCache::seconds_waited);
}

}  // namespace paceline
