// What was drafted in a step on the Python side: the class Drafts, with what that of
// paceline.planner.drafts offers. Reads and writes paceline.request.span.DraftTree. Also CostFilter,
// with what that of paceline.planner.corrections offers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "drafts/cost_filter.h"
#include "drafts/drafts.h"
#include "drafts/noise.h"
#include "bind/read_tree.h"
#include "bind/sequences.h"

namespace nb = nanobind;

namespace paceline {
namespace {

struct Names {
    PyObject* token_ids = name("token_ids");
    PyObject* parents = name("parents");
    PyObject* accept_probs = name("accept_probs");
    PyObject* origins = name("origins");
    PyObject* max_nodes = name("max_nodes");
    PyObject* max_depth = name("max_depth");
    PyObject* min_path_prob = name("min_path_prob");
    PyObject* is_forced = name("is_forced");
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

// --- what was drafted ----------------------------------------------------------------------------

// What paceline.planner.priors.logits_of returns.
Calibration::Rows read_rows(nb::handle source) {
    Calibration::Rows rows = nb::cast<Calibration::Rows>(source);
    bool fits = rows.size() == Calibration::kRows;
    for (const std::vector<double>& row : rows) {
        fits = fits && row.size() == Calibration::kSteps + 1;
    }
    if (!fits) {
        throw nb::value_error("priors have other rows than the extension was built for");
    }
    return rows;
}

// The tokens of a text that a drafter is to be given.
std::vector<int32_t> tail_of(const TextDrafter& drafter, const Items& text) {
    std::vector<int32_t> tail;
    for (size_t i = drafter.first_unread(text.size()); i < text.size(); ++i) {
        const long token = to_long(text[i]);
        if (token < 0 || token > INT32_MAX) {
            throw nb::value_error("a token id is not in 0..2^31");
        }
        tail.push_back(static_cast<int32_t>(token));
    }
    return tail;
}

TextDraft draft_below(TextDrafter& drafter, const Items& text, size_t max_nodes,
                      size_t max_depth) {
    return drafter.draft(tail_of(drafter, text), text.size(), max_nodes, max_depth);
}

size_t matched(TextDrafter& drafter, nb::handle token_ids) {
    const Items text(token_ids, "token_ids are no sequence");
    return drafter.matched(tail_of(drafter, text), text.size());
}

void read_limit(PyObject* limit, PlanRequest* request) {
    request->max_nodes = to_long(attribute(limit, names().max_nodes).ptr());
    request->max_depth = to_long(attribute(limit, names().max_depth).ptr());
    request->min_path_prob = to_double(attribute(limit, names().min_path_prob).ptr());
    request->is_forced = PyObject_IsTrue(attribute(limit, names().is_forced).ptr()) == 1;
}

// One proposer's drafts of several texts.
struct Member {
    int32_t origin;
    size_t max_nodes, max_depth;
    Items drafters;  // one per text; None where it is not to draft
};

class StepDrafts {
  public:
    explicit StepDrafts(bool calibrates)
        : priors_(nb::module_::import_("paceline.planner.priors")),
          reports_(nb::module_::import_("paceline.planner.acceptance").attr("warn_of_invalid")),
          make_tree_(nb::module_::import_("paceline.request.span").attr("DraftTree")),
          no_draft_(nb::module_::import_("paceline.request.request").attr("NO_DRAFT")),
          drafts_(calibrates) {}

    // `adapters`: names, or None; as many as there are ids, or none at all.
    void begin(nb::handle ids, nb::handle adapters) {
        const std::vector<int64_t> requests = read_tokens(ids);
        const Items names(adapters, "adapters are no sequence");
        if (names.size() && names.size() != requests.size()) {
            throw nb::value_error("requests and adapters differ in number");
        }
        drafts_.begin(requests);
        for (size_t i = 0; i < names.size(); ++i) {
            if (names[i] != Py_None && drafts_.calibrates()) {
                bool is_new = false;
                const int32_t found = number(adapters_, names[i], &is_new);
                drafts_.calibration().adapt(requests[i], size_t(found) + 1);
            }
        }
    }

    void add(size_t index, nb::handle source, nb::handle tree) {
        DraftNodes nodes;
        nodes.tokens = read_tokens(attribute(tree.ptr(), names().token_ids));
        nodes.parents = read_parents(tree);
        nodes.probs = read_probs(tree, nodes.parents.size());
        nodes.origins =
            origins(attribute(tree.ptr(), names().origins), nodes.parents.size());
        if (nodes.tokens.size() != nodes.parents.size()) {
            throw nb::value_error("a tree's arrays differ in length");
        }
        for (double& prob : nodes.probs) {
            prob = valid(prob);
        }
        drafts_.add(checked(index), source_number(source), std::move(nodes));
    }

    // Lets each member draft below each text; `indices`, `texts` and `limits` are parallel.
    void draft(nb::handle source, nb::handle indices, nb::handle texts, nb::handle limits,
               nb::handle members, double enough, int64_t vocab_size) {
        const Items places(indices, "indices are no sequence");
        const Items all_texts(texts, "texts are no sequence");
        const Items all_limits(limits, "limits are no sequence");
        const std::vector<Member> asked = read_members(members, places.size());
        if (all_texts.size() != places.size() || all_limits.size() != places.size()) {
            throw nb::value_error("indices, texts and limits differ in number");
        }
        const int32_t number = source_number(source);
        for (size_t i = 0; i < places.size(); ++i) {
            const size_t index = checked(static_cast<size_t>(to_long(places[i])));
            const Items text(all_texts[i], "a text is no sequence");
            PlanRequest limit{};
            read_limit(all_limits[i], &limit);
            for (const Member& member : asked) {
                if (drafts_.expected(index) >= enough) {
                    break;
                }
                DraftNodes nodes = drafted(member, i, text, limit);
                for (const int64_t token : nodes.tokens) {
                    if (token < 0 || token >= vocab_size) {
                        throw nb::value_error("a drafted token is not in the vocabulary");
                    }
                }
                drafts_.add(index, number, std::move(nodes));
            }
        }
    }

    double expected(size_t index) const { return drafts_.expected(checked(index)); }

    int32_t depth(nb::handle source) { return drafts_.depth(source_number(source)); }

    nb::object sizes() {
        return make_list(drafts_.size(), [&](size_t i) {
            return PyLong_FromSize_t(drafts_.whole(i).whole.tokens.size());
        });
    }

    nb::object tree(size_t index) {
        const Drafts::Part& part = drafts_.whole(checked(index));
        std::vector<int32_t> nodes(part.whole.tokens.size());
        for (size_t i = 0; i < nodes.size(); ++i) {
            nodes[i] = static_cast<int32_t>(i);
        }
        return tree_of(part, nodes);
    }

    size_t choose(nb::handle limits, nb::handle growth, double rate, nb::handle slowdown,
                  nb::handle ahead, int64_t node_budget) {
        const Items all_limits(limits, "limits are no sequence");
        if (all_limits.size() != drafts_.size()) {
            throw nb::value_error("requests and limits differ in number");
        }
        Plan plan{{}, {}, {}, {}, rate, !slowdown.is_none(), 0.0, node_budget};
        if (plan.is_fair) {
            plan.slowdown = to_double(slowdown.ptr());
        }
        plan.requests.resize(all_limits.size());
        for (size_t r = 0; r < plan.requests.size(); ++r) {
            if (r > 0 && all_limits[r] == all_limits[r - 1]) {
                plan.requests[r] = plan.requests[r - 1];  // those of one configuration share them
            } else {
                read_limit(all_limits[r], &plan.requests[r]);
            }
            plan.requests[r].ahead = 0.0;
        }
        if (!ahead.is_none()) {
            const Items gains(ahead, "ahead is no sequence");
            if (gains.size() != plan.requests.size()) {
                throw nb::value_error("requests and ahead differ in number");
            }
            for (size_t r = 0; r < gains.size(); ++r) {
                plan.requests[r].ahead = to_double(gains[r]);
            }
        }
        const Items times(growth, "growth is no sequence");
        for (size_t n = 0; n < times.size(); ++n) {
            plan.growth.push_back(to_double(times[n]));
        }
        return drafts_.choose(std::move(plan));
    }

    nb::object chosen() {
        return make_list(drafts_.size(), [&](size_t i) {
            const Drafts::Part& part = drafts_.whole(i);
            return (part.chosen.empty() ? no_draft_ : tree_of(part, part.chosen)).release().ptr();
        });
    }

    double gain(nb::handle source, nb::handle indices, double price) {
        const Items places(indices, "indices are no sequence");
        std::vector<size_t> found(places.size());
        for (size_t i = 0; i < found.size(); ++i) {
            found[i] = checked(static_cast<size_t>(to_long(places[i])));
        }
        return drafts_.gain(source_number(source), found, price);
    }

    double estimate(int64_t request, nb::handle origin, int64_t depth, double prob) {
        if (depth < 0) {
            throw nb::value_error("a depth is below 0");
        }
        const int32_t number = origin_number(origin.ptr());
        return drafts_.calibration().estimate(request, number, depth, valid(prob));
    }

    void learn(int64_t request, nb::handle token_ids) {
        const std::vector<int64_t> emitted = read_tokens(token_ids);
        if (emitted.empty()) {
            throw nb::value_error("the target emitted nothing");
        }
        drafts_.learn(request, emitted);
    }

    void finish(int64_t request) { drafts_.calibration().finish(request); }

    size_t num_requests() { return drafts_.calibration().num_requests(); }
    size_t num_merges() const { return drafts_.num_merges(); }
    bool calibrates() const { return drafts_.calibrates(); }

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

    size_t checked(size_t index) const {
        if (index >= drafts_.size()) {
            throw nb::index_error("the step has no request of this index");
        }
        return index;
    }

    // The number of a name, which is taken in where it is new.
    static int32_t number(nb::dict& numbers, PyObject* name, bool* is_new) {
        if (PyObject* known = PyDict_GetItemWithError(numbers.ptr(), name)) {
            *is_new = false;
            return static_cast<int32_t>(to_long(known));
        }
        if (PyErr_Occurred()) {
            throw nb::python_error();
        }
        const int32_t next = static_cast<int32_t>(numbers.size());
        numbers[nb::handle(name)] = next;
        *is_new = true;
        return next;
    }

    int32_t source_number(nb::handle name) {
        bool is_new = false;
        return number(sources_, name.ptr(), &is_new);
    }

    int32_t origin_number(PyObject* origin) {
        bool is_new = false;
        const int32_t found = number(origins_, origin, &is_new);
        if (is_new) {
            names_.append(nb::handle(origin));
            drafts_.calibration().add_origin(read_rows(priors_.attr("logits_of")(nb::handle(origin))));
        }
        return found;
    }

    std::vector<int32_t> origins(nb::handle names, size_t count) {
        const Items items(names, "origins are no sequence");
        if (items.size() != count) {
            throw nb::value_error("a tree's arrays differ in length");
        }
        std::vector<int32_t> found(count);
        for (size_t i = 0; i < count; ++i) {
            found[i] = i && items[i] == items[i - 1] ? found[i - 1] : origin_number(items[i]);
        }
        return found;
    }

    std::vector<Member> read_members(nb::handle source, size_t count) {
        const Items items(source, "members are no sequence");
        std::vector<Member> found;
        for (size_t i = 0; i < items.size(); ++i) {
            const Items fields(items[i], "a member is no sequence");
            if (fields.size() != 4) {
                throw nb::value_error("a member is not of four values");
            }
            found.push_back({origin_number(fields[0]), static_cast<size_t>(to_long(fields[1])),
                             static_cast<size_t>(to_long(fields[2])),
                             Items(fields[3], "drafters are no sequence")});
            if (found.back().drafters.size() != count) {
                throw nb::value_error("texts and drafters differ in number");
            }
        }
        return found;
    }

    static DraftNodes drafted(const Member& member, size_t place, const Items& text,
                              const PlanRequest& limit) {
        const nb::handle handle = member.drafters[place];
        const size_t nodes = std::min<size_t>(member.max_nodes, std::max<int64_t>(0, limit.max_nodes));
        const size_t depth = std::min<size_t>(member.max_depth, std::max<int64_t>(0, limit.max_depth));
        if (handle.is_none() || !nodes || !depth) {
            return {};
        }
        TextDrafter* drafter = nullptr;
        if (!nb::try_cast(handle, drafter) || !drafter) {
            throw nb::type_error("drafters holds something else than a TextDrafter");
        }
        TextDraft draft = draft_below(*drafter, text, nodes, depth);
        DraftNodes found;
        found.origins.assign(draft.tokens.size(), member.origin);
        found.tokens = std::move(draft.tokens);
        found.parents = std::move(draft.parents);
        found.probs = std::move(draft.probs);
        return found;
    }

    // The tree of some nodes, in that order, each behind its parent.
    nb::object tree_of(const Drafts::Part& part, const std::vector<int32_t>& nodes) const {
        const DraftNodes& whole = part.whole;
        std::vector<int32_t> places(whole.tokens.size(), -1), parents;
        std::vector<double> probs;
        for (const int32_t node : nodes) {
            const int32_t parent = whole.parents[node];
            places[node] = static_cast<int32_t>(parents.size());
            parents.push_back(parent < 0 ? -1 : places[parent]);
            probs.push_back(whole.probs[node]);
        }
        const nb::object tokens = make_list(
            nodes.size(), [&](size_t i) { return PyLong_FromLongLong(whole.tokens[nodes[i]]); });
        const nb::object origins = make_list(nodes.size(), [&](size_t i) {
            return nb::object(names_[whole.origins[nodes[i]]]).release().ptr();
        });
        return make_tree_(tokens, to_list(parents), to_list(probs), origins);
    }

    nb::object priors_, reports_, make_tree_, no_draft_;
    nb::dict origins_, sources_, adapters_;  // numbers by name
    nb::list names_;                         // of origins, by number
    Drafts drafts_;
};

nb::tuple draft_of_text(TextDrafter& drafter, nb::handle token_ids, size_t max_nodes,
                        size_t max_depth) {
    const Items text(token_ids, "token_ids are no sequence");
    const TextDraft draft = draft_below(drafter, text, max_nodes, max_depth);
    const nb::object tokens = make_list(
        draft.tokens.size(), [&](size_t i) { return PyLong_FromLongLong(draft.tokens[i]); });
    return nb::make_tuple(tokens, to_list(draft.parents), to_list(draft.probs));
}

// Times of `width` rows and more, one after another, each corrected.
nb::object corrected(const CostFilter& filter, size_t width, nb::handle times) {
    const Items items(times, "times are no sequence");
    std::vector<double> found(items.size());
    for (size_t i = 0; i < found.size(); ++i) {
        found[i] = to_double(items[i]);
    }
    filter.correct(width, &found);
    return to_list(found);
}

}  // namespace

void bind_drafts(nb::module_& module) {
    using nb::arg;
    nb::class_<CostFilter>(module, "CostFilter")
        .def(nb::init<double, bool>(), arg("spread"), arg("is_relative"))
        .def_prop_ro("knows_unit", &CostFilter::knows_unit)
        .def("factor", &CostFilter::factor, arg("width"))
        .def("corrected", &corrected, arg("width"), arg("times"))
        .def("doubts",
             [](const CostFilter& filter, size_t width, size_t count) {
                 return to_list(filter.doubts(width, count));
             },
             arg("width"), arg("count"))
        .def("deviation", &CostFilter::deviation, arg("width"))
        .def("observe",
             [](CostFilter& filter, size_t width, double level) {
                 const CostFilter::Surprise found = filter.observe(width, level);
                 return nb::make_tuple(found.error, found.variance);
             },
             arg("width"), arg("level"));
    module.def("is_sound", &is_sound, arg("tree"), arg("vocab_size"));
    nb::class_<TargetNoise>(module, "TargetNoise")
        .def(nb::init<>())
        .def(nb::init<uint64_t, uint32_t, double, double>(), arg("seed"), arg("sample"),
             arg("weight"), arg("mean"))
        .def("factor", &TargetNoise::factor, arg("position"), arg("token"));
    nb::class_<TextDrafter>(module, "TextDrafter")
        .def("draft", &draft_of_text, arg("token_ids"), arg("max_nodes"), arg("max_depth"))
        .def("matched", &matched, arg("token_ids"));
    nb::class_<StepDrafts>(module, "Drafts")
        .def(nb::init<bool>(), arg("calibrates") = true)
        .def("begin", &StepDrafts::begin, arg("request_ids"),
             arg("adapters") = nb::make_tuple())
        .def("add", &StepDrafts::add, arg("index"), arg("source"), arg("tree"))
        .def("draft", &StepDrafts::draft, arg("source"), arg("indices"), arg("texts"),
             arg("limits"), arg("members"), arg("enough"), arg("vocab_size"))
        .def("expected", &StepDrafts::expected, arg("index"))
        .def("depth", &StepDrafts::depth, arg("source"))
        .def("sizes", &StepDrafts::sizes)
        .def("tree", &StepDrafts::tree, arg("index"))
        .def("choose", &StepDrafts::choose, arg("limits"), arg("growth"), arg("rate"),
             nb::kw_only(), arg("slowdown").none() = nb::none(), arg("ahead").none() = nb::none(),
             arg("node_budget"))
        .def("chosen", &StepDrafts::chosen)
        .def("gain", &StepDrafts::gain, arg("source"), arg("indices"), arg("price"))
        .def("estimate", &StepDrafts::estimate, arg("request_id"), arg("origin"), arg("depth"),
             arg("prob"))
        .def("learn", &StepDrafts::learn, arg("request_id"), arg("token_ids"))
        .def("finish", &StepDrafts::finish, arg("request_id"))
        .def_prop_ro("num_requests", &StepDrafts::num_requests)
        .def_prop_ro("num_merges", &StepDrafts::num_merges)
        .def_prop_ro("calibrates", &StepDrafts::calibrates)
        .def_ro("num_invalid", &StepDrafts::num_invalid);
}

}  // namespace paceline
