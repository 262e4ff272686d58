"""What every endpoint leans on: the engine, the options, the queue, the metrics, the names.

Owns the state of a server between requests, and the answers to a request's prompts while they
come. Knows no endpoint and no format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from paceline import __version__
from paceline.errors import ConfigError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams
from paceline.server.admission import Admission
from paceline.server.config import ServerConfig
from paceline.server.engine.client import EngineClient
from paceline.server.engine.generation import EngineGeneration
from paceline.server.errors import NOT_FOUND, SERVER, ApiError
from paceline.server.messages import Piece
from paceline.server.metrics import ServerMetrics
from paceline.server.security import partition
from paceline.server.sse import Deadline, cancelled
from paceline.server.tokens import TokenTexts
from paceline.server.tracing import current_trace_id

_REFUSALS = {
    "draining": "the server is ending and takes no new requests",
    "starting": "the engine is being started again; try again soon",
    "hung": "the engine does not answer; it is started again if that goes on",
}


class Clock:
    """Times of one prompt's answer, told to the metrics, and how it ended."""

    def __init__(self, metrics: ServerMetrics, num_samples: int, deadline: Deadline) -> None:
        self._metrics = metrics
        self._deadline = deadline
        self._last: list[float | None] = [None] * num_samples
        self._unfinished = num_samples
        self._reason = "abort"

    def observe(self, piece: Piece) -> None:
        at = time.monotonic()
        last = self._last[piece.index]
        if last is None:
            self._metrics.observe_first_token(at - self._deadline.began)
        else:
            self._metrics.observe_token_gap(at - last)
        self._last[piece.index] = at
        if piece.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self._reason = piece.finish_reason

    def fail(self) -> None:
        """The request has failed; an answer that was complete before stays what it was."""
        if self._unfinished:
            self._reason = "error"

    def close(self) -> None:
        """Tell that the answer has ended."""
        if self._deadline.seconds_left <= 0:
            self.fail()
        self._metrics.observe_request(time.monotonic() - self._deadline.began, self._reason)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and what is wanted of it."""

    token_ids: list[int]
    params: SamplingParams


class Serving:
    """The state of one server.

    Attributes:
        longest_token: its characters; 0 without a tokenizer.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client = client
        self.config = config
        self.created = int(time.time())
        self.names = config.served_model_names or (client.info.model,)
        self.admission = Admission(client.info.max_num_seqs, config.max_queue)
        self.metrics = ServerMetrics(config.metrics_prefix, self.names[0])
        self.texts = TokenTexts(client.tokenizer)
        self.longest_token = _longest_token(client.tokenizer)

    @classmethod
    def of(cls, request: Request) -> Serving:
        serving = request.app.state.serving
        assert isinstance(serving, cls)
        return serving

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError: the model has none."""
        if self.client.tokenizer is None:
            raise ConfigError(
                "the model has no tokenizer; send token ids to /v1/completions instead of text"
            )
        return self.client.tokenizer

    @property
    def fingerprint(self) -> str:
        """What decides, besides the model, which tokens follow from a seed."""
        info = self.client.info
        return f"paceline-{__version__}-{info.dtype}-{info.backend}"

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

    def check_takes_requests(self) -> None:
        """Raises ApiError: 503, the server is ending, or its engine starting or hung."""
        state = self.client.state
        if state in _REFUSALS:
            again = {"Retry-After": "5"}
            raise ApiError(503, _REFUSALS[state], SERVER, code=state, headers=again)

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Hold places for a request's samples, before any work goes into it.

        Raises (when the block is entered):
            ApiError: 429, the queue is full; 503, the server is ending or its engine starting.
            RequestError: so many places do not exist.
        """
        self.check_takes_requests()
        with ExitStack() as stack:
            try:
                stack.enter_context(self.admission.places(count))
            except ApiError:
                self.metrics.observe_rejected()
                raise
            yield

    @asynccontextmanager
    async def answering(
        self,
        request: Request,
        prompts: Sequence[Prompt],
        deadline: Deadline,
        cache_salt: str | None,
    ) -> AsyncIterator[Answers]:
        """Submit the prompts of a request that was admitted; leaving the block aborts what runs.

        Args:
            deadline: it began when the request arrived.

        Raises (when the block is entered):
            RequestError, EngineClosedError: the engine refuses a prompt, or is dead.
        """
        salt, trace = partition(request.scope, cache_salt), current_trace_id()
        clocks = [Clock(self.metrics, prompt.params.n, deadline) for prompt in prompts]
        async with AsyncExitStack() as stack:
            entering = [
                stack.enter_async_context(
                    self.client.generate(
                        prompt.token_ids, prompt.params, cache_salt=salt, trace_id=trace
                    )
                )
                for prompt in prompts
            ]
            try:
                try:
                    generations = await _all_of(entering)
                except RequestError:
                    clocks.clear()  # what was refused took no time
                    raise
                yield Answers(generations, clocks)
            except Exception:
                for clock in clocks:
                    clock.fail()
                raise
            finally:
                for clock in clocks:
                    clock.close()


async def _all_of(
    entering: Sequence[Coroutine[Any, Any, EngineGeneration]],
) -> list[EngineGeneration]:
    """Submit all prompts before the first is accepted, so that one step can take them all on."""
    if len(entering) == 1:
        return [await entering[0]]
    tasks = [asyncio.create_task(each) for each in entering]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(*tasks)


def _longest_token(tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        return 0
    return max(len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size))


class Answers:
    """The answers to the prompts of one HTTP request, as they come.

    Iterate over ``(prompt, piece)``, the place of the prompt in the request first, until all
    samples of all prompts have ended.
    """

    def __init__(self, generations: Sequence[EngineGeneration], clocks: Sequence[Clock]) -> None:
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


async def _merged(generations: Sequence[EngineGeneration]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several generations, each as soon as it is there."""
    inbox: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

    async def forward(index: int, generation: EngineGeneration) -> None:
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
