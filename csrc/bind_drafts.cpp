// Draft trees on the Python side: what they are estimated at, and several as one. Reads and writes
// paceline.span.DraftTree as paceline.policy.acceptance and paceline.policy.merging do.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "calibration.h"
#include "merge.h"
#include "read_tree.h"
#include "sequences.h"

namespace nb = nanobind;

namespace paceline {
namespace {

struct Names {
    PyObject* token_ids = name("token_ids");
    PyObject* parents = name("parents");
    PyObject* accept_probs = name("accept_probs");
    PyObject* origins = name("origins");
    PyObject* evidence = name("evidence");
    PyObject* claims = name("claims");
};

const Names& names() {
    static const Names known;
    return known;
}

std::vector<int64_t> read_tokens(nb::handle source) {
    const Items items(source, "token_ids are no sequence");
    std::vector<int64_t> tokens(items.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = to_long(items[i]);
    }
    return tokens;
}

// The value of an int, and of no subclass of it; -2, which no array of a tree has, for all else.
long exact_int(PyObject* value) {
    int overflow = 0;
    const long number = PyLong_CheckExact(value) ? PyLong_AsLongAndOverflow(value, &overflow) : -2;
    return overflow ? -2 : number;
}

// Whether DraftTree.validate and clamp_probs find nothing to object to; False may be too strict.
bool is_sound(nb::handle tree, int64_t vocab_size) {
    const Items tokens(attribute(tree.ptr(), names().token_ids), "token_ids are no sequence");
    const Items parents(attribute(tree.ptr(), names().parents), "parents are no sequence");
    const Items probs(attribute(tree.ptr(), names().accept_probs), "accept_probs are no sequence");
    const Items origins(attribute(tree.ptr(), names().origins), "origins are no sequence");
    const size_t count = tokens.size();
    if (parents.size() != count || probs.size() != count || origins.size() != count) {
        return false;
    }
    Trie trie;
    for (size_t i = 0; i < count; ++i) {
        const long token = exact_int(tokens[i]), parent = exact_int(parents[i]);
        const double prob = PyFloat_CheckExact(probs[i]) ? PyFloat_AS_DOUBLE(probs[i]) : -1.0;
        if (token < 0 || token >= vocab_size || parent < -1 || parent >= static_cast<long>(i) ||
            !(prob >= 0.0 && prob <= 1.0) ||
            trie.child(static_cast<int32_t>(parent), token) != static_cast<int32_t>(i)) {
            return false;
        }
    }
    return true;
}

// --- merging -------------------------------------------------------------------------------------

nb::object claims_list(const Claims& claims) {
    return make_list(claims.ends.size(), [&](size_t node) {
        const Claim* begin = claims.begin(node);
        const size_t count = static_cast<size_t>(claims.end(node) - begin);
        return make_list(count, [begin](size_t i) {
                   return nb::make_tuple(begin[i].cell, begin[i].prob).release().ptr();
               })
            .release()
            .ptr();
    });
}

nb::object merge_trees(nb::handle trees) {
    static PyObject* const make =
        nb::object(nb::module_::import_("paceline.span").attr("DraftTree")).release().ptr();
    const Items items(trees, "trees are no sequence");
    std::vector<nb::handle> full;
    std::vector<TreeToMerge> given;
    std::vector<Items> tokens, origins, evidence;
    for (size_t t = 0; t < items.size(); ++t) {
        Items found(attribute(items[t], names().token_ids), "token_ids are no sequence");
        if (!found.size()) {
            continue;
        }
        full.push_back(items[t]);
        tokens.push_back(std::move(found));
        origins.emplace_back(attribute(items[t], names().origins), "origins are no sequence");
        evidence.emplace_back(attribute(items[t], names().evidence), "evidence is no sequence");
        TreeToMerge tree;
        tree.parents = read_parents(items[t]);
        const size_t count = tree.parents.size(), known = evidence.back().size();
        if (tokens.back().size() != count || origins.back().size() != count ||
            (known && known != count)) {
            throw nb::value_error("a tree's arrays differ in length");
        }
        tree.probs = read_probs(items[t], count);
        for (size_t i = 0; i < count; ++i) {
            tree.tokens.push_back(to_long(tokens.back()[i]));
        }
        for (size_t i = 0; i < known; ++i) {
            tree.cells.push_back(static_cast<int32_t>(to_long(evidence.back()[i])));
        }
        given.push_back(std::move(tree));
    }
    if (full.size() < 2) {
        return full.empty() ? nb::handle(make)() : nb::borrow(full[0]);
    }
    const Merged merged = merge(given);
    const bool is_calibrated = !merged.claims.ends.empty();
    const auto picked = [](const std::vector<Items>& lists, const std::vector<Source>& sources) {
        return make_list(sources.size(), [&](size_t i) {
            return nb::borrow(lists[sources[i].tree][sources[i].node]).release().ptr();
        });
    };
    return nb::handle(make)(picked(tokens, merged.first), to_list(merged.parents),
                            to_list(merged.probs), picked(origins, merged.surest),
                            is_calibrated ? picked(evidence, merged.surest) : nb::list(),
                            is_calibrated ? claims_list(merged.claims) : nb::list());
}

// --- calibration ---------------------------------------------------------------------------------

// What paceline.policy.evidence.rows_of returns.
std::vector<Calibration::Row> read_rows(nb::handle source) {
    const Items items(source, "rows are no sequence");
    std::vector<Calibration::Row> rows(items.size());
    for (size_t depth = 0; depth < rows.size(); ++depth) {
        const Items row(items[depth], "a row is no sequence");
        for (size_t i = 0; i < row.size(); ++i) {
            const Items cell(row[i], "a cell is no sequence");
            rows[depth].push_back({static_cast<int32_t>(to_long(cell[0])), to_double(cell[1])});
        }
        if (rows.size() != Calibration::kRows || row.size() != Calibration::kSteps + 1) {
            throw nb::value_error("evidence has other rows than the extension was built for");
        }
    }
    return rows;
}

class DraftCalibration {
  public:
    DraftCalibration()
        : evidence_(nb::module_::import_("paceline.policy.evidence")),
          reports_(nb::module_::import_("paceline.policy.acceptance").attr("warn_of_invalid")) {}

    void calibrate(int64_t request, nb::handle tree) {
        const Parents parents = read_parents(tree);
        if (parents.empty()) {
            return;
        }
        std::vector<double> probs = read_probs(tree, parents.size());
        for (double& prob : probs) {
            prob = valid(prob);
        }
        const std::vector<int32_t> origins =
            numbers(attribute(tree.ptr(), names().origins), parents.size());
        const std::vector<int32_t> cells =
            calibration_.calibrate(request, origins, parents, &probs);
        set_attribute(tree.ptr(), names().evidence, to_list(cells));
        set_attribute(tree.ptr(), names().accept_probs, to_list(probs));
    }

    double estimate(int64_t request, nb::handle origin, int64_t depth, double prob) {
        if (depth < 0) {
            throw nb::value_error("a depth is below 0");
        }
        return calibration_.estimate(request, number(origin.ptr()), depth, valid(prob));
    }

    void learn(int64_t request, nb::handle tree, nb::handle token_ids) {
        const Items evidence(attribute(tree.ptr(), names().evidence), "evidence is no sequence");
        if (!evidence.size()) {
            return;
        }
        const std::vector<int64_t> tokens = read_tokens(attribute(tree.ptr(), names().token_ids));
        const std::vector<int64_t> emitted = read_tokens(token_ids);
        const Parents parents = read_parents(tree);
        const std::vector<double> probs = read_probs(tree, parents.size());
        if (tokens.size() != parents.size() || evidence.size() != parents.size()) {
            throw nb::value_error("a tree's arrays differ in length");
        }
        if (emitted.empty()) {
            throw nb::value_error("the target emitted nothing");
        }
        const std::vector<Outcome> labels = outcomes(tokens, parents, emitted);
        std::vector<Calibration::Error> errors;
        const Items lists(attribute(tree.ptr(), names().claims), "claims are no sequence");
        if (lists.size()) {
            const Claims claims = read_claims(lists, parents.size());
            for (const Outcome& label : labels) {
                const Claim* const end = claims.end(label.node);
                for (const Claim* claim = claims.begin(label.node); claim != end; ++claim) {
                    errors.push_back({claim->cell, label.value - claim->prob});
                }
            }
        } else {
            for (const Outcome& label : labels) {
                const int32_t cell = read_cell(evidence[label.node]);
                errors.push_back({cell, label.value - probs[label.node]});
            }
        }
        calibration_.learn(request, errors);
    }

    void finish(int64_t request) { calibration_.finish(request); }

    size_t num_requests() const { return calibration_.num_requests(); }

    int64_t num_invalid = 0;

  private:
    double valid(double prob) {
        if (prob >= 0.0 && prob <= 1.0) {
            return prob;
        }
        if (!num_invalid++) {
            reports_(prob);
        }
        return prob > 1.0 ? 1.0 : 0.0;
    }

    // The number of an origin, which is taken in where it is new.
    int32_t number(PyObject* origin) {
        if (PyObject* known = PyDict_GetItemWithError(numbers_.ptr(), origin)) {
            return static_cast<int32_t>(to_long(known));
        }
        if (PyErr_Occurred()) {
            throw nb::python_error();
        }
        const int32_t next = static_cast<int32_t>(calibration_.num_origins());
        const nb::object rows = evidence_.attr("rows_of")(nb::handle(origin), next);
        const nb::object logits = evidence_.attr("logits_of")(rows);
        calibration_.add_origin(read_rows(rows), nb::cast<std::vector<double>>(logits));
        numbers_[nb::handle(origin)] = next;
        return next;
    }

    std::vector<int32_t> numbers(nb::handle origins, size_t count) {
        const Items items(origins, "origins are no sequence");
        if (items.size() != count) {
            throw nb::value_error("a tree's arrays differ in length");
        }
        std::vector<int32_t> found(count);
        for (size_t i = 0; i < count; ++i) {
            found[i] = i && items[i] == items[i - 1] ? found[i - 1] : number(items[i]);
        }
        return found;
    }

    int32_t read_cell(PyObject* value) const {
        const long cell = to_long(value);
        if (cell < 0 || static_cast<size_t>(cell) >= calibration_.num_cells()) {
            throw nb::value_error("a tree's evidence is not of this calibration");
        }
        return static_cast<int32_t>(cell);
    }

    Claims read_claims(const Items& lists, size_t count) const {
        if (lists.size() != count) {
            throw nb::value_error("a tree's arrays differ in length");
        }
        Claims claims;
        for (size_t node = 0; node < count; ++node) {
            const Items list(lists[node], "claims are no sequence");
            for (size_t i = 0; i < list.size(); ++i) {
                const Items claim(list[i], "a claim is no sequence");
                if (claim.size() != 2) {
                    throw nb::value_error("a claim is not of two numbers");
                }
                claims.all.push_back({read_cell(claim[0]), to_double(claim[1])});
            }
            claims.ends.push_back(static_cast<int32_t>(claims.all.size()));
        }
        return claims;
    }

    nb::object evidence_, reports_;
    nb::dict numbers_;  // by origin
    Calibration calibration_;
};

}  // namespace
}  // namespace paceline

void bind_drafts(nb::module_& module) {
    using nb::arg;
    using paceline::DraftCalibration;
    module.def("is_sound", &paceline::is_sound, arg("tree"), arg("vocab_size"));
    module.def("merge", &paceline::merge_trees, arg("trees"));
    nb::class_<DraftCalibration>(module, "Calibration")
        .def(nb::init<>())
        .def("calibrate", &DraftCalibration::calibrate, arg("request_id"), arg("tree"))
        .def("estimate", &DraftCalibration::estimate, arg("request_id"), arg("origin"),
             arg("depth"), arg("prob"))
        .def("learn", &DraftCalibration::learn, arg("request_id"), arg("tree"), arg("token_ids"))
        .def("finish", &DraftCalibration::finish, arg("request_id"))
        .def_prop_ro("num_requests", &DraftCalibration::num_requests)
        .def_ro("num_invalid", &DraftCalibration::num_invalid);
}
