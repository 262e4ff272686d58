#include "layers/walk.h"

#include <algorithm>

namespace paceline {
namespace {

// The children of every row and of the committed state, which is counted as row -1. Those with few
// rows below them come first, so that the largest part of a tree needs no slice of its own.
struct Children {
    explicit Children(const std::vector<int32_t>& parents)
        : first(parents.size() + 2, 0), rows(parents.size()) {
        const int count = int(parents.size());
        std::vector<int> below(parents.size(), 1);
        for (int row = count - 1; row >= 0; --row) {
            ++first[parents[row] + 2];
            if (parents[row] >= 0) {
                below[parents[row]] += below[row];
            }
        }
        for (size_t i = 1; i < first.size(); ++i) {
            first[i] += first[i - 1];
        }
        std::vector<int> next(first.begin(), first.end() - 1);
        for (int row = 0; row < count; ++row) {
            rows[next[parents[row] + 1]++] = row;
        }
        for (int row = -1; row < count; ++row) {
            std::stable_sort(rows.begin() + first[row + 1], rows.begin() + first[row + 2],
                             [&](int a, int b) { return below[a] < below[b]; });
        }
    }
    int begin(int row) const { return first[row + 1]; }
    int end(int row) const { return first[row + 2]; }

    std::vector<int> first, rows;
};

// A row whose children are being walked.
struct Open {
    int row;
    int before, behind;  // slices of the state that the row reads, and of the one that it leaves
    int next, end;       // children
    int top;             // slices in use
};

}  // namespace

int add_walk(const std::vector<int32_t>& parents, int certain, std::vector<WalkStep>& steps) {
    const Children children(parents);
    int most = FIRST_BRANCH;
    std::vector<Open> open;
    const auto enter = [&](int row, int before, int top, bool is_last) {
        int behind = KEPT;
        if (row >= certain) {
            behind = is_last && before >= FIRST_BRANCH ? before : top;
            top = std::max(top, behind + 1);
        }
        open.push_back({row, before, behind, children.begin(row), children.end(row), top});
    };
    open.push_back({-1, COMMITTED, KEPT, children.begin(-1), children.end(-1), FIRST_BRANCH});
    while (!open.empty()) {
        Open& at = open.back();
        const bool is_first = at.next == children.begin(at.row);
        if (is_first && at.next == at.end && at.row == certain - 1) {
            steps.push_back({-1, at.row, at.before, at.behind});
        }
        if (at.next == at.end) {
            open.pop_back();
            continue;
        }
        if (is_first) {
            most = std::max(most, at.top);
        }
        const int child = children.rows[at.next++];
        steps.push_back({child, is_first ? at.row : -1, is_first ? at.before : at.behind,
                         is_first ? at.behind : NO_SLICE});
        enter(child, at.behind, at.top, at.next == at.end);
    }
    return most - FIRST_BRANCH;
}

void add_windows(const std::vector<int32_t>& parents, int certain, int kernel,
                 std::vector<int32_t>& windows, std::vector<int32_t>& last) {
    const int seen = kernel - 1;
    const size_t first = windows.size();
    // Into `to` what a row sees whose parent is `parent`. Those that are held are -1, -2, ... here, the
    // latest first.
    const auto window = [&](int parent, int32_t* to) {
        for (int at = seen - 1; at >= 0; --at) {
            to[at] = parent >= 0 ? parent : -1 - (seen + parent);
            parent = parent >= 0 ? parents[parent] : parent - 1;
        }
    };
    windows.resize(first + parents.size() * size_t(seen));
    for (size_t row = 0; row < parents.size(); ++row) {
        window(parents[row], windows.data() + first + row * size_t(seen));
    }
    last.resize(size_t(seen));
    window(certain - 1, last.data());
}

}  // namespace paceline
