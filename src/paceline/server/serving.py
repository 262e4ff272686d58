"""What every endpoint leans on: the engine, the options, the queue, the metrics, the names.

Owns the state of a server between requests, and the answers to a request's prompts while they
come. Knows no endpoint and no format.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from paceline import __version__
from paceline.errors import ConfigError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams
from paceline.server.admission import Admission
from paceline.server.config import ServerConfig
from paceline.server.engine.client import EngineClient, EngineGeneration
from paceline.server.errors import NOT_FOUND, SERVER, ApiError
from paceline.server.messages import Piece
from paceline.server.metrics import ServerMetrics
from paceline.server.security import partition
from paceline.server.sse import Deadline
from paceline.server.tokens import TokenTexts
from paceline.server.tracing import current_trace_id

_REFUSALS = {
    "draining": "the server is ending and takes no new requests",
    "starting": "the engine is being started again; try again soon",
    "hung": "the engine does not answer; it is started again if that goes on",
}


class Clock:
    """Times of the answers to a request's prompts, told to the metrics, and how they ended.

    Args:
        num_samples: of each prompt.
    """

    def __init__(
        self, metrics: ServerMetrics, num_prompts: int, num_samples: int, deadline: Deadline
    ) -> None:
        self._metrics = metrics
        self._deadline = deadline
        self._num_samples = num_samples
        self._last: list[float | None] = [None] * (num_prompts * num_samples)
        self._unfinished = [num_samples] * num_prompts
        self._reasons = ["abort"] * num_prompts

    def observe(self, piece: Piece) -> None:
        at = time.monotonic()
        last = self._last[piece.sample]
        if last is None:
            self._metrics.first_token.observe(at - self._deadline.began)
        else:
            self._metrics.token_gap.observe(at - last)
        self._last[piece.sample] = at
        if piece.finish_reason is not None:
            prompt = piece.sample // self._num_samples
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt]:
                self._reasons[prompt] = piece.finish_reason

    def close(self, has_failed: bool) -> None:
        """Tell that the answers have ended; one that was complete before a failure stays so."""
        has_failed = has_failed or self._deadline.seconds_left <= 0
        for unfinished, reason in zip(self._unfinished, self._reasons, strict=True):
            told = "error" if has_failed and unfinished else reason
            self._metrics.observe_request(time.monotonic() - self._deadline.began, told)


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
                self.metrics.rejected.inc()
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
        params = [prompt.params for prompt in prompts]
        clock = Clock(self.metrics, len(prompts), params[0].n, deadline)
        generating = self.client.generate(
            [prompt.token_ids for prompt in prompts],
            params,
            cache_salt=partition(request.scope, cache_salt),
            trace_id=current_trace_id(),
        )
        has_failed = was_refused = False
        try:
            async with generating as generation:
                yield Answers(generation, clock)
        except Exception as error:
            has_failed, was_refused = True, isinstance(error, RequestError)
            raise
        finally:
            if not was_refused:  # that took no time
                clock.close(has_failed)


def _longest_token(tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        return 0
    return max(len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size))


class Answers:
    """The answers to the prompts of one HTTP request, as they come: iterate over their pieces.

    Attributes:
        prompt_logprobs: as :class:`~paceline.server.engine.client.EngineGeneration` has them.
    """

    def __init__(self, generation: EngineGeneration, clock: Clock) -> None:
        self.prompt_logprobs = generation.prompt_logprobs
        self._generation = generation
        self._clock = clock

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for piece in self._generation:
            self._clock.observe(piece)
            yield piece
