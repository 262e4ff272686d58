"""Ways to turn proposers' estimates into probabilities, for comparison with the one that is kept.

Each learns online, as an engine would let it; none but :class:`~paceline.planner.acceptance.
Calibration` is used by one. Knows neither engines nor how estimates are judged.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, log

from research.scores import Estimators

from paceline.planner.acceptance import Calibration
from paceline.planner.priors import depth_range
from paceline.request.request import VerifyResult
from paceline.request.span import DraftTree

AS_PROPOSED = "as proposed"
KEPT = "calibration"
EDGES = (-3.0, -2.0, -1.25, -0.6, 0.0, 0.6, 1.25, 2.0, 2.75, 3.5, 4.5)
"""Log-odds of a proposer's estimate between its buckets."""
LEAST_PROB = 0.002
"""Probabilities nearer to 0 or 1 than this have their log-odds."""


@dataclass(frozen=True, slots=True)
class Node:
    """A draft node as an estimator sees it; ``prob`` is the proposer's own estimate."""

    request_id: int
    origin: str
    depth: int
    prob: float

    @property
    def logit(self) -> float:
        return logit(self.prob)

    @property
    def place(self) -> tuple[str, int]:
        """Origin and range of depths."""
        return self.origin, depth_range(self.depth)

    @property
    def cell(self) -> tuple[str, int, int]:
        """Origin, range of depths and bucket of the proposer's estimate."""
        return *self.place, bisect_right(EDGES, self.logit)


def logit(prob: float) -> float:
    prob = min(max(prob, LEAST_PROB), 1.0 - LEAST_PROB)
    return log(prob / (1.0 - prob))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + exp(-min(max(x, -30.0), 30.0)))


class NodeEstimator:
    """An estimator that judges every node by itself. As it stands it believes the proposer."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []  # the origins of an estimated tree are places in here

    def estimate(self, node: Node) -> float:
        """Probability that the node is accepted once its parent is."""
        return node.prob

    def learn(self, node: Node, estimate: float, accepted: bool) -> None:
        """Take in what became of a node that was given this estimate."""

    def calibrate(self, request_id: int, tree: DraftTree) -> None:
        first = len(self._nodes)
        for origin, depth, prob in zip(tree.origins, tree.depths(), tree.accept_probs, strict=True):
            self._nodes.append(Node(request_id, origin, depth, prob))
        tree.origins = [str(place) for place in range(first, len(self._nodes))]
        tree.accept_probs = [self.estimate(node) for node in self._nodes[first:]]

    def observe(self, request_id: int, result: VerifyResult) -> None:
        draft = result.draft
        for place, accepted in draft.outcomes(result.token_ids):
            for origin, prob in draft.claims_of(place):
                self.learn(self._nodes[int(origin)], prob, accepted)

    def finish(self, request_id: int) -> None: ...


class BetaCounts(NodeEstimator):
    """Decayed counts of accepted nodes per cell, beside pseudo-counts of the prior.

    Args:
        by_request: count per request too, with the shared counts as the prior.
    """

    PRIOR_WEIGHT = 8.0
    DECAY = 0.998
    REQUEST_WEIGHT = 12.0
    REQUEST_DECAY = 0.97

    def __init__(self, by_request: bool = False) -> None:
        super().__init__()
        self._by_request = by_request
        self._shared: dict[object, tuple[float, float]] = {}
        self._own: dict[object, tuple[float, float]] = {}

    def estimate(self, node: Node) -> float:
        accepted, count = self._shared.get(node.cell, (0.0, 0.0))
        shared = (accepted + self.PRIOR_WEIGHT * node.prob) / (count + self.PRIOR_WEIGHT)
        if not self._by_request:
            return shared
        accepted, count = self._own.get((node.request_id, node.cell), (0.0, 0.0))
        return (accepted + self.REQUEST_WEIGHT * shared) / (count + self.REQUEST_WEIGHT)

    def learn(self, node: Node, estimate: float, accepted: bool) -> None:
        key = (node.request_id, node.cell)
        for counts, place, decay in (
            (self._shared, node.cell, self.DECAY),
            (self._own, key, self.REQUEST_DECAY),
        ):
            before, count = counts.get(place, (0.0, 0.0))
            counts[place] = before * decay + accepted, count * decay + 1.0


class LogisticOnMargin(NodeEstimator):
    """sigmoid(slope * log-odds + intercept) per origin and range of depths, by gradient descent.

    The log-odds of a draft model's softmax are its margin over the other candidates.
    """

    RATE = 0.04
    SLOPE_RATE = 0.012

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, int], tuple[float, float]] = {}

    def estimate(self, node: Node) -> float:
        slope, intercept = self._lines.get(node.place, (1.0, 0.0))
        return sigmoid(slope * node.logit + intercept)

    def learn(self, node: Node, estimate: float, accepted: bool) -> None:
        slope, intercept = self._lines.get(node.place, (1.0, 0.0))
        error = accepted - estimate
        self._lines[node.place] = (
            slope + self.SLOPE_RATE * error * node.logit,
            intercept + self.RATE * error,
        )


class PowerOfEstimate(NodeEstimator):
    """The proposer's estimate to a power per origin and range of depths, by gradient descent."""

    RATE = 0.02
    MAX_LOG_POWER = 2.0
    MAX_GRADIENT = 3.0

    def __init__(self) -> None:
        super().__init__()
        self._log_powers: dict[tuple[str, int], float] = {}

    def estimate(self, node: Node) -> float:
        prob = min(max(node.prob, LEAST_PROB), 1.0 - LEAST_PROB)
        return float(prob ** exp(self._log_powers.get(node.place, 0.0)))

    def learn(self, node: Node, estimate: float, accepted: bool) -> None:
        log_power = self._log_powers.get(node.place, 0.0)
        prob = min(max(node.prob, LEAST_PROB), 1.0 - LEAST_PROB)
        against = 1.0 if accepted else -estimate / (1.0 - estimate)
        gradient = against * exp(log_power) * log(prob)
        gradient = min(max(gradient, -self.MAX_GRADIENT), self.MAX_GRADIENT)
        moved = log_power + self.RATE * gradient
        self._log_powers[node.place] = min(max(moved, -self.MAX_LOG_POWER), self.MAX_LOG_POWER)


@dataclass(slots=True)
class _Track:
    """Level and velocity of an offset to the log-odds, and their covariance."""

    level: float = 0.0
    velocity: float = 0.0
    level_variance: float = 0.3
    covariance: float = 0.0
    velocity_variance: float = 1e-4


class KalmanOnLogit(NodeEstimator):
    """An offset to the log-odds per request and proposer, with level and velocity.

    An extended Kalman filter: a label is a measurement of the logit with the Bernoulli variance.
    """

    LEVEL_NOISE = 0.005
    VELOCITY_NOISE = 1e-5
    DAMPING = 0.9

    def __init__(self) -> None:
        super().__init__()
        self._tracks: dict[tuple[int, str], _Track] = {}

    def estimate(self, node: Node) -> float:
        track = self._tracks.get((node.request_id, node.origin))
        return sigmoid(node.logit + (track.level if track else 0.0))

    def learn(self, node: Node, estimate: float, accepted: bool) -> None:
        track = self._tracks.setdefault((node.request_id, node.origin), _Track())
        self._predict(track)
        variance = max(estimate * (1.0 - estimate), LEAST_PROB)
        gain = 1.0 / (1.0 + variance * track.level_variance)
        error = (accepted - estimate) * gain
        track.level += track.level_variance * error
        track.velocity += track.covariance * error
        shrink = variance * gain
        track.velocity_variance -= shrink * track.covariance**2
        track.covariance -= shrink * track.covariance * track.level_variance
        track.level_variance -= shrink * track.level_variance**2

    def _predict(self, track: _Track) -> None:
        """Let one label's time pass."""
        track.level += track.velocity
        track.velocity *= self.DAMPING
        track.level_variance += 2.0 * track.covariance + track.velocity_variance + self.LEVEL_NOISE
        track.covariance = self.DAMPING * (track.covariance + track.velocity_variance)
        track.velocity_variance = self.DAMPING**2 * track.velocity_variance + self.VELOCITY_NOISE

    def finish(self, request_id: int) -> None:
        for key in [key for key in self._tracks if key[0] == request_id]:
            del self._tracks[key]


ALL: Estimators = {
    AS_PROPOSED: NodeEstimator,
    "Beta counts": BetaCounts,
    "Beta counts, by request": lambda: BetaCounts(by_request=True),
    "logistic on margin": LogisticOnMargin,
    "Kalman on logit": KalmanOnLogit,
    "power": PowerOfEstimate,
    KEPT: Calibration,
}
"""By the names that the tables of results have."""
