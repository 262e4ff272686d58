"""How often a dead engine is started again, and after which pause. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Callable

STEADY_SECONDS = 300.0
"""An engine that has served so long has not died of its start: what came before is forgotten."""
LONGEST_PAUSE = 30.0


class Restarts:
    """The budget of restarts of one server.

    The first restart is at once, the second after a second, and each further one after twice the
    pause. An engine that serves for five minutes gives the whole budget back; time in which a model
    loads does not count, so that a slow start cannot hide that it dies again and again.

    Args:
        budget: most restarts in a row; 0 is none.
        clock: seconds.
    """

    def __init__(self, budget: int = 5, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.num_used = 0
        self._clock = clock
        self._serves_since: float | None = None

    def note_serving(self) -> None:
        """An engine has started."""
        self._serves_since = self._clock()

    def next_pause(self) -> float | None:
        """An engine has died, or could not be started.

        Returns:
            seconds after which the next is to be started; None when the budget is spent.
        """
        since, self._serves_since = self._serves_since, None
        if since is not None and self._clock() - since >= STEADY_SECONDS:
            self.num_used = 0
        if self.num_used >= self.budget:
            return None
        self.num_used += 1
        return 0.0 if self.num_used == 1 else min(2.0 ** (self.num_used - 2), LONGEST_PAUSE)
