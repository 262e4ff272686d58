"""What drafting further must promise, so that a proposer can stop by itself. Owns that rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prices:
    """What further drafting must promise, in expected tokens.

    Attributes:
        nodes: by how many draft nodes the step has already: of one more, the time in which the
            target verifies it, at the further count where nodes are cheapest. Empty: nothing.
        level: of one more level for all requests together: the time in which it is drafted.
        estimate: (place in the request list of the proposer, depth, its own estimate) to how
            likely the node is accepted once its parent is; infinite where a request asked for its
            drafts whatever they cost.
    """

    nodes: Sequence[float] = ()
    level: float = 0.0
    estimate: Callable[[int, int, float], float] = lambda index, depth, prob: prob

    def are_met(self, promises: Sequence[tuple[int, Sequence[float]]]) -> list[bool]:
        """For which requests another level is worth drafting.

        Nobody knows how likely its tokens are before they are drafted; they are taken to be as
        likely as those on the way there.

        Args:
            promises: of each request its place in the request list of the proposer, and the
                proposer's own estimates on the way down to the likeliest node of its last level.
        """
        if not self.nodes:
            return [True] * len(promises)
        count = sum(len(path) for _, path in promises)
        price = self.nodes[min(count, len(self.nodes) - 1)]
        surplus = [self._reached(*each) ** (1 + 1 / len(each[1])) - price for each in promises]
        pays = sum(max(0.0, more) for more in surplus) > self.level
        return [pays and more > 0.0 for more in surplus]

    def _reached(self, index: int, path: Sequence[float]) -> float:
        """How likely all nodes of a path are accepted."""
        product = 1.0
        for depth, prob in enumerate(path, 1):
            product *= self.estimate(index, depth, prob)
        return product


FREE = Prices()


def cheapest_ahead(growth: Sequence[float]) -> list[float]:
    """By node count: what each node up to the further count where they are cheapest costs, in ms.

    These are the slopes of the lower convex hull of what is ahead; never less than nothing.

    Args:
        growth: milliseconds of the step with 0, 1, 2, ... draft nodes.
    """
    slopes = [0.0] * len(growth)
    hull = [len(growth) - 1]
    for n in range(len(growth) - 2, -1, -1):
        while len(hull) > 1 and _slope(growth, n, hull[-2]) <= _slope(growth, n, hull[-1]):
            hull.pop()
        slopes[n] = max(0.0, _slope(growth, n, hull[-1]))
        hull.append(n)
    if len(slopes) > 1:
        slopes[-1] = slopes[-2]
    return slopes


def _slope(growth: Sequence[float], begin: int, end: int) -> float:
    return (growth[end] - growth[begin]) / (end - begin)
