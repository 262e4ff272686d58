"""What is known of the lives of a server's engine: whether it hangs, and when another one follows.

Owns when an engine counts as hung, how often and how soon one that died is started again, and how
many tokens it had put out at each of its last beats. Starts nothing and knows no request.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from paceline.request.engine_stats import EngineStats

STEADY_SECONDS = 300.0
"""An engine that has served so long has not died of its start: what came before is forgotten."""
SETTLED_SECONDS = 10.0
"""An engine that has served so long is replaced at once, since the next one will serve as well."""
LONGEST_PAUSE = 30.0


class Restarts:
    """The budget of restarts of one server.

    The first restart is at once, the second after a second, and each further one after twice the
    pause. An engine that has served for ten seconds is replaced at once; one that has served for
    five minutes gives the whole budget back. The time in which a model loads does not count.

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
        """Seconds from a death, or a failed start, to the next; None when the budget is spent."""
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


INTERVAL = 1.0
"""Seconds between two beats, and between two looks for them."""
SILENT_TICKS = 3
"""Looks without a beat after which an engine does not count as ready."""


class Pulse:
    """What beats say of one life of an engine; the caller tells it of beats and of ticks.

    Detected: beats that stop, since the process is stopped, is given no processor, or keeps
    Python's lock, which models do not while they compute; and a step that takes longer than any
    request may, though beats go on. Not detected: a model that loads for ever, an engine that steps
    and produces nothing, and a single request that is forgotten.

    Time is counted in beats and in ticks of the HTTP process's loop, not by a clock, so that a
    machine which sleeps raises no alarm when it goes on.

    Args:
        hang_timeout: seconds without a beat after which the engine is to be ended.
        step_timeout: seconds that a step may take; None is no limit.
        interval: seconds between two beats and between two ticks.
    """

    def __init__(
        self,
        hang_timeout: float = 60.0,
        step_timeout: float | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self.hang_timeout = hang_timeout
        self.step_timeout = math.inf if step_timeout is None else step_timeout
        self.interval = interval
        self.restart()

    def restart(self) -> None:
        """Another engine lives."""
        self._num_silent = 0  # ticks since the last beat
        self._num_busy = 0  # beats since the engine last came to tell its counters

    def tick(self) -> None:
        """An interval of the HTTP process's own has passed."""
        self._num_silent += 1

    def beat(self, is_between_steps: bool) -> None:
        """A beat has come."""
        self._num_silent = 0
        self._num_busy = 0 if is_between_steps else self._num_busy + 1

    @property
    def is_silent(self) -> bool:
        """Whether beats are missing."""
        return self._num_silent >= SILENT_TICKS

    @property
    def verdict(self) -> str:
        """Why the engine is to be ended; empty while it is not."""
        if self._num_silent * self.interval >= max(self.hang_timeout, self.interval):
            return f"it gave no sign of life for {self.hang_timeout:g} s"
        if self._num_busy * self.interval > self.step_timeout:
            return f"a step took longer than {self.step_timeout:g} s"
        return ""


MAX_BEATS = 300
"""Five minutes of beats that come every second."""


class OutputHistory:
    """Output tokens of one life of an engine by its newest :data:`MAX_BEATS` beats."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or time.monotonic
        self._counts: deque[tuple[float, int]] = deque(maxlen=MAX_BEATS)

    def note(self, stats: EngineStats) -> None:
        """A beat has told the engine's counters."""
        self._counts.append((self._now(), stats.num_output_tokens))

    def clear(self) -> None:
        """The engine is gone; the next one counts from zero."""
        self._counts.clear()

    def told(self) -> list[tuple[float, int]]:
        """(seconds ago, output tokens until then), the oldest first."""
        now = self._now()
        return [(round(now - at, 3), tokens) for at, tokens in self._counts]
