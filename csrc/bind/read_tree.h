// Parents and estimates of a paceline.request.span.DraftTree, checked.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "drafts/draft.h"
#include "bind/sequences.h"

namespace paceline {

inline Parents read_parents(nanobind::handle tree) {
    static PyObject* const key = name("parents");
    const Items items(attribute(tree.ptr(), key), "parents are no sequence");
    Parents parents(items.size());
    for (size_t i = 0; i < parents.size(); ++i) {
        const long parent = to_long(items[i]), most = static_cast<long>(i) - 1;
        if (parent < -1 || parent > most) {
            throw nanobind::value_error(("the parent of draft node " + std::to_string(i) + " is " +
                                         std::to_string(parent) + "; allowed are -1 to " +
                                         std::to_string(most))
                                            .c_str());
        }
        parents[i] = static_cast<int32_t>(parent);
    }
    return parents;
}

// Of a tree with so many nodes.
inline std::vector<double> read_probs(nanobind::handle tree, size_t count) {
    static PyObject* const key = name("accept_probs");
    const Items items(attribute(tree.ptr(), key), "accept_probs are no sequence");
    if (items.size() != count) {
        throw nanobind::value_error("a tree's arrays differ in length");
    }
    std::vector<double> probs(count);
    for (size_t i = 0; i < count; ++i) {
        probs[i] = to_double(items[i]);
    }
    return probs;
}

}  // namespace paceline
