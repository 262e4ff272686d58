// The suffix automaton on the Python side: the classes SuffixAutomaton, SuffixRules and
// SuffixText, with what those of paceline.proposers.suffix offer. Reads token lists where they lie; tokens are 32
// bits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "drafts/suffix.h"

namespace nb = nanobind;

namespace paceline {
namespace {

int32_t to_token(PyObject* value) {
    const long token = PyLong_AsLong(value);
    if (token == -1 && PyErr_Occurred()) {
        throw nb::python_error();
    }
    if (token < INT32_MIN || token > INT32_MAX) {
        throw nb::value_error("a token id does not fit 32 bits");
    }
    return static_cast<int32_t>(token);
}

// The tokens of a list from `start` on.
std::vector<int32_t> tokens_of(const nb::list& list, size_t start) {
    std::vector<int32_t> tokens;
    tokens.reserve(list.size() - std::min(start, list.size()));
    for (size_t i = start; i < list.size(); ++i) {
        tokens.push_back(to_token(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i))));
    }
    return tokens;
}

void extend(SuffixAutomaton& automaton, const nb::list& token_ids, size_t start) {
    const std::vector<int32_t> tokens = tokens_of(token_ids, start);
    for (const int32_t token : tokens) {
        automaton.append(token);
    }
}

// A text, and what keeps the automata that are shared with it.
struct OwnedText : SuffixText {
    using SuffixText::SuffixText;
    nb::object shared;
};

void open_suffix_text(OwnedText* self, const SuffixRules* rules, uint32_t max_depth,
                      const TargetNoise& noise) {
    if (max_depth < 1 || max_depth >= rules->disputed.size()) {
        throw nb::value_error("max_depth is not from 1 to the drafter's");
    }
    new (self) OwnedText(rules, max_depth, noise);
}

void share(OwnedText& text, const nb::list& automata) {
    std::vector<const SuffixAutomaton*> found;
    for (nb::handle each : automata) {
        const SuffixAutomaton* automaton = nullptr;
        if (!nb::try_cast(each, automaton) || !automaton) {
            throw nb::type_error("automata holds something else than a SuffixAutomaton");
        }
        if (automaton->max_depth() >= text.rules().disputed.size()) {
            throw nb::value_error("an automaton is deeper than the drafter");
        }
        found.push_back(automaton);
    }
    text.shared = nb::list(automata);
    text.share(found);
}

}  // namespace

void bind_suffix(nb::module_& module) {
        using nb::arg;
    nb::class_<SuffixAutomaton>(module, "SuffixAutomaton")
        .def("__init__",
             [](SuffixAutomaton* self, uint32_t max_depth) {
                 if (max_depth < 1) {
                     throw nb::value_error("max_depth is 0; it must be at least 1");
                 }
                 new (self) SuffixAutomaton(max_depth);
             },
             arg("max_depth"))
        .def("end_text", &SuffixAutomaton::end_text)
        .def("extend", &extend, arg("token_ids"), arg("start") = 0)
        .def_prop_ro("max_depth", &SuffixAutomaton::max_depth)
        .def_prop_ro("num_tokens", &SuffixAutomaton::num_tokens)
        .def_prop_ro("num_states", &SuffixAutomaton::num_states)
        .def_prop_ro("num_bytes", &SuffixAutomaton::num_bytes);
    nb::class_<SuffixRules>(module, "SuffixRules")
        .def("__init__",
             [](SuffixRules* self, std::vector<std::tuple<double, double>> others,
                uint32_t branching, double min_token_prob, double min_path_prob,
                double max_spec_factor) {
                 new (self) SuffixRules{{}, {}, branching, min_token_prob, min_path_prob,
                                        max_spec_factor};
                 for (const auto& [disputed, unanimous] : others) {
                     self->disputed.push_back(disputed);
                     self->unanimous.push_back(unanimous);
                 }
             },
             arg("others"), nb::kw_only(), arg("branching"), arg("min_token_prob"),
             arg("min_path_prob"), arg("max_spec_factor"));
    nb::class_<OwnedText, TextDrafter>(module, "SuffixText")
        .def("__init__", &open_suffix_text, arg("drafter"), arg("max_depth"),
             arg("noise") = TargetNoise(), nb::keep_alive<1, 2>())
        .def("share", &share, arg("automata"));
}

}  // namespace paceline
