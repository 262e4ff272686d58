"""How much of what chosen drafts promise they keep. Knows no proposer and no cost.

Estimates that are right on average are too high where they were chosen for being high. So what a
draft is expected to bring is multiplied by what the latest drafts brought over what they promised,
as far as they fell short of it beyond chance. What they did is forgotten as steps pass, so that
nothing is believed for ever that stops drafts.
"""

from __future__ import annotations

import math

MEMORY = 0.995
"""Weight of the past in each step: about two hundred of them."""
TRUST = 8.0
"""Tokens that are always taken to have been kept as promised."""
DOUBT = 2.0
"""Standard deviations of the number of accepted tokens that are put down to chance."""


class Promise:
    """Tokens that drafts promised, and those of them that the target accepted."""

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0

    @property
    def kept(self) -> float:
        """What may have been accepted at most over what was promised; at most 1."""
        most = self._accepted + DOUBT * math.sqrt(self._accepted + 1.0)
        return min(1.0, (most + TRUST) / (self._promised + TRUST))

    def observe(self, promised: float, accepted: int) -> None:
        """Take in one verified draft; ``promised`` sums the path probabilities of its nodes."""
        self._promised += promised
        self._accepted += accepted

    def passed(self, num_steps: int) -> None:
        """Let steps pass."""
        past = MEMORY**num_steps
        self._promised *= past
        self._accepted *= past
