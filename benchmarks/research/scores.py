"""How well acceptance is estimated: drafts with what became of them, and the scores of estimators.

Everybody drafts whatever it costs, and the target's tokens label the nodes. Every estimate is made
before the label that it is judged by is learnt, in the order in which an engine asks and learns.
Knows no estimator's inside and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any, Protocol

from paceline.planner.choice import DraftLimits
from paceline.planner.cost_points import StepShape
from paceline.planner.merging import merge
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree
from paceline.workbench.replay_parts import AskingAll

LEAST_LOSS_PROB = 0.001
"""A certainty that turns out wrong costs as much as this probability would."""
NUM_BINS = 10


class Estimator(Protocol):
    """What :class:`~paceline.planner.acceptance.Calibration` offers, and means by it."""

    def calibrate(self, request_id: int, tree: DraftTree) -> None: ...

    def observe(self, request_id: int, result: VerifyResult) -> None: ...

    def finish(self, request_id: int) -> None: ...


Estimators = Mapping[str, Callable[[], Estimator]]


@dataclass(frozen=True, slots=True)
class LoggedDraft:
    """What was drafted for a request in one step, and what came of it.

    Attributes:
        trees: one per proposer that drafted, with its own estimates.
        token_ids: the tokens that the step emitted.
    """

    request_id: int
    trees: Sequence[DraftTree]
    token_ids: Sequence[int]


Log = Sequence[Sequence[LoggedDraft]]
"""Steps, each with the drafts that its requests had."""


class Recorder(AskingAll):
    """Has everybody draft and everything verified, and keeps a log of it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list[LoggedDraft]] = []
        self._trees: dict[int, list[DraftTree]] = {}

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._trees = {}
        self.log.append([])
        return super().begin(step, requests)

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        for index, request in enumerate(self._requests):
            self._trees[request.request_id] = [*map(replace, self.drafts.trees(index))]
        return super().choose(limits, node_budget)

    def observe(self, request: Request, result: VerifyResult) -> None:
        trees = self._trees.get(request.request_id)
        if trees:
            self.log[-1].append(LoggedDraft(request.request_id, trees, list(result.token_ids)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """An estimate of a labelled node, and whether it was accepted."""

    request_id: int
    estimate: float
    accepted: bool


def replay(log: Log, estimator: Estimator) -> list[Outcome]:
    """What an estimator says of every labelled node, learning as it goes."""
    last_step = {draft.request_id: at for at, step in enumerate(log) for draft in step}
    outcomes = []
    for at, step in enumerate(log):
        results = [
            as_if_verified(_calibrated(draft, estimator), VerifyResult((), draft.token_ids, ()))
            for draft in step
        ]
        for draft, result in zip(step, results, strict=True):
            for node, accepted in result.draft.outcomes(result.token_ids):
                estimate = result.draft.accept_probs[node]
                outcomes.append(Outcome(draft.request_id, estimate, accepted))
            estimator.observe(draft.request_id, result)
            if last_step[draft.request_id] == at:
                estimator.finish(draft.request_id)
    return outcomes


def _calibrated(draft: LoggedDraft, estimator: Estimator) -> DraftTree:
    trees = [replace(tree) for tree in draft.trees]
    for tree in trees:
        estimator.calibrate(draft.request_id, tree)
    return merge(trees)


def as_if_verified(tree: DraftTree, result: VerifyResult) -> VerifyResult:
    """What verification would have said, had all that was drafted been verified.

    The target's tokens do not depend on that, so every node below the emitted path is labelled.
    """
    tokens = result.token_ids
    path = [0, *[node + 1 for node in tree.follow(tokens[:-1])]]
    return VerifyResult(path, tokens[: len(path)], (), tree)


@dataclass(slots=True)
class Bin:
    """Estimates that lie in one tenth of 0..1 and whose outcome is known.

    Attributes:
        num_right: of ``count``, those that came true.
        expected: the sum of the estimates.
    """

    count: int = 0
    num_right: int = 0
    expected: float = 0.0

    @property
    def estimate(self) -> float:
        """The mean; only of a bin that is not empty, as is :attr:`accepted`."""
        return self.expected / self.count

    @property
    def accepted(self) -> float:
        return self.num_right / self.count


def reliability(outcomes: Iterable[tuple[float, bool]]) -> list[Bin]:
    """All :data:`NUM_BINS` bins over estimates, each with whether it came true."""
    bins = [Bin() for _ in range(NUM_BINS)]
    for estimate, is_right in outcomes:
        each = bins[min(int(estimate * NUM_BINS), NUM_BINS - 1)]
        each.count += 1
        each.num_right += is_right
        each.expected += estimate
    return bins


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean over estimates of their bin's deviation."""
    count = sum(each.count for each in bins)
    return sum(abs(each.expected - each.num_right) for each in bins) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class Scores:
    """How good estimates are; lower is better.

    Attributes:
        log_loss: in nats per label.
        brier: mean squared error.
        calibration_error: as :func:`calibration_error` says.
        bins: of the reliability diagram, those without labels left out.
    """

    count: int
    log_loss: float
    brier: float
    calibration_error: float
    bins: Sequence[Bin]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; each bin is a list of its count, its mean estimate and its share."""
        bins = [[each.count, each.estimate, each.accepted] for each in self.bins]
        return {**asdict(self), "bins": bins}


def compare(log: Log, estimators: Estimators) -> dict[str, list[Outcome]]:
    """What each estimator says of every labelled node of a log, by its name."""
    return {name: replay(log, make()) for name, make in estimators.items()}


def score(outcomes: Sequence[Outcome]) -> Scores:
    """Scores of one or more labels."""
    loss = brier = 0.0
    for outcome in outcomes:
        prob = outcome.estimate
        loss -= log(max(prob if outcome.accepted else 1.0 - prob, LEAST_LOSS_PROB))
        brier += (outcome.accepted - prob) ** 2
    bins = reliability((each.estimate, each.accepted) for each in outcomes)
    count = len(outcomes)
    filled = [each for each in bins if each.count]
    return Scores(count, loss / count, brier / count, calibration_error(bins), filled)
