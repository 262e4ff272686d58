// Several draft trees of one request as one: paceline/planner/drafts.py in C++, where it is
// described. Its arithmetic is that of the Python code, to the last bit. Knows no Python.
#pragma once

#include <cstdint>
#include <vector>

#include "drafts/draft.h"

namespace paceline {

DraftNodes merge(const std::vector<DraftNodes>& trees);

}  // namespace paceline
