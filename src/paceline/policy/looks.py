"""When a step may be wider than seems to pay, and what such looks cost. Owns their rarity.

A look is paid from a share of the time at the milliseconds by which it is predicted to be longer.
One that confirms the prediction makes looks that are no dearer twice as rare. One that refutes it
is charged what it took, and another one is to follow at once: a cost model does not believe the
first surprise alone. Knows neither trees nor who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.policy.allowance import Allowance

SHARE = 0.004
"""Share of the time that looks may take while nothing confirms what they are predicted to take."""
RAREST = 16
"""Looks become rarer by this factor at most."""
TOLERANCE = 0.15
"""Part of its time by which a step may be off the prediction without refuting it."""
PAUSE = 16
"""Plain steps from one thought of a look to the next."""
LONGEST_PAUSE = 10_000
"""Plain steps between two thoughts whose time counts at most, against clocks that jump."""
PRESSING = 4
"""Steps within which a look that refuted is to be followed by a thought of another one."""


@dataclass(frozen=True, slots=True)
class _Look:
    """A wide step that is running.

    Attributes:
        nodes: that it has.
        plain_ms, forward_ms: predicted of the forward without them, and with them.
        price_ms: what the look is charged if it takes as long as predicted.
        rarity: of such looks.
    """

    nodes: int
    plain_ms: float
    forward_ms: float
    price_ms: float
    rarity: int

    @property
    def dearness(self) -> float:
        return self.forward_ms / self.plain_ms


class Looks:
    """See the module's docstring.

    Attributes:
        most_nodes: of the latest look that refuted what was predicted.
    """

    def __init__(self) -> None:
        self.most_nodes = 0
        self._pressing = 0  # steps
        self._allowance = Allowance(SHARE)
        self._rarity = 1
        self._confirmed = 0.0  # so many plain steps' time looks take that the rarity is of, at most
        self._passed_ms = self._pause_ms = 0.0  # since the latest thought, and how long that lasts
        self._look: _Look | None = None

    @property
    def is_pressing(self) -> bool:
        """Whether a look has just refuted what was predicted, and another one is to follow."""
        return self._pressing > 0

    @property
    def is_due(self) -> bool:
        """Whether to think of a look, which takes as long as another choice."""
        return self.is_pressing or not self._passed_ms < self._pause_ms

    def passed(self, milliseconds: float) -> None:
        """Let time pass."""
        self._passed_ms += milliseconds

    def pause(self, plain_ms: float) -> None:
        """Think of no look for some plain steps."""
        if self._passed_ms > 0.0:  # which NaN is not
            self._allowance.passed(min(self._passed_ms, LONGEST_PAUSE * plain_ms))
        self._passed_ms, self._pause_ms, self._pressing = 0.0, PAUSE * plain_ms, 0

    def are_covered(self, dearness: float, cost_ms: float) -> bool:
        """Whether there is time for a look that takes so many plain steps' time, so much longer."""
        return self._allowance.covers(self._rarity_of(dearness) * cost_ms)

    def _rarity_of(self, dearness: float) -> int:
        return self._rarity if dearness <= (1.0 + TOLERANCE) * self._confirmed else 1

    def spend(self, milliseconds: float) -> None:
        """Take out what was drafted for a look alone."""
        self._allowance.spend(milliseconds)

    def begin(self, nodes: int, forward: Sequence[float], cost_ms: float) -> None:
        """The step that begins is a look.

        Args:
            nodes: that it has.
            forward: predicted milliseconds of a forward with 0, 1, 2, ... nodes.
            cost_ms: by how much it is predicted to be longer than what would be chosen.
        """
        rarity = self._rarity_of(forward[nodes] / forward[0])
        self._look = _Look(nodes, forward[0], forward[nodes], rarity * cost_ms, rarity)

    def end(self, nodes: int, forward_ms: float) -> None:
        """A planned step is over; so is the look, if it was one.

        Args:
            nodes: that it had in the end.
            forward_ms: measured.
        """
        look, self._look = self._look, None
        self._pressing -= 1 if self._pressing else 0
        if look is None or nodes != look.nodes:
            return
        if 0.0 < forward_ms < (1.0 - TOLERANCE) * look.forward_ms:
            self._allowance.spend(max(0.0, forward_ms - look.plain_ms))
            self._rarity, self._confirmed = 1, 0.0
            self._pressing, self.most_nodes = PRESSING, look.nodes
        else:
            self._allowance.spend(look.price_ms)
            self._rarity = min(2 * look.rarity, RAREST)
            self._confirmed = max(self._confirmed, look.dearness)
