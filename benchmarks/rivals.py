"""The rules by which other engines decide how much to draft, as planners to be measured against.

Each rule is told as its source has it, for batches: what a source keeps for its one sequence is
kept per request, and what it keeps for its engine, for all of them. Lengths are depths of drafts,
so that a tree counts as the longest chain in it. A rule that stops drafting early stops the draft
model early too. None of them is used unless it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from paceline.policy.cost import CostModel
from paceline.policy.cost_points import NO_STEP, StepShape
from paceline.policy.planner import (
    DraftLimits,
    Drafts,
    FixedPlanner,
    Planner,
    Source,
    StepReport,
)
from paceline.policy.prices import Prices
from paceline.policy.selection import best_path_first, selected
from paceline.request import Request, VerifyResult
from paceline.span import ROOT, DraftTree

START_LENGTH = 4
"""Draft length of a request of which nothing is known yet."""
P_MIN = 0.75
GATE_THRESHOLD = 0.3
GATE_WEIGHT = 0.1
"""Weight of the latest step with a draft."""
PROBE_EVERY = 32
"""Steps after which a closed gate lets one through."""


def _until(goes_on: Callable[[int, int, float], bool]) -> Prices:
    """Prices that end a path at its first node (place, depth, estimate) that does not go on."""
    return Prices(nodes=(0.5,), estimate=lambda *node: float(goes_on(*node)))


class LimitedLength(FixedPlanner, ABC):
    """Drafts for each request up to a length."""

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()

    @abstractmethod
    def length(self, request: Request) -> int:
        """Most tokens along a path of the request's next draft."""

    def begin(self, step: StepShape, requests: Sequence[Request]) -> bool:
        self._requests = requests
        return True

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        lengths = [self.length(self._requests[i]) for i in chosen]
        return _until(lambda index, depth, prob: depth < lengths[index])

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        shortened = [
            replace(limit, max_depth=min(limit.max_depth, self.length(request)))
            for limit, request in zip(limits, self._requests, strict=True)
        ]
        return super().choose(trees, shortened, node_budget)


class FixedLength(LimitedLength):
    """The same length always, as ``num_speculative_tokens`` sets it in vLLM and others."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def length(self, request: Request) -> int:
        return self._length


class AdaptiveLength(LimitedLength):
    """One token more where drafts are mostly accepted, one less where they are mostly not.

    The family of Hugging Face's ``num_assistant_tokens_schedule="heuristic"``, which lengthens the
    next draft of a sequence when all of the last one was accepted and shortens it otherwise.

    Args:
        shortest, longest: bounds of the length.
        low, high: accepted over drafted tokens below and above which the length changes.
        window: latest drafts of the request over which that is taken.
    """

    def __init__(self, shortest: int, longest: int, low: float, high: float, window: int) -> None:
        super().__init__()
        self._shortest, self._longest = shortest, longest
        self._low, self._high, self._window = low, high, window
        self._lengths: dict[int, int] = {}
        self._recent: dict[int, deque[tuple[int, int]]] = {}

    def length(self, request: Request) -> int:
        return self._lengths.get(request.request_id, START_LENGTH)

    def observe(self, request: Request, result: VerifyResult) -> None:
        if not len(result.draft):
            return
        key, length = request.request_id, self.length(request)
        recent = self._recent.setdefault(key, deque(maxlen=self._window))
        recent.append((result.num_accepted, max(result.draft.depths())))
        accepted, drafted = map(sum, zip(*recent, strict=True))
        change = (accepted > self._high * drafted) - (accepted < self._low * drafted)
        self._lengths[key] = min(self._longest, max(self._shortest, length + change))

    def finish(self, request: Request) -> None:
        self._lengths.pop(request.request_id, None)
        self._recent.pop(request.request_id, None)


class LookupAlone(FixedPlanner):
    """Asks only proposers whose drafts cost no forward."""

    def ask(self, source: Source, candidates: Sequence[int], drafts: Drafts) -> list[int]:
        return [] if source.costs_forwards else list(candidates)


class LeastProbability(FixedPlanner):
    """Ends a draft before its first token that the proposer is less sure of than ``p_min``.

    llama.cpp's ``--draft-p-min``, at the default of the versions that had one.
    """

    def __init__(self, p_min: float = P_MIN) -> None:
        self._p_min = p_min

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        return _until(lambda index, depth, prob: prob >= self._p_min)

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        return super().choose([self._cut(tree) for tree in trees], limits, node_budget)

    def _cut(self, tree: DraftTree) -> DraftTree:
        kept = {ROOT}
        for node, (parent, prob) in enumerate(zip(tree.parents, tree.accept_probs, strict=True)):
            if parent in kept and prob >= self._p_min:
                kept.add(node)
        return selected(tree, sorted(kept - {ROOT}))


class Gate(FixedPlanner):
    """Speculation is off for the whole engine while too little is accepted of what is drafted.

    OpenInfer's gate of its n-gram proposer: an exponentially weighted mean, over the steps with a
    draft, of the accepted tokens per drafted request; a closed gate lets a step through now and
    then. TensorRT-LLM gates by accepted over drafted tokens, but never opens again.

    Args:
        per_token: divide by the drafted tokens instead of the drafted requests.
    """

    def __init__(self, per_token: bool) -> None:
        self._per_token = per_token
        self._mean = 1.0
        self._num_closed = 0
        self._accepted = self._drafted = 0

    def begin(self, step: StepShape, requests: Sequence[Request]) -> bool:
        if self._mean >= GATE_THRESHOLD:
            return True
        self._num_closed += 1
        return self._num_closed % PROBE_EVERY == 0

    def observe(self, request: Request, result: VerifyResult) -> None:
        if len(result.draft):
            self._accepted += result.num_accepted
            self._drafted += max(result.draft.depths()) if self._per_token else 1

    def end(self, report: StepReport) -> None:
        if self._drafted:
            self._mean += GATE_WEIGHT * (self._accepted / self._drafted - self._mean)
            self._accepted = self._drafted = 0


class WholeDraftSpeed(FixedPlanner):
    """The length of each draft that maximises P(all of it is accepted) x speed at its width.

    Proposed for llama.cpp as profile-guided speculative decoding (pull request 17034), there for
    one sequence. With R requests that draft, the speed at length j is (j + 1) / T, with T the time
    of the step when all R draft j tokens; length 0 has probability 1. It takes a draft of which not
    all is accepted for one of which nothing is. Only the best path of a tree is considered.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._step = NO_STEP

    def begin(self, step: StepShape, requests: Sequence[Request]) -> bool:
        self._step = step
        return True

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        paths = [_best_path(tree) for tree in trees]
        drafting = sum(map(bool, paths)) or 1
        times = self._cost.growth(self._step, drafting * max(map(len, paths), default=0))
        cut = [
            selected(tree, path[: _fastest_length(tree, path, times[::drafting])])
            for tree, path in zip(trees, paths, strict=True)
        ]
        return super().choose(cut, limits, node_budget)


def _best_path(tree: DraftTree) -> list[int]:
    order = best_path_first(tree, range(len(tree)))
    steps = zip(order, [ROOT, *order], strict=False)
    return [node for node, _ in takewhile(lambda step: tree.parents[step[0]] == step[1], steps)]


def _fastest_length(tree: DraftTree, path: Sequence[int], times: Sequence[float]) -> int:
    prob, scores = 1.0, [1.0 / times[0]]
    for length, node in enumerate(path, 1):
        prob *= tree.accept_probs[node]
        scores.append(prob * (length + 1) / times[length])
    return scores.index(max(scores))


RIVALS: dict[str, Callable[[CostModel], Planner]] = {
    "fixed, K = 2": lambda cost: FixedLength(2),
    "fixed, K = 4": lambda cost: FixedLength(4),
    "fixed, K = 8": lambda cost: FixedLength(8),
    "prompt lookup alone": lambda cost: LookupAlone(),
    "p_min": lambda cost: LeastProbability(),
    "accepted/drafted ratio": lambda cost: AdaptiveLength(1, 8, low=0.3, high=0.5, window=8),
    "look-ahead": lambda cost: AdaptiveLength(2, 8, low=0.5, high=0.9, window=1),
    "gate, accepted per draft": lambda cost: Gate(per_token=False),
    "gate, accepted/drafted": lambda cost: Gate(per_token=True),
    "P(draft) x speed": WholeDraftSpeed,
}
"""By name, how each is made from the cost model of its engine."""
