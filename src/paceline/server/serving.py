"""What every endpoint leans on: the engine, the options, the queue, the metrics, the names.

Owns the state of a server between requests, and the answers to a request's prompts while they
come. Knows no endpoint and no format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

from starlette.requests import Request

from paceline.errors import ConfigError
from paceline.models.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams
from paceline.server.admission import Admission
from paceline.server.config import ServerConfig
from paceline.server.errors import NOT_FOUND, SERVER, ApiError
from paceline.server.messages import Generation, Piece, ServingEngine
from paceline.server.metrics import ServerMetrics
from paceline.server.security import partition
from paceline.server.tokens import TokenTexts
from paceline.server.tracing import current_trace_id


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and what is wanted of it."""

    token_ids: list[int]
    params: SamplingParams


class Serving:
    """The state of one server.

    Attributes:
        is_draining: the server ends when what is in flight has ended, and takes nothing new.
    """

    def __init__(self, client: ServingEngine, config: ServerConfig) -> None:
        self.client = client
        self.config = config
        self.created = int(time.time())
        self.is_draining = False
        self.names = config.served_model_names or (client.info.model,)
        self.admission = Admission(client.info.max_num_seqs, config.max_queue)
        self.metrics = ServerMetrics(config.metrics_prefix, self.names[0])
        self.texts = TokenTexts(client.tokenizer)

    @classmethod
    def of(cls, request: Request) -> Serving:
        serving = request.app.state.serving
        assert isinstance(serving, cls)
        return serving

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        spell = self.tokenizer.id_to_token
        return max(len(spell(i) or "") for i in range(self.tokenizer.vocab_size))

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError: the model has none."""
        if self.client.tokenizer is None:
            raise ConfigError(f"{self.names[0]} has no tokenizer; send token ids instead of text")
        return self.client.tokenizer

    def model_name(self, asked: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404, there is no such model.
        """
        if asked is not None and asked not in self.names:
            raise ApiError(
                404,
                f"model {asked[:100]!r} is not served here; served is {', '.join(self.names)}",
                NOT_FOUND,
                param="model",
                code="model_not_found",
            )
        return asked or self.names[0]

    @asynccontextmanager
    async def answering(
        self, request: Request, prompts: Sequence[Prompt], cache_salt: str | None = None
    ) -> AsyncIterator[Answers]:
        """Submit a request's prompts; leaving the block aborts those that still run.

        Raises (when the block is entered):
            ApiError: 429, the queue is full; 503, the server is ending.
            RequestError, EngineClosedError: the engine refuses a prompt, or is dead.
        """
        if self.is_draining:
            raise ApiError(
                503,
                "the server is ending and takes no new requests",
                SERVER,
                code="draining",
                headers={"Retry-After": "5"},
            )
        salt, trace = partition(request.scope, cache_salt), current_trace_id()
        count = sum(prompt.params.n for prompt in prompts)
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(self.admission.places(count))
            except ApiError:
                self.metrics.observe_rejected()
                raise
            generations = [
                await stack.enter_async_context(
                    self.client.generate(
                        prompt.token_ids, prompt.params, cache_salt=salt, trace_id=trace
                    )
                )
                for prompt in prompts
            ]
            clocks = [_Clock(self.metrics, prompt.params.n) for prompt in prompts]
            try:
                yield Answers(generations, clocks)
            except Exception:
                for clock in clocks:
                    clock.reason = "error"
                raise
            finally:
                for clock in clocks:
                    clock.close()


class Answers:
    """The answers to the prompts of one HTTP request, as they come.

    Iterate over ``(prompt, piece)``, the place of the prompt in the request first, until all
    samples of all prompts have ended.
    """

    def __init__(self, generations: Sequence[Generation], clocks: Sequence[_Clock]) -> None:
        self.generations = generations
        self._clocks = clocks

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        if len(self.generations) == 1:
            clock = self._clocks[0]
            async for piece in self.generations[0]:
                clock.observe(piece)
                yield 0, piece
            return
        async for index, piece in _merged(self.generations):
            self._clocks[index].observe(piece)
            yield index, piece


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several generations, each as soon as it is there."""
    inbox: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

    async def forward(index: int, generation: Generation) -> None:
        try:
            async for piece in generation:
                inbox.put_nowait((index, piece))
            inbox.put_nowait(None)
        except Exception as error:
            inbox.put_nowait(error)

    tasks = [asyncio.create_task(forward(i, each)) for i, each in enumerate(generations)]
    try:
        unfinished = len(tasks)
        while unfinished:
            match await inbox.get():
                case None:
                    unfinished -= 1
                case BaseException() as error:
                    raise error
                case found:
                    yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Clock:
    """Times of one prompt's answer, told to the metrics, and how it ended."""

    def __init__(self, metrics: ServerMetrics, num_samples: int) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._last: list[float | None] = [None] * num_samples
        self._unfinished = num_samples
        self.reason = "abort"

    def observe(self, piece: Piece) -> None:
        at = time.perf_counter()
        last = self._last[piece.index]
        if last is None:
            self._metrics.observe_first_token(at - self._began)
        else:
            self._metrics.observe_token_gap(at - last)
        self._last[piece.index] = at
        if piece.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self.reason = piece.finish_reason

    def close(self) -> None:
        """Tell that the answer has ended."""
        self._metrics.observe_request(time.perf_counter() - self._began, self.reason)
