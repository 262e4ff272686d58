"""Whether the engine's process still does something, and how often a dead engine is started again.

A thread of its own in the engine's process sends a beat in every interval, whatever the engine
computes. A beat carries the engine's counters when the engine has come to tell them since the last
one, which it does between two steps, and None otherwise.

Detected: beats that stop, which means that the process is stopped, is given no processor, or keeps
Python's lock to itself. A long step does none of that: models compute without the lock. And a step
that does not end, though beats go on; it cannot be told from a long one, and counts as hung when it
has taken longer than any request may. Not detected: a model that takes for ever to load, an engine
that steps and brings nothing forth, and one request that is forgotten.

Time is counted in beats and in ticks of the HTTP process's own loop, not in seconds of a clock, so
that a machine which sleeps, or stops both processes, raises no alarm when it goes on. Owns no
process and no state of an engine.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from paceline.errors import EngineClosedError
from paceline.metrics import EngineStats

log = logging.getLogger(__name__)
INTERVAL = 1.0
"""Seconds between two beats, and between two looks for them."""
SILENT_TICKS = 3
"""Looks without a beat after which an engine does not count as ready."""
STEADY_SECONDS = 300.0
"""An engine that has served so long has not died of its start: what came before is forgotten."""
LONGEST_PAUSE = 30.0


def start_beating(
    send: Callable[[EngineStats | None], None],
    stats: Callable[[], EngineStats],
    interval: float,
) -> None:
    """Send beats from a thread of their own until the process ends.

    Args:
        send: takes a beat's counters, or None.
        stats: the engine's counters; it may take as long as a step. Where it fails, the last
            ones count.
    """
    told: queue.SimpleQueue[EngineStats] = queue.SimpleQueue()
    is_wanted = threading.Semaphore()

    def ask() -> None:
        last, has_failed = EngineStats(), False
        while is_wanted.acquire():
            try:
                last = stats()
            except EngineClosedError:  # it says so itself
                return
            except Exception:
                if not has_failed:
                    log.exception("the engine's counters cannot be told; the last ones are kept")
                has_failed = True
            told.put(last)  # the engine came to answer, whatever it said

    def beat() -> None:
        while True:
            time.sleep(interval)
            found = None if told.empty() else told.get()
            if found is not None:
                is_wanted.release()
            send(found)

    for name, target in (("counters", ask), ("heartbeat", beat)):
        threading.Thread(target=target, name=f"paceline-{name}", daemon=True).start()


class Pulse:
    """What beats say of one life of an engine; the caller tells it of beats and of ticks.

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
