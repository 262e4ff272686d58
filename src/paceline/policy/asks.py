"""One proposer's draft for one request in a step, as it is decided and booked. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.policy.accounts import Key
from paceline.request import Request
from paceline.span import DraftTree


@dataclass(slots=True)
class Ask:
    """One proposer's draft for one request in a step.

    Attributes:
        key: the account that it goes by.
        index: the request's place in the step.
        lag: tokens that the proposer has to catch up with, where they are more than usual.
        candidates: requests for which the proposer could have been asked.
        cost_ms: its part of the drafting time, were all of these asked: who shares a call with few
            is not to be charged for those who do not.
        gain: what the chosen nodes promise beyond the time in which they are verified, in tokens.
    """

    key: Key
    index: int
    request: Request
    lag: int
    candidates: int
    cost_ms: float = 0.0
    gain: float = 0.0

    def credit(self, tree: DraftTree, probs: Sequence[float], price: float) -> None:
        """Note what the proposer's chosen nodes promise; each takes time worth ``price`` tokens.

        Args:
            tree: of the chosen nodes, whosever they are.
            probs: of its paths.
        """
        name = self.key[0]
        count = tree.origins.count(name)
        if count < len(probs):  # some are another's
            pairs = zip(probs, tree.origins, strict=True)
            probs = [prob for prob, origin in pairs if origin == name]
        self.gain = sum(probs) - price * count


def asks_for_drafts(request: Request) -> bool:
    """Whether it says itself how much is to be drafted, so that nobody else decides it."""
    wish = request.params.speculative
    return wish.enabled and bool(wish.num_speculative_tokens)


def delays(asks: Sequence[Ask], requests: Sequence[Request]) -> bool:
    """Whether drafting holds up requests for whom nothing is drafted, and nobody insists on it."""
    return len(asks) < len(requests) and not any(asks_for_drafts(a.request) for a in asks)
