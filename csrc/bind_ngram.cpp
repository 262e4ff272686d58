// The n-gram look-ups on the Python side: paceline/proposers/ngram_model/proposer.py calls them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ngram.h"

namespace nb = nanobind;

namespace paceline {
namespace {

template <typename T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// An attribute that holds an array, as a table; the array is kept in `owners`.
template <typename T>
Table<T> table_of(nb::handle owner, const char* name, std::vector<nb::object>* owners) {
    owners->push_back(nb::getattr(owner, name));
    const auto array = nb::cast<Array<T>>(owners->back(), false);
    return {array.data(), array.size()};
}

uint32_t to_token(PyObject* value) {
    const unsigned long token = PyLong_AsUnsignedLong(value);
    if (PyErr_Occurred()) {
        throw nb::python_error();
    }
    if (token > UINT32_MAX) {
        throw nb::value_error("a token id does not fit into 32 bits");
    }
    return static_cast<uint32_t>(token);
}

struct OwnedLookup {
    NgramLookup lookup;
    std::vector<nb::object> owners;  // whose memory the tables are in
};

void open_lookup(OwnedLookup* self, nb::tuple levels, Array<float> unigrams, bool is_backoff) {
    OwnedLookup made{{{}, {unigrams.data(), unigrams.size()}, is_backoff}, {}};
    made.owners.push_back(nb::cast(unigrams));
    std::vector<nb::object>* const owners = &made.owners;
    for (nb::handle level : levels) {
        made.lookup.levels.push_back({table_of<uint64_t>(level, "keys", owners),
                                       table_of<uint32_t>(level, "buckets", owners),
                                       table_of<uint32_t>(level, "starts", owners),
                                       table_of<float>(level, "lower_weights", owners),
                                       table_of<uint32_t>(level, "tokens", owners),
                                       table_of<float>(level, "values", owners)});
        if (!made.lookup.levels.back().is_sound()) {
            throw nb::value_error("the sizes of a level's tables do not go together");
        }
    }
    new (self) OwnedLookup(std::move(made));
}

nb::tuple draft(const OwnedLookup& self, const TextCache* cache, nb::list tail, size_t max_nodes,
                size_t max_depth, size_t branching, double min_prob) {
    uint32_t context[kLongestContext];
    const size_t count = std::min(nb::len(tail), kLongestContext), skipped = nb::len(tail) - count;
    for (size_t i = 0; i < count; ++i) {
        context[i] = to_token(nb::handle(tail[skipped + i]).ptr());
    }
    const NgramDraft found =
        self.lookup.draft(cache, context, count, {max_nodes, max_depth, branching, min_prob});
    nb::list tokens, parents, probs;
    for (size_t i = 0; i < found.tokens.size(); ++i) {
        tokens.append(found.tokens[i]);
        parents.append(found.parents[i]);
        probs.append(found.probs[i]);
    }
    return nb::make_tuple(tokens, parents, probs);
}

void extend(TextCache& self, nb::list token_ids, size_t start) {
    for (size_t i = start; i < nb::len(token_ids); ++i) {
        self.push(to_token(PyList_GET_ITEM(token_ids.ptr(), static_cast<Py_ssize_t>(i))));
    }
}

}  // namespace
}  // namespace paceline

void bind_ngram(nb::module_& module) {
    using namespace paceline;
    using nb::arg;
    nb::class_<TextCache>(module, "TextCache")
        .def(nb::init<>())
        .def("__len__", &TextCache::size)
        .def("extend", &extend, arg("token_ids"), arg("start"));
    nb::class_<OwnedLookup>(module, "NgramLookup")
        .def("__init__", &open_lookup, arg("levels"), arg("unigrams"), arg("is_backoff"))
        .def("draft", &draft, arg("cache").none(), arg("tail"), arg("max_nodes"),
             arg("max_depth"), arg("branching"), arg("min_prob"));
    module.def("context_key", [](nb::list tokens) {
        uint32_t context[kLongestContext];
        const size_t count = nb::len(tokens);
        if (count < 1 || count > kLongestContext) {
            throw nb::value_error("a context has 1 to 4 tokens");
        }
        for (size_t i = 0; i < count; ++i) {
            context[i] = to_token(nb::handle(tokens[i]).ptr());
        }
        return context_key(context, count);
    });
}
