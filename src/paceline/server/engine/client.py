"""The HTTP process's hold on the engine: prompts go in, pieces come out.

Owns who waits for what, the lives of the engine's process, which is started, watched, and replaced
when it dies or hangs, and the state that the server shows. Knows no HTTP, and no engine beyond its
messages.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from paceline.errors import EngineClosedError, EngineDeadError
from paceline.metrics import EngineStats
from paceline.models.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams
from paceline.server.engine.generation import EngineGeneration
from paceline.server.engine.health import Pulse, Restarts
from paceline.server.engine.link import EngineLink
from paceline.server.engine.wire import EngineFactory, Message
from paceline.server.messages import EngineInfo, EngineState

log = logging.getLogger(__name__)


class EngineClient:
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
        info: valid after :meth:`start`; replaced when the engine is started again.
        tokenizer: None where the model has none.
        failure: why the state is ``failed``.
        num_restarts: engines that were started, or tried to, after the first.
        last_stats: the newest counters that the living engine told, for when it does not answer;
            None before the first.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

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
        self._numbers = itertools.count()
        self._generations: dict[int, EngineGeneration] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}

    @property
    def pid(self) -> int | None:
        """The engine's process; None where there is none."""
        return None if self._link is None else self._link.pid

    @property
    def num_generating(self) -> int:
        """Prompts that were sent and of which the engine owes something."""
        return len(self._generations)

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

    # --- prompts -------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        trace_id: str = "",
    ) -> AsyncIterator[EngineGeneration]:
        """The answer to one prompt; leaving the block aborts what still runs of it.

        Raises (when the block is entered):
            RequestError: the engine refuses the request.
            EngineDeadError: the engine is dead, or being started again.
            EngineClosedError: it was closed.
        """
        link = self._living()
        handle = next(self._numbers)
        link.send(("generate", handle, token_ids, params, cache_salt, trace_id))
        generation = self._generations[handle] = EngineGeneration(params.n)
        try:
            await generation.accepted()
            yield generation
        finally:
            if self._generations.pop(handle, None) is not None:
                with suppress(EngineDeadError):
                    link.send(("abort", handle))

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters.

        Raises: EngineDeadError, EngineClosedError: there is no engine to ask.
        """
        stats: EngineStats = await self._ask("stats")
        self.last_stats = stats
        return stats

    async def flush_prefix_cache(self) -> None:
        await self._ask("flush_prefix_cache")

    async def _ask(self, name: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        self._living().send(("ask", number, name, arguments))
        reply = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        finally:
            self._questions.pop(number, None)

    def _living(self) -> EngineLink:
        """The link to an engine that serves; raises what says that there is none."""
        if self.state == "closed":
            raise EngineClosedError("the engine is closed")
        if self._link is None or self.state not in ("ready", "hung", "draining"):
            raise EngineDeadError(f"the engine is not running; its state is {self.state!r}")
        return self._link

    # --- messages ------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        kind, *arguments = message
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_step(self, entries: Iterable[tuple[Any, ...]]) -> None:
        for handle, *entry in entries:
            generation = self._generations.get(handle)
            if generation is not None and generation.take(*entry):
                del self._generations[handle]

    def _on_accepted(self, handle: int) -> None:
        if handle in self._generations:
            self._generations[handle].accept()

    def _on_refused(self, handle: int, error: Exception) -> None:
        generation = self._generations.pop(handle, None)
        if generation is not None:
            generation.fail(error)

    def _on_reply(self, number: int, error: Exception | None, value: Any) -> None:
        _settle(self._questions.get(number), error, value)

    def _on_beat(self, stats: EngineStats | None) -> None:
        self.last_stats = stats or self.last_stats
        self._pulse.beat(stats is not None)
        self._judge()

    def _on_hello(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self.info, self.tokenizer = info, tokenizer
        _settle(self._hello, None)

    def _on_failed(self, error: Exception) -> None:
        _settle(self._hello, error)

    def _on_dead(self, reason: str) -> None:
        self._reason = reason

    def _fail_all(self, kind: type[EngineClosedError], reason: str) -> None:
        """Tell everybody who waits, each with an error of their own: they will be raised."""
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(kind(reason))
        for waited in (*self._questions.values(), self._hello):
            _settle(waited, kind(reason))

    # --- lives and deaths ----------------------------------------------------------------------

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


def _settle(
    future: asyncio.Future[Any] | None, error: Exception | None, value: object = None
) -> None:
    """End a wait, if somebody still waits."""
    if future is None or future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
