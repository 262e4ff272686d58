"""``POST /v1/completions``: texts continued. Owns the order of parts in an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import RequestError
from paceline.server.api.common import Answering, PlainRoute, encode_all, respond
from paceline.server.body import read_body
from paceline.server.completion_choice import Choice, LegacyLogprobs, joined
from paceline.server.messages import Piece
from paceline.server.openapi import GENERATION_ERRORS, answers, errors, takes
from paceline.server.protocol.completions import CompletionRequest, CompletionResponse
from paceline.server.sampling import answer_limit, sampling_params, structured_outputs
from paceline.server.serving import Answers, Prompt, Serving
from paceline.server.sse import Deadline
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
    return await respond(request, Completion(serving, body, deadline))


class Completion(Answering[CompletionRequest]):
    """
    Raises:
        RequestError, ApiError: what is asked for does not exist.
    """

    kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, serving: Serving, body: CompletionRequest, deadline: Deadline) -> None:
        if body.max_tokens == 0 and not body.echo:
            raise RequestError("max_tokens is 0; that is for echo, which reports on the prompt")
        super().__init__(serving, body, deadline)
        self.num_prompts = len(body.prompts)
        self._prompts: list[Prompt] = []
        self._texts: list[str] = []  # of the prompts, for ``echo``
        self._choices: dict[int, Choice] = {}

    async def _prepare(self) -> list[Prompt]:
        serving, body = self._serving, self.body
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
        return self._prompts

    async def _parts(self, found: Answers, piece: Piece) -> list[dict[str, Any]]:
        """What it takes to report on a long prompt holds up nobody else."""
        body = self.body
        if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            return await asyncio.to_thread(self._told, found, piece)
        return self._told(found, piece)

    def _told(self, found: Answers, piece: Piece) -> list[dict[str, Any]]:
        body, prompt = self.body, piece.sample // (self.body.n or 1)
        choice = self._choices.get(piece.sample)
        parts = []
        is_first = choice is None
        if choice is None:
            token_ids = self._prompts[prompt].token_ids
            choice = self._choices[piece.sample] = self._choice(piece.sample, token_ids)
            if body.echo:
                entries = found.prompt_logprobs[prompt]
                parts.append(choice.echo(self._texts[prompt], token_ids, entries))
        if body.max_tokens == 0:
            # The engine emits at least one token, which nobody asked for.
            parts.append(choice.end())
            piece = piece._replace(token_ids=())
        else:
            parts.append(choice.take(piece))
        self._usage.take(piece)
        if is_first and body.prompt_logprobs is not None:
            told = prompt_logprobs(
                found.prompt_logprobs[prompt], self._serving.texts, body.prompt_logprobs
            )
            parts[-1]["prompt_logprobs"] = told
        return parts

    def _choice(self, place: int, token_ids: list[int]) -> Choice:
        body, tokenizer = self.body, self._serving.client.tokenizer
        logprobs = None
        if body.logprobs is not None:
            before = [] if body.echo else token_ids
            logprobs = LegacyLogprobs(body.logprobs, self._serving.texts, tokenizer, before)
        origins = OriginTokens(tokenizer, token_ids) if body.return_origins else None
        return Choice(place, logprobs, origins)

    def _joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return joined(parts)


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
