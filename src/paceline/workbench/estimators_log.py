"""Drafts logged from an engine with what became of them, and their replay through an estimator.

Every estimate is made before the label that it is judged by is learnt, in the order in which an
engine asked and learnt. Knows no estimator's inside and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.policy.cost_points import StepShape
from paceline.policy.merging import merge
from paceline.policy.planner import Drafts, FixedPlanner, Source
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree


class Estimator(Protocol):
    """What :class:`~paceline.policy.acceptance.Calibration` offers, and means by it."""

    def calibrate(self, request_id: int, tree: DraftTree) -> None: ...

    def observe(self, request_id: int, result: VerifyResult) -> None: ...

    def finish(self, request_id: int) -> None: ...


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


class Recorder(FixedPlanner):
    """Has everybody draft and everything verified, and keeps a log of it."""

    def __init__(self) -> None:
        self.log: list[list[LoggedDraft]] = []
        self._requests: Sequence[Request] = ()
        self._trees: dict[int, list[DraftTree]] = {}

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._requests, self._trees = requests, {}
        self.log.append([])
        return 0

    def ask(self, source: Source, candidates: Sequence[int], drafts: Drafts) -> list[int]:
        return list(candidates)

    def drafted(
        self, source: Source, chosen: Sequence[int], trees: Sequence[DraftTree], milliseconds: float
    ) -> None:
        for index, tree in zip(chosen, trees, strict=True):
            if len(tree):
                request_id = self._requests[index].request_id
                self._trees.setdefault(request_id, []).append(replace(tree))

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
