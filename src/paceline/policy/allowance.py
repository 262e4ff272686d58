"""Time that may be spent on what does not pay at once: a share of all time. Knows no purpose."""

from __future__ import annotations

SAVED = 4
"""Uses that can be saved up for a time when they are needed."""


class Allowance:
    """Milliseconds that are there to be spent.

    Args:
        share: of the time that passes.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved_ms = 0.0
        self._dearest_ms = 0.0  # use that was asked for so far

    def covers(self, cost_ms: float) -> bool:
        """Whether so much is there."""
        if cost_ms > self._dearest_ms:
            self._dearest_ms = cost_ms
        return self._saved_ms >= cost_ms

    def spend(self, cost_ms: float) -> None:
        """Take so much out, covered or not."""
        self._saved_ms -= cost_ms

    def milliseconds_until(self, cost_ms: float) -> float:
        """Time that has to pass before so much is there."""
        return (cost_ms - self._saved_ms) / self._share

    def passed(self, milliseconds: float) -> None:
        """Let time pass."""
        share = self._share * milliseconds
        most = SAVED * (self._dearest_ms if self._dearest_ms > share else share)
        saved = self._saved_ms + share
        self._saved_ms = saved if saved < most else most
