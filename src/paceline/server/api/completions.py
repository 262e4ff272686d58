"""``POST /v1/completions``: texts continued. Owns the order of parts in an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import RequestError
from paceline.server.api.common import PlainRoute, Usage, encode_all, respond
from paceline.server.body import read_body
from paceline.server.completion_choice import Choice, LegacyLogprobs, joined
from paceline.server.messages import Piece
from paceline.server.openapi import GENERATION_ERRORS, answers, errors, takes
from paceline.server.protocol.completions import CompletionRequest, CompletionResponse
from paceline.server.sampling import answer_limit, sampling_params, structured_outputs
from paceline.server.serving import Answers, Prompt, Serving
from paceline.server.sse import ChoiceEvents, Deadline
from paceline.server.tokens import OriginTokens, prompt_logprobs

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=PlainRoute)


@router.post(
    "/v1/completions",
    responses=answers(CompletionResponse) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(CompletionRequest),
)
async def completions(request: Request) -> Response:
    serving = Serving.of(request)
    deadline = Deadline.after(serving.config.timeout)
    body = await read_body(request, CompletionRequest)
    completion = Completion(serving, body, deadline)
    return await respond(request, completion, body.stream, deadline)


class Completion:
    """One request while it is served.

    Args:
        deadline: it began when the request arrived.

    Raises:
        RequestError, ApiError: what is asked for does not exist.
    """

    _usage: Usage  # once the prompts are encoded

    def __init__(self, serving: Serving, body: CompletionRequest, deadline: Deadline) -> None:
        if body.max_tokens == 0 and not body.echo:
            raise RequestError("max_tokens is 0; that is for echo, which reports on the prompt")
        self.headers: Mapping[str, str] = {}
        self._serving = serving
        self._body = body
        self._deadline = deadline
        self._prompts: list[Prompt] = []
        self._texts: list[str] = []  # of the prompts, for ``echo``
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.model_name(body.model),
            "system_fingerprint": serving.fingerprint,
        }
        self._choices: dict[int, Choice] = {}

    async def _prepare(self) -> None:
        """Encode and check.

        Raises:
            RequestError: the request cannot be served.
        """
        serving, body = self._serving, self._body
        self._texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        encoded = [prompt for prompt in body.prompts if not isinstance(prompt, str)]
        if self._texts:  # all of them are
            encoded = await encode_all(serving, self._texts, body.add_special_tokens)
        for token_ids in encoded:
            await asyncio.sleep(0)  # between the prompts of a batch others get their turn
            self._prompts.append(_prompt(serving, body, token_ids))
        if body.echo and not self._texts:
            decode = serving.tokenizer.decode
            self._texts = await asyncio.to_thread(lambda: [*map(decode, encoded)])
        num_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        self._usage = Usage(num_tokens, body)

    # --- the answer ----------------------------------------------------------------------------

    async def document(self, request: Request) -> dict[str, Any]:
        """The answer in one body."""
        parts: dict[int, list[dict[str, Any]]] = {}
        async with self._answering(request) as found:
            async for index, piece in found:
                for part in await self._told(found, index, piece):
                    parts.setdefault(part["index"], []).append(part)
        choices = [joined(parts[index]) for index in sorted(parts)]
        return {**self._head, "choices": choices, "usage": self._usage.document()}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The answer as events, one per piece; the first is empty and says that it was accepted."""
        chunks = ChoiceEvents(self._head, self._body.wants_usage)
        async with self._answering(request) as found:
            yield b""
            async for index, piece in found:
                choices = await self._told(found, index, piece)
                yield chunks.of(choices, self._usage.so_far())
        yield chunks.end(self._usage.document())

    @asynccontextmanager
    async def _answering(self, request: Request) -> AsyncIterator[Answers]:
        serving, body = self._serving, self._body
        with serving.admitted(len(body.prompts) * (body.n or 1)):
            await self._prepare()
            answering = serving.answering(request, self._prompts, self._deadline, body.cache_salt)
            async with answering as found:
                yield found

    async def _told(self, found: Answers, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The parts of a piece. What it takes to report on a long prompt holds up nobody else."""
        body = self._body
        if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            return await asyncio.to_thread(self._parts, found, index, piece)
        return self._parts(found, index, piece)

    def _parts(self, found: Answers, index: int, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to the choice that it belongs to."""
        place = index * (self._body.n or 1) + piece.index
        choice = self._choices.get(place)
        parts = []
        is_first = choice is None
        if choice is None:
            choice = self._choices[place] = self._choice(place, self._prompts[index].token_ids)
            if self._body.echo:
                parts.append(self._echo(found, index, choice))
        if self._body.max_tokens == 0:
            # The engine emits at least one token, which nobody asked for.
            parts.append(choice.end())
            piece = replace(piece, token_ids=())
        else:
            parts.append(choice.take(piece))
        self._usage.take(piece)
        if is_first and self._body.prompt_logprobs is not None:
            entries = found.generations[index].prompt_logprobs
            told = prompt_logprobs(entries, self._serving.texts, self._body.prompt_logprobs)
            parts[-1]["prompt_logprobs"] = told
        return parts

    def _echo(self, found: Answers, index: int, choice: Choice) -> dict[str, Any]:
        entries = found.generations[index].prompt_logprobs
        return choice.echo(self._texts[index], self._prompts[index].token_ids, entries)

    def _choice(self, place: int, token_ids: list[int]) -> Choice:
        body, tokenizer = self._body, self._serving.client.tokenizer
        logprobs = None
        if body.logprobs is not None:
            before = [] if body.echo else token_ids
            logprobs = LegacyLogprobs(body.logprobs, self._serving.texts, tokenizer, before)
        origins = OriginTokens(tokenizer, token_ids) if body.return_origins else None
        return Choice(place, logprobs, origins)


def _prompt(serving: Serving, body: CompletionRequest, token_ids: list[int]) -> Prompt:
    """A prompt with its parameters, within the context."""
    info = serving.client.info
    if body.max_tokens is None:
        limit = min(DEFAULT_MAX_TOKENS, answer_limit(len(token_ids), None, info))
    else:
        limit = max(1, answer_limit(len(token_ids), body.max_tokens, info))
    shape = structured_outputs(body.structured_outputs)
    params = sampling_params(body, info, max_tokens=limit, structured=shape, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=wanted)
    return Prompt(token_ids, params)
