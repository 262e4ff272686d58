// What planning needs on the Python side: the choice of draft nodes, with the arguments of
// paceline.policy.choice.choose_nodes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plan.h"
#include "read_tree.h"
#include "sequences.h"

namespace nb = nanobind;

namespace paceline {
namespace {

struct Names {
    PyObject* max_nodes = name("max_nodes");
    PyObject* max_depth = name("max_depth");
    PyObject* min_path_prob = name("min_path_prob");
    PyObject* is_forced = name("is_forced");
};

void read_tree(nb::handle tree, Plan* plan, PlanRequest* request) {
    const Parents parents = read_parents(tree);
    const std::vector<double> probs = read_probs(tree, parents.size());
    request->first = static_cast<int>(plan->parents.size());
    request->count = static_cast<int>(parents.size());
    plan->parents.insert(plan->parents.end(), parents.begin(), parents.end());
    plan->accept_probs.insert(plan->accept_probs.end(), probs.begin(), probs.end());
}

void read_limit(PyObject* limit, const Names& names, PlanRequest* request) {
    request->max_nodes = to_long(attribute(limit, names.max_nodes).ptr());
    request->max_depth = to_long(attribute(limit, names.max_depth).ptr());
    request->min_path_prob = to_double(attribute(limit, names.min_path_prob).ptr());
    request->is_forced = PyObject_IsTrue(attribute(limit, names.is_forced).ptr()) == 1;
}

// A number per request, unless there are none.
void read_each(nb::handle source, const char* what, double PlanRequest::*field,
               std::vector<PlanRequest>* requests) {
    if (source.is_none()) {
        return;
    }
    const std::string name(what);
    const Items items(source, (name + " are no sequence").c_str());
    if (items.size() != requests->size()) {
        throw nb::value_error(("trees and " + name + " differ in number").c_str());
    }
    for (size_t r = 0; r < items.size(); ++r) {
        (*requests)[r].*field = to_double(items[r]);
    }
}

nb::list choose(nb::handle trees, nb::handle limits, nb::handle growth, double rate,
                nb::handle slowdown, nb::handle ahead, int64_t node_budget) {
    static const Names names;
    const Items tree_items(trees, "trees are no sequence");
    const Items limit_items(limits, "limits are no sequence");
    const size_t count = tree_items.size();
    if (limit_items.size() != count) {
        throw nb::value_error("trees and limits differ in number");
    }
    Plan plan{{}, {}, {}, {}, rate, !slowdown.is_none(), 0.0, node_budget};
    if (plan.is_fair) {
        plan.slowdown = to_double(slowdown.ptr());
    }
    plan.requests.resize(count);
    for (size_t r = 0; r < count; ++r) {
        PlanRequest& request = plan.requests[r];
        if (r > 0 && limit_items[r] == limit_items[r - 1]) {
            request = plan.requests[r - 1];  // requests of one configuration share their limits
        } else {
            read_limit(limit_items[r], names, &request);
        }
        read_tree(tree_items[r], &plan, &request);
        request.ahead = 0.0;
    }
    read_each(ahead, "ahead", &PlanRequest::ahead, &plan.requests);
    const Items times(growth, "growth is no sequence");
    const int64_t end = std::min(plan.most_nodes() + 1, static_cast<int64_t>(times.size()));
    plan.growth.resize(static_cast<size_t>(std::max<int64_t>(0, end)));
    for (size_t n = 0; n < plan.growth.size(); ++n) {
        plan.growth[n] = to_double(times[n]);
    }
    nb::list result;
    for (const std::vector<int32_t>& nodes : choose_nodes(plan)) {
        result.append(to_list(nodes));
    }
    return result;
}

}  // namespace
}  // namespace paceline

void bind_plan(nb::module_& module) {
    using nb::arg;
    module.def("choose_nodes", &paceline::choose, arg("trees"), arg("limits"), arg("growth"),
               arg("rate"), nb::kw_only(), arg("slowdown").none() = nb::none(), arg("ahead").none() = nb::none(),
               arg("node_budget"));
}
