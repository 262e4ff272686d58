"""One life of the engine's process: started, talked to, ended; and when another one follows.

Owns when an engine counts as hung, and how often and how soon one that died is started again. Knows
no request.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import math
import multiprocessing
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.core.errors import EngineDeadError
from paceline.request.metrics import EngineInfo, EngineStats
from paceline.server.engine_process.messages import Message, packed, received
from paceline.server.engine_process.process import NAME, run_engine
from paceline.text.tokenizer import Tokenizer

ENDING_SECONDS = 5.0
"""How long a process that was told to end is given before it is killed."""


@functools.cache
def _context() -> Any:
    """What starts processes: on Linux a process that has imported what engines are made of.

    It has computed nothing and has no threads, so that it can be forked. An engine that died, or
    another model, is there as fast as its weights are read.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.api.llm"])
    return context


class EngineLife:
    """One life of the engine's process: started, talked to, ended."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._has_spoken = False

    async def open(self, *arguments: Any) -> tuple[EngineInfo, Tokenizer | None]:
        """Start the process and wait until it serves.

        Raises:
            Exception: whatever building the engine raised.
            EngineDeadError: the process died meanwhile.
        """
        ours, theirs = socket.socketpair()
        with theirs:  # held open here, it would hide that the process died
            self.process = process = _context().Process(
                target=run_engine, args=(theirs, *arguments), name=NAME, daemon=True
            )
            try:
                await asyncio.to_thread(process.start)
            except BaseException:
                ours.close()
                self.process = None
                raise
        # multiprocessing would send SIGTERM at exit, which the process ignores.
        atexit.register(process.kill)
        self.reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            kind, *told = await received(self.reader)
        except (EOFError, OSError) as error:
            raise EngineDeadError("the engine died: its process was ended") from error
        self._has_spoken = True
        if kind == "failed":
            raise told[0]
        info, tokenizer = told
        return info, tokenizer

    def send(self, message: Message) -> None:
        """Never waits; ``EngineDeadError`` where the other end is gone."""
        if self._writer is None or self._writer.is_closing() or self.reader.at_eof():
            raise EngineDeadError("the process of the engine is gone")
        self._writer.write(packed(message))

    async def close(self) -> int | None:
        """End the process, whatever it is doing; its exit code. Twice is allowed."""
        if self._writer is not None:
            self._writer.transport.abort()
        process, self.process = self.process, None
        if process is None:
            return None
        if not self._has_spoken:  # it is still building the engine, and does not listen
            process.kill()
        await asyncio.to_thread(process.join, ENDING_SECONDS)
        if process.exitcode is None:
            process.kill()
            await asyncio.to_thread(process.join)
        atexit.unregister(process.kill)
        code = process.exitcode
        process.close()
        return code


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


INTERVAL = 1.0
"""Seconds between two beats, and between two looks for them."""
SILENT_TICKS = 3
"""Looks without a beat after which an engine does not count as ready."""


class Pulse:
    """What beats say of one life of an engine; the caller tells it of beats and of ticks.

    Detected: beats that stop, which means that the process is stopped, is given no processor, or
    keeps Python's lock to itself. A long step does none of that: models compute without the lock.
    And a step that does not end, though beats go on; it cannot be told from a long one, and counts
    as hung when it has taken longer than any request may. Not detected: a model that takes for ever
    to load, an engine that steps and brings nothing forth, and one request that is forgotten.

    Time is counted in beats and in ticks of the HTTP process's own loop, not in seconds of a clock,
    so that a machine which sleeps, or stops both processes, raises no alarm when it goes on.

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
    """Counts of one life of an engine, the newest :data:`MAX_BEATS` of them.

    Args:
        now: seconds; default: :func:`time.monotonic`.
    """

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
