"""How often and how soon an engine that died is started again. Owns the budget; starts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

STEADY_SECONDS = 300.0
"""An engine that has served so long has not died of its start: what came before is forgotten."""
SETTLED_SECONDS = 10.0
"""An engine that has served so long is replaced at once, since the next one will serve as well."""
LONGEST_PAUSE = 30.0


class Restarts:
    """The budget of restarts of one server.

    The first restart is at once, the second after a second, and each further one after twice the
    pause; an engine that has served for ten seconds is replaced at once. One that serves for five
    minutes gives the whole budget back; time in which a model loads does not count, so that a slow
    start cannot hide that it dies again and again.

    Args:
        budget: most restarts in a row; 0 is none.
        clock: seconds.
    """

    def __init__(self, budget: int = 5, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.num_used = 0
        self._num_hasty = 0  # deaths in a row after less than SETTLED_SECONDS
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
        served = 0.0 if since is None else self._clock() - since
        if served >= STEADY_SECONDS:
            self.num_used = 0
        if served >= SETTLED_SECONDS:
            self._num_hasty = 0
        if self.num_used >= self.budget:
            return None
        self.num_used, self._num_hasty = self.num_used + 1, self._num_hasty + 1
        return 0.0 if self._num_hasty == 1 else min(2.0 ** (self._num_hasty - 2), LONGEST_PAUSE)
