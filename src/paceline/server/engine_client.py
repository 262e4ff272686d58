"""The HTTP process's hold on the engine: prompts go in, pieces come out, a dead engine is replaced.

Owns who waits for what, and the engine's lives. Knows no HTTP, and no engine beyond its messages.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from paceline.errors import EngineClosedError, EngineDeadError
from paceline.metrics import EngineStats
from paceline.models.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams
from paceline.server.channel import Message
from paceline.server.engine_generation import EngineGeneration
from paceline.server.engine_link import EngineLink
from paceline.server.messages import EngineFactory, EngineInfo, EngineState

log = logging.getLogger(__name__)
CRASH_LOOP_SECONDS = 60.0


class EngineClient:
    """A :class:`~paceline.server.messages.ServingEngine` whose engine is a process of its own.

    A dead engine is started again, unless it dies within a minute of its last death without having
    finished a prompt, or cannot be built any more; then the state is ``failed``.

    Args:
        factory: makes the engine, a :class:`~paceline.llm.LLM`; it must be picklable.
        configure_logging: picklable too; what the process runs first.
        stream_interval: seconds within which an answer's pieces come as one; 0: each by itself.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

    def __init__(
        self,
        factory: EngineFactory,
        *,
        configure_logging: Callable[[], None] | None = None,
        stream_interval: float = 0.0,
    ) -> None:
        self.state: EngineState = "starting"
        self.num_restarts = 0
        self._opening = (factory, configure_logging, stream_interval)
        self._link: EngineLink | None = None
        self._hello: asyncio.Future[None] | None = None
        self._numbers = itertools.count()
        self._generations: dict[int, EngineGeneration] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._reason = ""
        self._died_at = -math.inf
        self._has_finished_since = False
        self._is_draining = False
        self._restarting: asyncio.Task[None] | None = None

    # --- lives ---------------------------------------------------------------------------------

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
            if self.state == "starting":
                self.state = "failed"
            await link.close()
            raise
        self.state = "draining" if self._is_draining else "ready"

    def drain(self) -> None:
        """Say by the state that no new requests are to be taken on; those that were go on."""
        self._is_draining = True
        if self.state == "ready":
            self.state = "draining"

    async def close(self) -> None:
        """End the engine; prompts in flight raise ``EngineClosedError``. Twice is allowed."""
        self.state = "closed"
        self._fail_all(EngineClosedError, "the engine was closed")
        link, self._link = self._link, None
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
        self._link = None
        self._fail_all(EngineDeadError, reason)
        if self.state == "starting":  # start() has not returned, and will raise
            return
        before, self._died_at = self._died_at, time.monotonic()
        is_late = self._died_at - before >= CRASH_LOOP_SECONDS
        self.state = "starting" if is_late or self._has_finished_since else "failed"
        self._has_finished_since = False
        self._restarting = asyncio.create_task(self._succeed(link, reason))

    async def _succeed(self, dead: EngineLink, reason: str) -> None:
        """Bury a dead engine and, unless it keeps dying, start another."""
        try:
            code = await dead.close()
            log.error("%s (exit code %s); the engine's state is %s", reason, code, self.state)
            if self.state == "starting":
                self.num_restarts += 1
                await self.start()
                log.warning("the engine was started again, for the %d. time", self.num_restarts)
        except Exception as failure:
            log.error("the engine cannot be started again: %r", failure)
        finally:
            self._restarting = None

    def _fail_all(self, kind: type[EngineClosedError], reason: str) -> None:
        """Tell everybody who waits, each with an error of their own: they will be raised."""
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(kind(reason))
        asked, self._asked = self._asked, {}
        for future in [*asked.values(), *filter(None, [self._hello])]:
            if not future.done():
                future.set_exception(kind(reason))

    def _living(self) -> EngineLink:
        """The link to an engine that serves; raises what says that there is none."""
        if self.state == "closed":
            raise EngineClosedError("the engine is closed")
        if self._link is None or self.state not in ("ready", "draining"):
            raise EngineDeadError(f"the engine is not running; its state is {self.state!r}")
        return self._link

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

        Raises: what ``ServingEngine`` says, when the block is entered.
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
        return stats

    async def flush_prefix_cache(self) -> None:
        await self._ask("flush_prefix_cache")

    async def _ask(self, name: str, *arguments: Any) -> Any:
        link, number = self._living(), next(self._numbers)
        link.send(("ask", number, name, arguments))
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    # --- messages ------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        kind, *arguments = message
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_step(self, entries: Iterable[tuple[Any, ...]]) -> None:
        for handle, *entry in entries:
            generation = self._generations.get(handle)
            if generation is not None and generation.take(*entry):
                del self._generations[handle]
                self._has_finished_since = True

    def _on_accepted(self, handle: int) -> None:
        if handle in self._generations:
            self._generations[handle].accept()

    def _on_refused(self, handle: int, error: Exception) -> None:
        generation = self._generations.pop(handle, None)
        if generation is not None:
            generation.fail(error)

    def _on_reply(self, number: int, error: Exception | None, value: Any) -> None:
        future = self._asked.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _on_hello(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self.info, self.tokenizer = info, tokenizer
        if self._hello is not None and not self._hello.done():
            self._hello.set_result(None)

    def _on_failed(self, error: Exception) -> None:
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(error)

    def _on_dead(self, reason: str) -> None:
        self._reason = reason
