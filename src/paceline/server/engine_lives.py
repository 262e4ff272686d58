"""Lives of the engine's process: started, watched, and replaced when it dies or hangs.

Owns the state that the server shows, and the budget of restarts. Knows no prompts: who waits for
an engine is :mod:`paceline.server.engine_client`'s matter, and hears of deaths by being failed.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import EngineClosedError, EngineDeadError
from paceline.metrics import EngineStats
from paceline.server.channel import Message
from paceline.server.engine_link import EngineLink
from paceline.server.heartbeat import Pulse
from paceline.server.messages import EngineFactory, EngineState
from paceline.server.restarts import Restarts

log = logging.getLogger(__name__)


class EngineLives(ABC):
    """An engine in a process of its own, and its successors.

    A dead engine is started again, and so is one that hangs, as often as ``restarts`` allows; then
    the state is ``failed``, and :attr:`failure` says why.

    Args:
        factory: makes the engine, a :class:`~paceline.llm.LLM`; it must be picklable.
        configure_logging: picklable too; what the process runs first.
        stream_interval: seconds within which an answer's pieces come as one; 0: each by itself.
        restarts: how often; by default five times in a row.
        pulse: when an engine counts as hung; by default after a minute without a sign of life.

    Attributes:
        num_restarts: engines that were started, or tried to, after the first.
        last_stats: the newest counters that the living engine told; None before the first.
    """

    def __init__(
        self,
        factory: EngineFactory,
        *,
        configure_logging: Callable[[], None] | None = None,
        stream_interval: float = 0.0,
        restarts: Restarts | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.state: EngineState = "starting"
        self.failure = ""
        self.num_restarts = 0
        self.last_stats: EngineStats | None = None
        self._restarts = restarts or Restarts()
        self._pulse = pulse or Pulse()
        self._opening = (factory, configure_logging, stream_interval, self._pulse.interval)
        self._link: EngineLink | None = None
        self._hello: asyncio.Future[None] | None = None
        self._reason = ""
        self._is_draining = False
        self._ticking: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    @abstractmethod
    def _receive(self, message: Message) -> None:
        """A message has come from the engine."""

    @abstractmethod
    def _fail_all(self, kind: type[EngineClosedError], reason: str) -> None:
        """Tell everybody who waits for the engine."""

    async def start(self) -> None:
        """Start the engine's process and wait until it serves.

        Raises:
            ModelLoadError, ConfigError: or whatever else building the engine raised.
            EngineDeadError: the process died meanwhile.
        """
        self._hello = asyncio.get_running_loop().create_future()
        self._link = link = EngineLink(self._receive, self._lose)
        try:
            await link.open(*self._opening)
            await self._hello
            if self._link is not link:
                raise EngineDeadError("the engine died as soon as it had started")
        except BaseException:
            self._link = None
            if self.state == "starting" and self._restarting is None:
                self.state = "failed"
            await link.close()
            raise
        self._restarts.note_serving()
        self._pulse.restart()
        self._ticking = asyncio.create_task(self._tick())
        self.state = "draining" if self._is_draining else "ready"

    def drain(self) -> None:
        """Say by the state that no new requests are to be taken on; those that were go on."""
        self._is_draining = True
        if self.state in ("ready", "hung"):
            self.state = "draining"

    async def close(self) -> None:
        """End the engine; prompts in flight raise ``EngineClosedError``. Twice is allowed."""
        self.state = "closed"
        self._fail_all(EngineClosedError, "the engine was closed")
        link, self._link = self._link, None
        if self._ticking is not None:
            self._ticking.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            with suppress(asyncio.CancelledError):
                await self._restarting
        elif link is not None:
            await link.close()

    def _lose(self, link: EngineLink) -> None:
        """The process is gone, or about to be. Whoever waits for it hears of it at once."""
        if link is not self._link:  # it was closed on purpose
            return
        reason = f"the engine died: {self._reason or 'its process was ended'}"
        self._reason = ""
        self._link = self.last_stats = None
        if self._ticking is not None:
            self._ticking.cancel()
        self._fail_all(EngineDeadError, reason)
        if self.state == "starting":  # start() has not returned, and will raise
            return
        pause = self._pause_after(reason)
        self._restarting = asyncio.create_task(self._succeed(link, reason, pause))

    async def _succeed(self, dead: EngineLink, reason: str, pause: float | None) -> None:
        """Bury a dead engine, and start others until one serves or the budget is spent."""
        try:
            log.error("%s (exit code %s)", reason, await dead.close())
            while pause is not None:
                log.warning("the engine is started again in %g s", pause)
                await asyncio.sleep(pause)
                self.num_restarts += 1
                try:
                    await self.start()
                except Exception as failure:
                    log.error("the engine cannot be started: %r", failure)
                    pause = self._pause_after(f"the engine cannot be started: {failure}")
                else:
                    log.warning("the engine was started again, for the %d. time", self.num_restarts)
                    return
        finally:
            self._restarting = None

    def _pause_after(self, reason: str) -> float | None:
        """How long to wait before the next start; None when there is to be none."""
        pause = self._restarts.next_pause()
        self.state = "failed" if pause is None else "starting"
        if pause is None:
            count = self._restarts.num_used
            self.failure = f"{reason}; after {count} restarts in a row it is not started again"
        return pause

    async def _tick(self) -> None:
        """Miss beats, while an engine lives."""
        while True:
            await asyncio.sleep(self._pulse.interval)
            self._pulse.tick()
            self._judge()

    def _judge(self) -> None:
        """Let the state say whether the engine is silent, and end it when it was too long."""
        if self.state == "ready" and self._pulse.is_silent:
            self.state = "hung"
            log.warning("the engine does not answer; its process is stopped, or very busy")
        elif self.state == "hung" and not self._pulse.is_silent:
            self.state = "ready"
            log.warning("the engine answers again")
        if self._pulse.verdict and self._link is not None and not self._reason:
            self._reason = self._pulse.verdict
            self._link.kill()

    def _living(self) -> EngineLink:
        """The link to an engine that serves; raises what says that there is none."""
        if self.state == "closed":
            raise EngineClosedError("the engine is closed")
        if self._link is None or self.state not in ("ready", "hung", "draining"):
            raise EngineDeadError(f"the engine is not running; its state is {self.state!r}")
        return self._link
