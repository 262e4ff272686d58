"""Time for choices that do not seem best, so that no estimate is believed for ever.

What was not seen for long may have become good. Exploring an estimate may cost a small part of the
time that has passed since that was last done: what is cheap to see again is seen soon, what is
dear seldom. Knows no estimates.
"""

from __future__ import annotations

from collections.abc import Hashable

SHARE = 0.004
"""Part of the time since it was last explored that exploring an estimate may cost."""
SAVED = 4
"""Of the dearest prices, how many can be saved up."""
LONGEST_MS = 1e6
"""Time that may pass at once; a clock that says more has jumped."""


class Exploration:
    """See the module's docstring. Estimates are told apart by any names."""

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._paid_until: dict[Hashable, float] = {}
        self._dearest_ms: dict[Hashable, float] = {}  # that was asked for

    def passed(self, milliseconds: float) -> None:
        """Let time pass; what no step takes does not count."""
        if 0.0 < milliseconds <= LONGEST_MS:
            self._now_ms += milliseconds

    def covers(self, what: Hashable, cost_ms: float) -> bool:
        """Whether exploring something may cost so much."""
        return self.milliseconds_until(what, cost_ms) <= 0.0

    def milliseconds_until(self, what: Hashable, cost_ms: float) -> float:
        """Time that has to pass before exploring something may cost so much."""
        if cost_ms > self._dearest_ms.get(what, 0.0):
            self._dearest_ms[what] = cost_ms
        return self._paid_until.get(what, 0.0) + self._pause_ms(cost_ms) - self._now_ms

    def spend(self, what: Hashable, cost_ms: float) -> None:
        """Something was explored. What was saved beyond some of the dearest prices is lost."""
        longest = SAVED * self._pause_ms(self._dearest_ms.get(what, 0.0))
        begun = max(self._paid_until.get(what, 0.0), self._now_ms - longest)
        self._paid_until[what] = begun + self._pause_ms(cost_ms)

    def _pause_ms(self, cost_ms: float) -> float:
        """Time that has to pass before so much is there for one estimate."""
        return cost_ms / SHARE
