"""How well acceptance is estimated: the scores of estimators on one log.

Knows no engine and no file.

Along recorded answers drafts are verified whatever they cost, and what the answers say next labels
their nodes, for each proposer and for all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log, pi, sqrt
from typing import Any

from paceline.policy.acceptance import Calibration, limit_siblings
from paceline.request import VerifyResult
from paceline.span import DraftTree
from paceline.workbench.estimators_log import Estimator, Log, Outcome, Recorder, replay
from paceline.workbench.reliability import Bin, calibration_error, reliability
from paceline.workbench.simulate import Configs, Simulator

AS_PROPOSED = "as proposed"
KEPT = "calibration"
MAX_CALIBRATION_ERROR = 0.05
"""Expected calibration error that is aimed at."""
LEAST_LOSS_PROB = 0.001
"""A certainty that turns out wrong costs as much as this probability would."""
TOGETHER = "all together"


class AsProposed:
    """Believes the proposers."""

    def calibrate(self, request_id: int, tree: DraftTree) -> None:
        limit_siblings(tree)

    def observe(self, request_id: int, result: VerifyResult) -> None: ...

    def finish(self, request_id: int) -> None: ...


Estimators = Mapping[str, Callable[[], Estimator]]
ESTIMATORS: Estimators = {AS_PROPOSED: AsProposed, KEPT: Calibration}
"""What the proposers say themselves, and what planners make of it (:data:`KEPT`)."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How good estimates are; lower is better.

    Attributes:
        log_loss: in nats per label.
        brier: mean squared error.
        calibration_error: of :mod:`paceline.workbench.reliability`.
        bins: of the reliability diagram, those without labels left out.
    """

    count: int
    log_loss: float
    brier: float
    calibration_error: float
    bins: Sequence[Bin]

    @property
    def error_by_chance(self) -> float:
        """The calibration error that labels drawn with the estimated probabilities would show.

        About that: each bin by the normal approximation, with its mean estimate for all of it.
        """
        spread = sum(sqrt(each.count * each.estimate * (1.0 - each.estimate)) for each in self.bins)
        return sqrt(2.0 / pi) * spread / self.count

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; each bin is a list of its count, its mean estimate and its share."""
        bins = [[each.count, each.estimate, each.accepted] for each in self.bins]
        return {**asdict(self), "bins": bins}


def compare(log: Log, estimators: Estimators = ESTIMATORS) -> dict[str, list[Outcome]]:
    """What each estimator says of every labelled node of a log, by its name."""
    return {name: replay(log, make()) for name, make in estimators.items()}


def best_of(scores: Mapping[str, Scores]) -> str:
    """The name with the lowest log-loss; of equal ones the first."""
    return min(scores, key=lambda name: scores[name].log_loss)


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


def arms_of(configs: Configs) -> dict[str, Configs]:
    """Each proposer by itself under its method, and, of several, :data:`TOGETHER`."""
    methods = [config.method for config in configs]
    arms: dict[str, Configs] = {}
    for number, config in enumerate(configs, start=1):
        twins = methods.count(config.method) > 1
        arms[f"{config.method} ({number})" if twins else config.method] = (config,)
    return {**arms, TOGETHER: configs} if len(configs) > 1 else arms


def log_of(simulator: Simulator, configs: Configs) -> Log:
    """What proposers draft along the traces, and what the answers made of it.

    Raises:
        PacelineError: as a replay.
    """
    recorder = Recorder()
    simulator.run(configs, lambda cost, objective: recorder)
    return recorder.log


def compared(
    simulator: Simulator, configs: Configs, advance: Callable[[int], None] = lambda done: None
) -> dict[str, dict[str, Scores]]:
    """Scores by estimator for each of :func:`arms_of`; none at all where nothing was drafted.

    Args:
        configs: of the proposers, in the sizes in which they draft.
        advance: told how many arms are done.

    Raises:
        PacelineError: as a replay.
    """
    found: dict[str, dict[str, Scores]] = {}
    for name, each in arms_of(configs).items():
        outcomes = compare(log_of(simulator, each))
        found[name] = {key: score(labels) for key, labels in outcomes.items() if labels}
        advance(len(found))
    return found
