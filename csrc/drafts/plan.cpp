#include "drafts/plan.h"

#include <algorithm>

namespace paceline {
namespace {

struct HeapNode {
    double path_prob;
    int32_t request, node, depth;
};

// Whether a ranks behind b; the comparison of a heap whose top ranks first.
bool ranks_behind(const HeapNode& a, const HeapNode& b) {
    if (a.path_prob != b.path_prob) {
        return a.path_prob < b.path_prob;
    }
    return a.request != b.request ? a.request > b.request : a.node > b.node;
}

// Takes candidates best first, of each request as many as it may have. A child never ranks before
// its parent, so that only children of nodes already taken have to be compared.
class NodeHeap {
  public:
    NodeHeap(const Plan& plan, bool forced)
        : plan_(plan), room_(plan.requests.size()), first_(plan.parents.size(), -1),
          next_(plan.parents.size(), -1) {
        for (size_t r = 0; r < plan.requests.size(); ++r) {
            const PlanRequest& request = plan.requests[r];
            if (request.is_forced == forced && request.max_nodes > 0) {
                room_[r] = request.max_nodes;
                push(static_cast<int32_t>(r), link(request), 1.0, 1);
            }
        }
    }

    // False when there are no more.
    bool take(HeapNode* best) {
        while (!heap_.empty()) {
            std::pop_heap(heap_.begin(), heap_.end(), ranks_behind);
            *best = heap_.back();
            heap_.pop_back();
            if (room_[best->request] > 0) {
                --room_[best->request];
                push(best->request, first_[plan_.requests[best->request].first + best->node],
                     best->path_prob, best->depth + 1);
                return true;
            }
        }
        return false;
    }

  private:
    // Chains the children of every node; returns the first node at the top, or -1.
    int32_t link(const PlanRequest& request) {
        const int32_t* parents = plan_.parents.data() + request.first;
        int32_t *first = first_.data() + request.first, *next = next_.data() + request.first;
        int32_t top = -1;
        for (int32_t node = request.count - 1; node >= 0; --node) {
            int32_t& head = parents[node] < 0 ? top : first[parents[node]];
            next[node] = head;
            head = node;
        }
        return top;
    }

    // Adds a node and its siblings, where they are within the limits.
    void push(int32_t r, int32_t node, double parent_prob, int32_t depth) {
        const PlanRequest& request = plan_.requests[r];
        if (depth > request.max_depth) {
            return;
        }
        for (; node >= 0; node = next_[request.first + node]) {
            const double prob = parent_prob * plan_.accept_probs[request.first + node];
            if (request.is_forced || prob >= request.min_path_prob) {
                heap_.push_back({prob, r, node, depth});
                std::push_heap(heap_.begin(), heap_.end(), ranks_behind);
            }
        }
    }

    const Plan& plan_;
    std::vector<HeapNode> heap_;
    std::vector<int64_t> room_;
    std::vector<int32_t> first_, next_;  // child and sibling, by node of all requests; -1 is none
};

// prices[n]: what a node of any larger count than n costs at least, averaged over all of the count.
std::vector<double> least_prices(const Plan& plan, int64_t most) {
    std::vector<double> prices(most);
    for (int64_t n = most; n > 0; --n) {
        const double cost = plan.rate * (plan.growth[n] - plan.growth[0]) / static_cast<double>(n);
        prices[n - 1] = n == most ? cost : std::min(prices[n], cost);
    }
    return prices;
}

// Appends to the forced nodes those that pay, by the best of all counts up to `most`.
void fill_up(const Plan& plan, int64_t most, std::vector<HeapNode>* taken) {
    std::vector<double> gains;
    for (const PlanRequest& request : plan.requests) {
        gains.push_back(request.ahead);
    }
    for (const HeapNode& node : *taken) {
        gains[node.request] += node.path_prob;
    }
    const double plain = plan.growth[0], longest = plan.growth[taken->size()];
    const std::vector<double> prices = least_prices(plan, most);
    NodeHeap candidates(plan, false);
    size_t count = taken->size();
    double value = 0.0, best = -plan.rate * (longest - plain);
    HeapNode next;
    while (taken->size() < prices.size() && candidates.take(&next)) {
        const double price = prices[taken->size()];
        value += next.path_prob;
        if (next.path_prob <= price &&
            value - price * static_cast<double>(taken->size() + 1) <= best) {
            break;
        }
        taken->push_back(next);
        gains[next.request] += next.path_prob;
        const double time = plan.growth[taken->size()];
        const double total = value - plan.rate * (time - plain);
        if (total > best &&
            (!plan.is_fair || time <= longest ||
             (1.0 + *std::min_element(gains.begin(), gains.end())) * plain >=
                 (1.0 - plan.slowdown) * time)) {
            best = total;
            count = taken->size();
        }
    }
    taken->resize(count);
}

// Orders a request's nodes: the likeliest path, then the others by index.
void put_best_path_first(const Plan& plan, const PlanRequest& request,
                         std::vector<int32_t>* nodes) {
    std::sort(nodes->begin(), nodes->end());
    const int32_t* parents = plan.parents.data() + request.first;
    const double* probs = plan.accept_probs.data() + request.first;
    // The path's nodes are moved to the front one by one; those passed over keep their order.
    int32_t last = -1;
    for (auto front = nodes->begin(); front != nodes->end(); ++front) {
        auto best = nodes->end();
        for (auto node = front; node != nodes->end(); ++node) {
            if (parents[*node] == last && (best == nodes->end() || probs[*node] > probs[*best])) {
                best = node;
            }
        }
        if (best == nodes->end()) {
            return;
        }
        last = *best;
        std::rotate(front, best, best + 1);
    }
}

}  // namespace

int64_t Plan::most_nodes() const {
    int64_t most = 0;
    for (const PlanRequest& request : requests) {
        most += std::max<int64_t>(0, std::min<int64_t>(request.count, request.max_nodes));
    }
    return std::min(most, node_budget);
}

std::vector<std::vector<int32_t>> choose_nodes(const Plan& plan) {
    std::vector<HeapNode> taken;
    if (std::any_of(plan.requests.begin(), plan.requests.end(),
                    [](const PlanRequest& request) { return request.is_forced; })) {
        NodeHeap forced(plan, true);
        HeapNode next;
        while (static_cast<int64_t>(taken.size()) < plan.node_budget && forced.take(&next)) {
            taken.push_back(next);
        }
    }
    const int64_t most =
        std::min(plan.most_nodes(), static_cast<int64_t>(plan.growth.size()) - 1);
    if (static_cast<int64_t>(taken.size()) < most) {
        fill_up(plan, most, &taken);
    }
    std::vector<std::vector<int32_t>> chosen(plan.requests.size());
    for (const HeapNode& node : taken) {
        chosen[node.request].push_back(node.node);
    }
    for (size_t r = 0; r < chosen.size(); ++r) {
        put_best_path_first(plan, plan.requests[r], &chosen[r]);
    }
    return chosen;
}

}  // namespace paceline
