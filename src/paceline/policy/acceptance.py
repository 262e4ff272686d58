"""How likely draft nodes are to be accepted, learnt from what the target made of others like them.

A proposer's own estimate was fitted to other text and other models. Here the log-odds of a node are
those of its estimate by a prior, taken times a slope, plus an offset, plus a correction. Slope and
offset are of the request and the proposer and follow its text within some tokens; the correction is
of the node's cell (:mod:`paceline.policy.evidence`), which all requests share, and moves slowly.
All of them descend the gradient of the log-loss. Of a merged tree each proposer learns from every
node that it named.

Labels are censored: which token the target chose is known after nodes of the accepted path alone,
so exactly the children of those are labelled. The native ``Calibration`` estimates and learns the
same. Knows no proposer, no model and no cost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import exp

from paceline.policy.evidence import (
    CELLS_PER_ORIGIN,
    MAX_DEPTH,
    ORIGIN_SHIFT,
    STEPS,
    Row,
    logits_of,
    rows_of,
)
from paceline.policy.fit import Fit
from paceline.request import VerifyResult
from paceline.span import DraftTree

logger = logging.getLogger(__name__)

# Chosen on the prompts that the priors are fitted to.
CELL_RATE = 0.02
SHRINKAGE = 0.05
"""How strongly a correction is drawn back to none; it also bounds the correction."""


class Calibration:
    """See the module's docstring. Requests are told apart by their ids.

    Attributes:
        num_invalid: estimates of proposers that were not in 0..1, or no numbers.
    """

    def __init__(self) -> None:
        self.num_invalid = 0
        self._numbers: dict[str, int] = {}
        self._rows: list[list[Row]] = []  # by origin's number, then depth
        self._corrections: list[float] = []  # by cell
        self._logits: list[float] = []  # by cell
        self._fits: dict[int, list[Fit]] = {}  # by request, then origin's number

    def calibrate(self, request_id: int, tree: DraftTree) -> None:
        """Replace a tree's estimates in place, and fill in its evidence.

        Siblings' estimates sum to at most 1 afterwards.
        """
        probs = tree.accept_probs
        if not probs:
            return
        # A sum is not a number if one of its terms is not; min and max overlook that.
        if not (min(probs) >= 0.0 and max(probs) <= 1.0 and sum(probs) >= 0.0):
            probs = self._clamped(probs)
        depths = tree.depths()
        corrections = self._corrections
        evidence, calibrated, known = [], [], None
        for origin, depth, prob in zip(tree.origins, depths, probs, strict=True):
            if origin is not known:
                known, (rows, fit) = origin, self._of(request_id, origin)
                offset, slope = fit.offset, fit.slope
            row = rows[depth] if depth < MAX_DEPTH else rows[MAX_DEPTH]
            cell, logit = row[int(prob * STEPS)]
            evidence.append(cell)
            calibrated.append(1.0 / (1.0 + exp(-slope * logit - offset - corrections[cell])))
        tree.evidence, tree.accept_probs = evidence, calibrated
        if depths[-1] < len(depths):  # it branches
            limit_siblings(tree)

    def estimate(self, request_id: int, origin: str, depth: int, prob: float) -> float:
        """What :meth:`calibrate` would make of one node that a proposer gives ``prob``."""
        if not 0.0 <= prob <= 1.0:
            prob = self._clamped([prob])[0]
        rows, fit = self._of(request_id, origin)
        row = rows[depth] if depth < MAX_DEPTH else rows[MAX_DEPTH]
        cell, logit = row[int(prob * STEPS)]
        return 1.0 / (1.0 + exp(-fit.slope * logit - fit.offset - self._corrections[cell]))

    @property
    def num_requests(self) -> int:
        """Requests of which something was learnt that have not finished."""
        return len(self._fits)

    def observe(self, request_id: int, result: VerifyResult) -> None:
        """Learn from the labelled nodes of a draft that was verified."""
        self.learn(request_id, result.draft, result.token_ids)

    def learn(self, request_id: int, tree: DraftTree, token_ids: Sequence[int]) -> None:
        """Learn from a tree that was calibrated, and perhaps merged, whatever was verified of it.

        Args:
            token_ids: what the target emitted in place of it; that does not depend on drafts.
        """
        if not tree.evidence:
            return
        outcomes = tree.outcomes(token_ids)
        if tree.claims:
            claims = tree.claims
            errors = [
                (cell, outcome - prob) for node, outcome in outcomes for cell, prob in claims[node]
            ]
        else:
            evidence, probs = tree.evidence, tree.accept_probs
            errors = [(evidence[node], outcome - probs[node]) for node, outcome in outcomes]
        self._descend(request_id, errors)

    def _descend(self, request_id: int, errors: Sequence[tuple[int, float]]) -> None:
        """Take in the outcomes of labelled nodes less the estimates, each with its cell."""
        corrections, logits = self._corrections, self._logits
        sums: dict[int, list[float]] = {}
        known = -1
        for cell, error in errors:
            corrections[cell] += CELL_RATE * (error - SHRINKAGE * corrections[cell])
            number = cell >> ORIGIN_SHIFT
            if number != known:
                known = number
                found = sums.get(number) or sums.setdefault(number, [0.0, 0.0, 0.0, 0.0])
            logit = logits[cell]
            found[0] += 1.0
            found[1] += error
            found[2] += error * logit
            found[3] += logit * logit
        fits = self._fits_of(request_id)
        for number, found in sums.items():
            fits[number].learn(*found)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._fits.pop(request_id, None)

    def _of(self, request_id: int, origin: str) -> tuple[list[Row], Fit]:
        number = self._numbers.get(origin)
        if number is None:
            number = self._register(origin)
        fits = self._fits.get(request_id)
        if fits is None or len(fits) <= number:
            fits = self._fits_of(request_id)
        return self._rows[number], fits[number]

    def _fits_of(self, request_id: int) -> list[Fit]:
        """What was learnt of a request, for every origin that is known."""
        fits = self._fits.setdefault(request_id, [])
        fits += [Fit() for _ in self._rows[len(fits) :]]
        return fits

    def _register(self, origin: str) -> int:
        number = self._numbers[origin] = len(self._numbers)
        self._rows.append(rows_of(origin, number))
        self._logits += logits_of(self._rows[number])
        self._corrections += [0.0] * CELLS_PER_ORIGIN
        return number

    def _clamped(self, probs: Sequence[float]) -> list[float]:
        invalid = [prob for prob in probs if not 0.0 <= prob <= 1.0]
        if not self.num_invalid:
            warn_of_invalid(invalid[0])
        self.num_invalid += len(invalid)
        return [min(prob, 1.0) if prob >= 0.0 else 0.0 for prob in probs]


def warn_of_invalid(prob: float) -> None:
    """Log an estimate that is none; once per calibration."""
    logger.warning("a proposer estimates acceptance at %r: clamped to 0..1", prob)


def limit_siblings(tree: DraftTree) -> None:
    """Scale siblings' estimates down where they sum to more than 1."""
    probs, parents = tree.accept_probs, tree.parents
    total = [0.0] * (len(probs) + 1)  # by parent; the last place is that of ROOT, which is -1
    for parent, prob in zip(parents, probs, strict=True):
        total[parent] += prob
    if max(total) > 1.0:
        tree.accept_probs = [
            prob / max(1.0, total[parent]) for parent, prob in zip(parents, probs, strict=True)
        ]
