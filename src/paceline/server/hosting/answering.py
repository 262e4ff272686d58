"""What the endpoints that generate share: how they read texts, answer, and count what that cost.

Texts become token ids without holding up other requests; one that cannot fit is refused before it
is encoded. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import ContextLengthError, PacelineError, RequestError
from paceline.request.engine_stats import SpeculationCounters
from paceline.server.chat.answer_parts import ThoughtCount
from paceline.server.engine_process.client import Answers
from paceline.server.engine_process.messages import Piece
from paceline.server.hosting.models import Models
from paceline.server.hosting.serving import EncodedPrompt, Serving
from paceline.server.http.body import Model, WholeAnswer, read_body
from paceline.server.http.errors import ApiError, error_event, to_api_error
from paceline.server.http.sse import (
    EVENTS,
    KEEP_ALIVE_SECONDS,
    ChoiceEvents,
    ClientGoneError,
    Deadline,
    ErrorEvent,
    EventStream,
    StreamForm,
    while_connected,
)
from paceline.server.metrics.server_metrics import Operation
from paceline.server.protocol.generation import GenerationFields
from paceline.text.tokenizer import LONG_TEXT

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=GenerationFields)


async def received(request: Request, kind: type[Model]) -> tuple[Serving, Model, Deadline]:
    """A request's body, with the model that it asks for and when the answer must have ended.

    Raises:
        ApiError: there is no such model; otherwise as :func:`~paceline.server.http.body.read_body`.
    """
    models = Models.of(request)
    deadline = Deadline.after(models.config.request_timeout)
    body = await read_body(request, kind)
    asked: str | None = getattr(body, "model", None)
    return models.find(asked), body, deadline


async def known(request: Request, name: str | None) -> Serving:
    """A model whose facts are known: one that was never loaded is loaded first."""
    serving = Models.of(request).find(name)
    if not serving.is_known:
        async with serving.using():
            pass
    return serving


async def encode(serving: Serving, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Raises:
        ContextLengthError: it is so long that no encoding of it fits into the context.
        RequestError: it cannot be encoded.
    """
    return (await encode_all(serving, [text], add_special_tokens))[0]


async def encode_all(
    serving: Serving, texts: Sequence[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of several texts; raises as :func:`encode`."""
    if not texts:
        return []
    tokenizer = serving.tokenizer
    longest = max(map(len, texts))
    check_length(serving, longest)
    if len(texts) == 1 and longest < LONG_TEXT:  # sooner done than a thread is woken
        return [tokenizer.encode(texts[0], add_special_tokens)]
    return await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens)


def check_length(serving: Serving, num_characters: int) -> None:
    """
    Raises:
        ContextLengthError: no encoding of so long a text fits into the context.
    """
    info = serving.client.info
    context, most = info.max_model_len, info.max_model_len * info.longest_token
    if num_characters > most:
        raise ContextLengthError(
            f"this model's maximum context length is {context} tokens, at most {most} characters; "
            f"the prompt has {num_characters} characters: shorten the prompt"
        )


class Answering(ABC, Generic[Body]):
    """One request while it is served, in one body or as events.

    Attributes:
        kind: how its id begins and what it is called, in one body and as an event.
        operation: what metrics call it.
        num_prompts: of the request, with as many samples each.
        headers: of the answer, once it has begun.
        keep_alive: seconds that the model stays loaded after it; None is the server's.
    """

    kind: ClassVar[tuple[str, str, str]]
    operation: ClassVar[Operation]
    num_prompts = 1
    keep_alive: float | None = None
    _usage: Usage  # once it is prepared

    def __init__(self, serving: Serving, body: Body, deadline: Deadline) -> None:
        prefix, whole, event = self.kind
        self.headers: dict[str, str] = {}
        self.body = body
        self.deadline = deadline
        self._serving = serving
        self._adapter = serving.adapter_of(body.model)
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": event if body.stream else whole,
            "created": int(time.time()),
            "model": body.model or serving.name,
        }

    @property
    def is_loaded(self) -> bool:
        """Whether the model need not be loaded first."""
        return self._serving.resident.is_here

    @abstractmethod
    async def _prepare(self) -> list[EncodedPrompt]:
        """Encode and check; ``RequestError`` or ``ApiError`` where it cannot be served."""

    @abstractmethod
    async def _parts(self, answers: Answers, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to its choice."""

    @abstractmethod
    def _joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A whole choice from all of its parts."""

    async def _extra(self, answers: Answers) -> dict[str, Any]:
        """What an answer in one body has besides its choices, once all have ended."""
        return {}

    def _opening(self) -> dict[str, Any]:
        """What the first event of a stream has besides its choice."""
        return {}

    def _blamed(self, error: RequestError) -> Exception:
        """What to say of a request that the engine refuses."""
        return error

    async def document(self, request: Request) -> dict[str, Any]:
        """The answer in one body."""
        parts: dict[int, list[dict[str, Any]]] = {}
        async with self._answers(request) as answers:
            async for piece in answers:
                parts.setdefault(piece.sample, []).extend(await self._parts(answers, piece))
            extra = await self._extra(answers)
        choices = [self._joined(parts[sample]) for sample in sorted(parts)]
        return {**self._head, "choices": choices, "usage": self._usage.document(), **extra}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The answer as events; the first is empty and says that it was accepted."""
        async with self._answers(request) as answers:
            yield b""
            chunks = ChoiceEvents(self._head, self.body.wants_usage)
            also = self._opening()
            async for piece in answers:
                yield chunks.of(await self._parts(answers, piece), self._usage.so_far(), also)
                also = {}
        yield chunks.end(self._usage.document())

    @asynccontextmanager
    async def _answers(self, request: Request) -> AsyncIterator[Answers]:
        serving, body = self._serving, self.body
        async with AsyncExitStack() as stack:
            stack.enter_context(serving.admitted(self.num_prompts * (body.n or 1)))
            await stack.enter_async_context(serving.using(self.keep_alive))
            self._head["system_fingerprint"] = serving.fingerprint
            prompts = await self._prepare()
            self._usage = Usage(sum(len(prompt.token_ids) for prompt in prompts), body)
            answering = serving.answering(
                request,
                prompts,
                self.deadline,
                body.cache_salt,
                self.operation,
                self._adapter,
                bool(body.stream),
            )
            try:
                answers = await stack.enter_async_context(answering)
            except RequestError as error:
                raise self._blamed(error) from error
            with _logged(request, self._usage):
                yield answers


@contextmanager
def _logged(request: Request, usage: Usage) -> Iterator[None]:
    """Tell the log of an answer when it ends, however it does."""
    began, status = time.perf_counter(), 200
    try:
        yield
    except Exception as error:
        is_expected = isinstance(error, ApiError | PacelineError | TimeoutError | ClientGoneError)
        status = to_api_error(error).status if is_expected else 500
        raise
    except BaseException:  # the client left
        status = 499
        raise
    finally:
        seconds = time.perf_counter() - began
        log.info(finished_line(request.scope["path"], status, usage, seconds))


def finished_line(path: str, status: int, usage: Usage, seconds: float) -> str:
    """What the log says of an answer that ended."""
    counts = usage.document()
    count = counts["completion_tokens"]
    rate = count / seconds if seconds else 0.0
    return (
        f"{path} {status}: {counts['prompt_tokens']} tokens read, {count} written in "
        f"{seconds:.2f} s, {rate:.1f} tok/s"
    )


async def respond(
    request: Request,
    asked: Answering[Any],
    failure: ErrorEvent = error_event,
    form: StreamForm = EVENTS,
) -> Response:
    """Serve it, unless the client leaves or time is up first."""
    if asked.body.stream:
        events = asked.events(request)
        receive, deadline = request.receive, asked.deadline
        patience = None if asked.is_loaded else KEEP_ALIVE_SECONDS
        stream = await EventStream.started(events, failure, receive, deadline, form, patience)
        stream.headers.update(asked.headers)
        return stream
    work = asked.document(request)
    document = await while_connected(request.receive, work, asked.deadline)
    return WholeAnswer.of(request, document, asked.headers)


class Usage:
    """Sums over all samples of all prompts of a request."""

    def __init__(self, num_prompt_tokens: int, body: GenerationFields) -> None:
        self._is_told_early = body.wants_usage_so_far
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._thoughts = ThoughtCount()
        self._counters = SpeculationCounters() if body.include_metrics else None

    def take(self, piece: Piece) -> None:
        self._num_output_tokens += len(piece.token_ids)
        self._num_cached_tokens += piece.num_cached_tokens
        if piece.counters is not None and self._counters is not None:
            self._counters.add(piece.counters)

    def take_thoughts(self, more: ThoughtCount) -> None:
        """Tokens of those that were taken are thoughts."""
        inside, marked = self._thoughts
        self._thoughts = ThoughtCount(inside + more.inside, marked + more.marked)

    @property
    def num_thinking_tokens(self) -> int:
        """Of thoughts with their marks, which Anthropic counts and OpenAI does not."""
        return self._thoughts.marked

    def so_far(self) -> dict[str, Any] | None:
        """The usage for an event of a stream that goes on; None where only the end is to say it."""
        return self.document() if self._is_told_early else None

    def document(self) -> dict[str, Any]:
        """As OpenAI has it; ``metrics`` is ours."""
        document: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._thoughts.inside},
        }
        if self._counters is not None:
            document["metrics"] = {"speculative_decoding": speculation_document(self._counters)}
        return document


def speculation_document(counters: SpeculationCounters) -> dict[str, Any]:
    """Counters and ratios of one request, as :mod:`paceline.request.engine_stats` defines them."""
    return {
        "mean_acceptance_length": counters.mean_acceptance_length,
        "acceptance_rate": counters.acceptance_rate,
        "num_steps": counters.num_steps,
        "num_drafts": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "drafts_per_position": counters.num_drafts_per_pos,
        "accepted_per_position": counters.num_accepted_tokens_per_pos,
        "num_accepted_by_origin": counters.num_accepted_by_origin,
    }
