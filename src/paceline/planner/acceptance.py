"""How likely draft nodes are to be accepted, learnt from what the target made of similar ones.

A proposer's own estimate was fitted to other text and other models. Here the log-odds of a node are
those of its estimate by a prior (:mod:`paceline.planner.priors`), plus two offsets: one of the
request and the proposer, which follows the text within some tokens, and one of the proposer, which
moves slowly and which all requests of an adapter share, or all that have none. Both descend the
gradient of the log-loss.

Which token the target chose is known only after nodes of the accepted path, so exactly the children
of those are labelled. The native ``Calibration`` estimates and learns the same. Estimates that are
right on average are too high where nodes were chosen for them, which :class:`Promise` corrects.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import exp, sqrt

from paceline.planner.priors import STEPS, logits_of
from paceline.request.span import DraftTree

logger = logging.getLogger(__name__)
OFFSET_RATE = 0.1
DRIFT_RATE = 0.08
"""The drift is a mean error over about the inverse of this, in labelled nodes."""
HASTE = 6.0
"""How much faster the offset moves per squared unit of drift. Chance alone drifts by a tenth, so
errors that keep one sign are no accident, and a change of text is followed within 32 tokens."""
MAX_OFFSET = 8.0
SHARED_RATE = 0.02
SHRINKAGE = 0.05
"""How strongly the shared offset is drawn back to zero, which also bounds it."""
PROMISE_TRUST = 8.0
"""Tokens that are always taken to have been kept as promised."""


class Calibration:
    """The estimates of all requests and proposers. Requests are known by their ids.

    Attributes:
        num_invalid: estimates of proposers that were not in 0..1, or no numbers.
    """

    def __init__(self) -> None:
        self.num_invalid = 0
        self._shared: dict[str | None, dict[str, float]] = {None: {}}  # by adapter, then origin
        self._adapters: dict[int, str] = {}  # of requests that have one
        self._own: dict[int, dict[str, Offset]] = {}  # by request, then origin

    def adapt(self, request_id: int, adapter: str) -> None:
        """Say which adapter a request has. A new adapter begins with what requests without one
        share."""
        self._adapters[request_id] = adapter
        if adapter not in self._shared:
            self._shared[adapter] = dict(self._shared[None])

    def calibrate(self, request_id: int, tree: DraftTree) -> None:
        """Replace a tree's estimates in place."""
        probs = tree.accept_probs
        if not probs:
            return
        # A sum is not a number if one of its terms is not; min and max overlook that.
        if not (min(probs) >= 0.0 and max(probs) <= 1.0 and sum(probs) >= 0.0):
            probs = self._clamped(probs)
        known = zip(tree.origins, tree.depths(), probs, strict=True)
        tree.accept_probs = [self._probability(request_id, *node) for node in known]

    def estimate(self, request_id: int, origin: str, depth: int, prob: float) -> float:
        """What :meth:`calibrate` would make of one node that a proposer gives ``prob``."""
        if not 0.0 <= prob <= 1.0:
            prob = self._clamped([prob])[0]
        return self._probability(request_id, origin, depth, prob)

    def _probability(self, request_id: int, origin: str, depth: int, prob: float) -> float:
        logits = logits_of(origin)
        logit = logits[min(depth, len(logits) - 1)][int(prob * STEPS)]
        own = self._own.get(request_id, {}).get(origin)
        offset = 0.0 if own is None else own.value
        return 1.0 / (1.0 + exp(-logit - offset - self._shared_by(request_id).get(origin, 0.0)))

    def _shared_by(self, request_id: int) -> dict[str, float]:
        return self._shared[self._adapters.get(request_id)]

    @property
    def num_requests(self) -> int:
        """Requests of which something was learnt that have not finished."""
        return len(self._own)

    def learn(self, request_id: int, tree: DraftTree, token_ids: Sequence[int]) -> None:
        """Learn from a tree that was calibrated, and perhaps merged, whatever was verified of it.

        Args:
            token_ids: what the target emitted in place of it; that does not depend on drafts.
        """
        sums: dict[str, list[float]] = {}  # by origin: labels, and the sum of their errors
        all_shared = self._shared_by(request_id)
        for node, outcome in tree.outcomes(token_ids):
            for origin, error in _shares(tree, node, outcome - tree.accept_probs[node]):
                shared = all_shared.get(origin, 0.0)
                all_shared[origin] = shared + SHARED_RATE * (error - SHRINKAGE * shared)
                of_origin = sums.setdefault(origin, [0.0, 0.0])
                of_origin[0] += 1.0
                of_origin[1] += error
        for origin, (count, error) in sums.items():
            self._own.setdefault(request_id, {}).setdefault(origin, Offset()).learn(count, error)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._own.pop(request_id, None)
        self._adapters.pop(request_id, None)

    def _clamped(self, probs: Sequence[float]) -> list[float]:
        invalid = [prob for prob in probs if not 0.0 <= prob <= 1.0]
        if not self.num_invalid:
            warn_of_invalid(invalid[0])
        self.num_invalid += len(invalid)
        return [min(prob, 1.0) if prob >= 0.0 else 0.0 for prob in probs]


class Offset:
    """What one text adds to the log-odds of one proposer's nodes."""

    __slots__ = ("drift", "value")

    def __init__(self) -> None:
        self.value = self.drift = 0.0

    def learn(self, count: float, error: float) -> None:
        """Take in ``count`` labelled nodes; ``error`` sums outcomes less estimates."""
        self.drift = (self.drift + DRIFT_RATE * error) / (1.0 + DRIFT_RATE * count)
        rate = OFFSET_RATE + HASTE * (self.drift * self.drift)
        # The second derivative of the log-loss of a label by its log-odds is 1/4 at most. A draft's
        # labels arrive together, and a step to the minimum of such a parabola cannot overshoot.
        value = self.value + rate * error / (1.0 + rate * 0.25 * count)
        self.value = min(max(value, -MAX_OFFSET), MAX_OFFSET)


def _shares(tree: DraftTree, node: int, error: float) -> list[tuple[str, float]]:
    """The part of a node's error that each proposer that named it has."""
    if not tree.claims:
        return [(tree.origins[node], error)]
    total = 0.0  # from Python 3.12 on sum() rounds otherwise than C++
    for _, prob in tree.claims[node]:
        total += prob
    return [(origin, error * prob / total) for origin, prob in tree.claims[node]]


def warn_of_invalid(prob: float) -> None:
    """Log an impossible estimate; called once per calibration."""
    logger.warning("a proposer estimates acceptance at %r: clamped to 0..1", prob)


class Promise:
    """Tokens that chosen drafts promised, and those of them that the target accepted.

    What a draft is expected to bring is multiplied by what the latest drafts brought over what they
    promised, if they fell short of it beyond chance. This is forgotten as steps pass, so that
    nothing is believed for ever that stops drafts.
    """

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0

    @property
    def kept(self) -> float:
        """An upper bound of what was accepted over what was promised, two standard deviations above
        what was counted; at most 1."""
        most = self._accepted + 2.0 * sqrt(self._accepted + 1.0)
        return min(1.0, (most + PROMISE_TRUST) / (self._promised + PROMISE_TRUST))

    def observe(self, promised: float, accepted: int) -> None:
        """Take in one verified draft; ``promised`` sums the path probabilities of its nodes."""
        self._promised += promised
        self._accepted += accepted

    def passed(self, num_steps: int) -> None:
        """Let steps pass; about two hundred are remembered."""
        past = 0.995**num_steps
        self._promised *= past
        self._accepted *= past
