// The n-gram look-ups on the Python side, in a model's tables and in the text alone:
// paceline/proposers/ngram_model.py and paceline/proposers/prompt_lookup.py call them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "drafts/ngram.h"
#include "drafts/prompt_lookup.h"
#include "bind/sequences.h"

namespace nb = nanobind;

namespace paceline {
namespace {

// An attribute that holds an array, as a table; the array is kept in `owners`.
template <typename T>
Table<T> table_of(nb::handle owner, const char* name, std::vector<nb::object>* owners) {
    owners->push_back(nb::getattr(owner, name));
    const auto array = nb::cast<Array<const T, 1>>(owners->back(), false);
    return {array.data(), array.size()};
}

uint32_t to_unsigned_token(PyObject* value) {
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

void open_lookup(OwnedLookup* self, nb::tuple levels, Array<const float, 1> unigrams, bool is_backoff) {
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

void open_ngram_text(NgramText* self, const OwnedLookup* lookup, size_t window, size_t branching,
                     double min_prob, const TargetNoise& noise) {
    new (self) NgramText(&lookup->lookup, window, branching, min_prob, noise);
}

// --- prompt lookup -------------------------------------------------------------------------------

void open_drafter(PromptDrafter* self, std::vector<std::vector<double>> unanimous,
                  nb::dict disputed, size_t branching, double min_prob) {
    PromptDrafter made;
    if (unanimous.size() != kMostAlternatives) {
        throw nb::value_error("the extension was built for another number of alternatives");
    }
    made.unanimous = std::move(unanimous);
    for (const auto& [sides, prob] : disputed) {
        const size_t those = nb::cast<size_t>(sides[0]), others = nb::cast<size_t>(sides[1]);
        if (those >= kMostAlternatives || others >= kMostAlternatives) {
            throw nb::value_error("more alternatives than the extension was built for");
        }
        made.disputed[those][others] = nb::cast<double>(prob);
    }
    made.branching = branching;
    made.min_prob = min_prob;
    new (self) PromptDrafter(std::move(made));
}

}  // namespace

void bind_ngram(nb::module_& module) {
    using nb::arg;
    nb::class_<OwnedLookup>(module, "NgramLookup")
        .def("__init__", &open_lookup, arg("levels"), arg("unigrams"), arg("is_backoff"));
    nb::class_<NgramText, TextDrafter>(module, "NgramText")
        .def("__init__", &open_ngram_text, arg("lookup"), arg("window"), arg("branching"),
             arg("min_prob"), arg("noise") = TargetNoise(), nb::keep_alive<1, 2>());
    nb::class_<PromptDrafter>(module, "PromptDrafter")
        .def("__init__", &open_drafter, arg("unanimous"), arg("disputed"), arg("branching"),
             arg("min_prob"));
    nb::class_<PromptText, TextDrafter>(module, "PromptText")
        .def(nb::init<const PromptDrafter*, size_t, size_t, size_t>(), arg("drafter"),
             arg("shortest"), arg("longest"), arg("window"), nb::keep_alive<1, 2>());
    module.def("context_key", [](nb::list tokens) {
        uint32_t context[kLongestContext];
        const size_t count = nb::len(tokens);
        if (count < 1 || count > kLongestContext) {
            throw nb::value_error("a context has 1 to 4 tokens");
        }
        for (size_t i = 0; i < count; ++i) {
            context[i] = to_unsigned_token(nb::handle(tokens[i]).ptr());
        }
        return context_key(context, count);
    });
}

}  // namespace paceline
