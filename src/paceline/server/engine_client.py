"""The HTTP process's hold on the engine: prompts go in, pieces come out.

Owns who waits for what. Knows no HTTP, and no engine beyond its messages; what becomes of one that
dies is :mod:`paceline.server.engine_lives`' matter.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from paceline.errors import EngineClosedError, EngineDeadError
from paceline.metrics import EngineStats
from paceline.models.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams
from paceline.server.channel import Message
from paceline.server.engine_generation import EngineGeneration
from paceline.server.engine_lives import EngineLives
from paceline.server.heartbeat import Pulse
from paceline.server.messages import EngineFactory, EngineInfo
from paceline.server.questions import Questions
from paceline.server.restarts import Restarts


class EngineClient(EngineLives):
    """A :class:`~paceline.server.messages.ServingEngine` whose engine is a process of its own."""

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
        """See :class:`~paceline.server.engine_lives.EngineLives`."""
        super().__init__(
            factory,
            configure_logging=configure_logging,
            stream_interval=stream_interval,
            restarts=restarts,
            pulse=pulse,
        )
        self._numbers = itertools.count()
        self._generations: dict[int, EngineGeneration] = {}
        self._questions = Questions()

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
        self.last_stats = stats
        return stats

    async def flush_prefix_cache(self) -> None:
        await self._ask("flush_prefix_cache")

    async def _ask(self, name: str, *arguments: Any) -> Any:
        link = self._living()
        return await self._questions.ask(lambda number: link.send(("ask", number, name, arguments)))

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
        self._questions.reply(number, error, value)

    def _on_beat(self, stats: EngineStats | None) -> None:
        self.last_stats = stats or self.last_stats
        self._pulse.beat(stats is not None)
        self._judge()

    def _on_hello(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self.info, self.tokenizer = info, tokenizer
        if self._hello is not None and not self._hello.done():
            self._hello.set_result(None)

    def _on_failed(self, error: Exception) -> None:
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(error)

    def _on_dead(self, reason: str) -> None:
        self._reason = reason

    def _fail_all(self, kind: type[EngineClosedError], reason: str) -> None:
        """Tell everybody who waits, each with an error of their own: they will be raised."""
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(kind(reason))
        self._questions.fail(lambda: kind(reason))
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(kind(reason))
