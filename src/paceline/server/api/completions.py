"""``POST /v1/completions``: texts continued. Owns the order of parts in an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import RequestError
from paceline.server.body import read_body
from paceline.server.encoding import encode
from paceline.server.errors import error_event
from paceline.server.generation import Choice, LegacyLogprobs, joined
from paceline.server.messages import Piece
from paceline.server.openapi import GENERATION_ERRORS, answers, errors, takes
from paceline.server.protocol.completions import CompletionRequest, CompletionResponse
from paceline.server.sampling import answer_limit, sampling_params
from paceline.server.serving import Answers, Prompt, Serving
from paceline.server.sse import DONE, EventStream, encode_json, event, while_connected
from paceline.server.tokens import OriginTokens, prompt_logprobs
from paceline.server.usage import Usage

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post(
    "/v1/completions",
    responses=answers(CompletionResponse) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(CompletionRequest),
)
async def completions(request: Request) -> Response:
    serving = Serving.of(request)
    body = await read_body(request, CompletionRequest)
    completion = await Completion.prepared(serving, body)
    timeout = serving.config.timeout
    if body.stream:
        return await EventStream.started(completion.events(request), error_event, timeout)
    document = await while_connected(request.receive, completion.document(request), timeout)
    return Response(encode_json(document), media_type="application/json")


class Completion:
    """One request while it is served.

    Args:
        texts: of the prompts, for ``echo``.
    """

    def __init__(
        self, serving: Serving, body: CompletionRequest, prompts: list[Prompt], texts: list[str]
    ) -> None:
        self._serving = serving
        self._body = body
        self._prompts = prompts
        self._texts = texts
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.model_name(body.model),
        }
        self._choices: dict[int, Choice] = {}
        self._usage = Usage(sum(len(p.token_ids) for p in prompts), body.include_metrics)

    @classmethod
    async def prepared(cls, serving: Serving, body: CompletionRequest) -> Completion:
        """Encode and check.

        Raises:
            RequestError, ApiError: the request cannot be served.
        """
        serving.model_name(body.model)
        if body.max_tokens == 0 and not body.echo:
            raise RequestError("max_tokens is 0; that is for echo, which reports on the prompt")
        prompts, texts = [], []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                token_ids = await encode(serving, prompt, body.add_special_tokens)
            else:
                token_ids = prompt
            prompts.append(_prompt(serving, body, token_ids))
            if body.echo:
                is_text = isinstance(prompt, str)
                texts.append(str(prompt) if is_text else serving.tokenizer.decode(token_ids))
        return cls(serving, body, prompts, texts)

    # --- the answer ----------------------------------------------------------------------------

    async def document(self, request: Request) -> dict[str, Any]:
        """The answer in one body."""
        parts: dict[int, list[dict[str, Any]]] = {}
        async with self._answering(request) as found:
            async for index, piece in found:
                for part in self._parts(found, index, piece):
                    parts.setdefault(part["index"], []).append(part)
        choices = [joined(parts[index]) for index in sorted(parts)]
        return {**self._head, "choices": choices, "usage": self._usage.document()}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The answer as events, one per piece; the first is empty and says that it was accepted."""
        wants_usage = self._body.wants_usage_chunk
        # What is the same in all events is encoded once.
        before = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        after = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"
        async with self._answering(request) as found:
            yield b""
            async for index, piece in found:
                parts = self._parts(found, index, piece)
                yield b"".join([before + encode_json(part) + after for part in parts])
        if wants_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.document()})
        yield DONE

    def _answering(self, request: Request) -> Any:
        return self._serving.answering(request, self._prompts, self._body.cache_salt)

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
    params = sampling_params(body, info, max_tokens=limit, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=wanted)
    return Prompt(token_ids, params)
