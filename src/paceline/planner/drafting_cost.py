"""What drafting costs. Owns the times of each proposer: per call, per level, per token it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PACE = 0.1
"""Weight of the latest measurement."""
MOST = 3.0
"""A measurement counts as at most this many times the expected one: the machine may have paused."""
USUAL_LAG = 16
"""Tokens that a proposer lacks after a step; more than that is catching up."""


@dataclass(slots=True)
class DraftTime:
    """Times of one proposer in milliseconds.

    Attributes:
        call: of asking it for all requests of a step together, first level included.
        level: of each further level of its trees; 0 for one whose time does not depend on them.
        token: of each token that it has to catch up with beyond :data:`USUAL_LAG`.
    """

    call: float = 0.0
    level: float = 0.0
    token: float = 0.0


UNKNOWN = DraftTime()
"""Of a proposer that was not timed; shared, so never written to."""


class DraftingCost:
    """Times of all proposers, by name, as they are learnt; or as they are known."""

    def __init__(self, known: Mapping[str, DraftTime] | None = None) -> None:
        self._times: dict[str, DraftTime] = {n: replace(t) for n, t in (known or {}).items()}
        self._calls: dict[str, int] = {}

    def of(self, name: str) -> DraftTime:
        return self._times.get(name, UNKNOWN)

    def milliseconds(self, name: str, num_levels: int = 1) -> float:
        """Time of one call that drafts so many levels and has nothing to catch up with."""
        time = self._times.get(name, UNKNOWN)
        return time.call + time.level * (num_levels - 1) if num_levels > 1 else time.call

    def catch_up(self, name: str, lag: int) -> float:
        """Time in which a proposer reads what it lacks beyond the usual."""
        return self.of(name).token * lag if lag > USUAL_LAG else 0.0

    def observe(
        self, name: str, num_levels: int, lag: int, milliseconds: float, has_levels: bool
    ) -> None:
        """Learn from one call.

        Args:
            lag: tokens that its requests lacked together beyond the usual, 0 for none.
            has_levels: each level takes a forward; without, the time does not depend on them.
        """
        if milliseconds <= 0.0:
            return
        count = self._calls[name] = self._calls.get(name, 0) + 1
        if count == 1:  # first calls are slow in every program, by any factor
            return
        time = self._times.get(name)
        if time is None:
            time = self._times[name] = DraftTime()
        levels = num_levels if has_levels else 1
        expected = self.milliseconds(name, levels)
        if lag:
            each = max(0.0, milliseconds - expected) / lag
            each = min(each, MOST * time.token) if time.token else each
            time.token += (0.5 if time.token else 1.0) * (each - time.token)
            return
        if expected == 0.0:
            time.call = milliseconds / levels
            time.level = time.call if has_levels else 0.0
            return
        pace = max(PACE, 1 / count)
        error = pace * (min(milliseconds, MOST * expected) - expected)
        time.call += error * time.call / expected  # each as far as it contributed
        time.level += error * time.level / expected
