"""What the endpoints that generate share: how they read texts, answer, and count what it cost.

Texts become token ids without holding up other requests; one that cannot fit is refused before it
is encoded. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import ContextLengthError
from paceline.metrics import SpeculationCounters
from paceline.models.tokenizer import LONG_TEXT
from paceline.server.errors import error_event
from paceline.server.messages import Piece
from paceline.server.protocol.common import GenerationFields
from paceline.server.serving import Serving
from paceline.server.sse import Deadline, EventStream, encode_json, while_connected


class PlainRoute(APIRoute):
    """Of an endpoint that takes the request alone and returns a response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


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
    tokenizer, context = serving.tokenizer, serving.client.info.max_model_len
    most = context * serving.longest_token
    longest = max(map(len, texts), default=0)
    if longest > most:
        raise ContextLengthError(
            f"this model's maximum context length is {context} tokens, at most {most} characters; "
            f"the prompt has {longest} characters: shorten the prompt"
        )
    if len(texts) == 1 and longest < LONG_TEXT:  # sooner done than a thread is woken
        return [tokenizer.encode(texts[0], add_special_tokens)]
    return await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens)


class Answerable(Protocol):
    """A request that was understood, and can be served in either form."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer, once it has begun."""
        ...

    async def document(self, request: Request) -> dict[str, Any]: ...

    def events(self, request: Request) -> AsyncGenerator[bytes, None]: ...


async def respond(
    request: Request, asked: Answerable, streams: bool | None, deadline: Deadline
) -> Response:
    """Serve it, unless the client leaves or time is up first."""
    if streams:
        events = asked.events(request)
        stream = await EventStream.started(events, error_event, request.receive, deadline)
        stream.headers.update(asked.headers)
        return stream
    document = await while_connected(request.receive, asked.document(request), deadline)
    return Response(encode_json(document), headers=asked.headers, media_type="application/json")


class Usage:
    """Sums over all samples of all prompts of a request.

    Args:
        num_prompt_tokens: of all prompts; each counts once, however many samples it has.
        body: of the request, which says what is to be reported and when.
    """

    def __init__(self, num_prompt_tokens: int, body: GenerationFields) -> None:
        self._is_told_early = body.wants_usage_so_far
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._counters = SpeculationCounters() if body.include_metrics else None

    def take(self, piece: Piece) -> None:
        self._num_output_tokens += len(piece.token_ids)
        if piece.num_cached_tokens and piece.index == 0:
            self._num_cached_tokens += piece.num_cached_tokens
        if piece.counters is not None and self._counters is not None:
            self._counters.add(piece.counters)

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
        }
        if self._counters is not None:
            document["metrics"] = {"speculative_decoding": speculation_document(self._counters)}
        return document


def speculation_document(counters: SpeculationCounters) -> dict[str, Any]:
    """Counters and ratios of one request. See :mod:`paceline.metrics` for what they mean."""
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
