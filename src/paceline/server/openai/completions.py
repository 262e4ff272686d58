"""``POST /v1/completions``: texts continued. Owns the order of parts in an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import RequestError
from paceline.request.request import TokenLogprobs
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.chat.response_formats import blamed, response_shape, shape_param
from paceline.server.engine_process.client import Answers
from paceline.server.engine_process.messages import Piece
from paceline.server.engine_process.tokens import LegacyLogprobs, OriginTokens, prompt_logprobs
from paceline.server.hosting.answering import (
    Answering,
    check_length,
    encode_all,
    received,
    respond,
)
from paceline.server.hosting.serving import EncodedPrompt, Serving
from paceline.server.http.openapi import posts
from paceline.server.http.sse import EVENTS, Deadline
from paceline.server.protocol.completions import CompletionRequest, UsageBody
from paceline.server.protocol.generation import UNENFORCED
from paceline.server.protocol.sampling import answer_limit, sampling_params, truncated
from paceline.text.tokenizer import Tokenizer

router = APIRouter()


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class CompletionResponse(BaseModel):
    """What a completion is answered with; events of a stream have the same shape."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody | None


@posts(router, CompletionRequest, "/v1/completions", answer=CompletionResponse, events=EVENTS)
async def completions(request: Request) -> Response:
    serving, body, deadline = await received(request, CompletionRequest)
    return await respond(request, ServedCompletion(serving, body, deadline))


class ServedCompletion(Answering[CompletionRequest]):
    """
    Raises:
        RequestError: what is asked for does not exist.
    """

    kind = "cmpl", "text_completion", "text_completion"
    operation = "text_completion"
    may_be_empty: ClassVar[bool] = False
    """Whether a request for no tokens is one to compute the prompt's KV ahead of time."""

    def __init__(self, serving: Serving, body: CompletionRequest, deadline: Deadline) -> None:
        if body.max_tokens == 0 and not (body.echo or self.may_be_empty):
            raise RequestError.of(
                "max_tokens", "is 0; that is for echo, which reports on the prompt"
            )
        super().__init__(serving, body, deadline)
        self.num_prompts = len(body.prompts)
        self._prompts: list[EncodedPrompt] = []
        self._texts: list[str] = []  # of the prompts, for ``echo``
        self._choices: dict[int, TextChoice] = {}

    async def _prepare(self) -> list[EncodedPrompt]:
        serving, body = self._serving, self.body
        shape = await self._shape() if shape_param(body) is not None else None
        most = body.limit
        for whole in await self._encoded():
            token_ids = truncated(whole, body.truncate_prompt_tokens, serving.client.info, most)
            await asyncio.sleep(0)  # between the prompts of a batch others get their turn
            self._prompts.append(self._prompt(token_ids, shape))
        if body.echo and (not self._texts or body.truncate_prompt_tokens is not None):
            decode, kept = serving.tokenizer.decode, [each.token_ids for each in self._prompts]
            self._texts = await asyncio.to_thread(lambda: [*map(decode, kept)])
        return self._prompts

    async def _shape(self) -> StructuredOutputs | None:
        shape, unenforced = await self._serving.schemas.run(lambda: response_shape(self.body))
        if unenforced:
            self.headers[UNENFORCED] = ", ".join(unenforced)
        return shape

    async def _encoded(self) -> list[list[int]]:
        body, serving, gaps = self.body, self._serving, self.body.gaps()
        if gaps:
            check_length(serving, max(gap.num_characters for gap in gaps))
            tokenizer = serving.tokenizer
            return await asyncio.to_thread(lambda: [tokenizer.fim_prompt(gap) for gap in gaps])
        self._texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        if self._texts:  # all of them are
            return await encode_all(serving, self._texts, body.add_special_tokens)
        return [prompt for prompt in body.prompts if not isinstance(prompt, str)]

    def _prompt(self, token_ids: list[int], shape: StructuredOutputs | None) -> EncodedPrompt:
        """A prompt with its parameters, within the context."""
        info, body = self._serving.client.info, self.body
        is_cut = body.max_tokens is None or body.is_cut_to_context
        limit = answer_limit(len(token_ids), body.limit, info, is_cut=is_cut)
        reported = None
        if body.echo and body.logprobs is not None:
            reported = max(body.logprobs, body.prompt_logprobs or 0)
        ends_at_marks = bool(body.gaps()) and not body.ignore_eos
        stops, stop_ids = _marks(self._serving.tokenizer) if ends_at_marks else ((), ())
        params = sampling_params(
            body,
            info,
            self._serving.client.tokenizer,
            max_tokens=max(1, limit),
            structured=shape,
            logprobs=body.logprobs,
            prompt_logprobs=reported,
            more_stops=stops,
            more_stop_ids=stop_ids,
        )
        return EncodedPrompt(token_ids, params)

    def _blamed(self, error: RequestError) -> Exception:
        return blamed(error, shape_param(self.body))

    async def _parts(self, answers: Answers, piece: Piece) -> list[dict[str, Any]]:
        """What it takes to report on a long prompt holds up nobody else."""
        body = self.body
        if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            return await asyncio.to_thread(self._reported, answers, piece)
        return self._reported(answers, piece)

    def _reported(self, answers: Answers, piece: Piece) -> list[dict[str, Any]]:
        body, prompt = self.body, piece.sample // (self.body.n or 1)
        choice = self._choices.get(piece.sample)
        parts = []
        is_first = choice is None
        if choice is None:
            token_ids = self._prompts[prompt].token_ids
            choice = self._choices[piece.sample] = self._choice(piece.sample, token_ids)
            if body.echo:
                entries = answers.prompt_logprobs[prompt]
                parts.append(choice.echo(self._texts[prompt], token_ids, entries))
        if body.max_tokens == 0:
            # The engine emits at least one token, which nobody asked for.
            parts.append(choice.end())
            piece = piece._replace(token_ids=())
        else:
            parts.append(choice.take(piece))
        self._usage.take(piece)
        if body.return_token_ids:
            parts[-1]["token_ids"] = list(piece.token_ids)
            if is_first:
                parts[-1]["prompt_token_ids"] = self._prompts[prompt].token_ids
        if is_first and body.prompt_logprobs is not None:
            reported = prompt_logprobs(
                answers.prompt_logprobs[prompt], self._serving.texts, body.prompt_logprobs
            )
            parts[-1]["prompt_logprobs"] = reported
        return parts

    def _choice(self, place: int, token_ids: list[int]) -> TextChoice:
        body, tokenizer = self.body, self._serving.client.tokenizer
        logprobs = None
        if body.logprobs is not None:
            before = [] if body.echo else token_ids
            count = max(body.logprobs, len(body.logprob_token_ids or ()))
            logprobs = LegacyLogprobs(count, self._serving.texts, tokenizer, before)
        origins = OriginTokens(tokenizer, token_ids) if body.return_origins else None
        return TextChoice(place, logprobs, origins)

    def _joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return joined(parts)


def _marks(tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Strings and token ids that end what fills a gap.

    There the model goes on to another part of the text, or to another file.
    """
    marks = tokenizer.needed_fim().all
    ids = tuple(mark for mark in marks if tokenizer.is_special(mark))
    return tuple(tokenizer.id_to_token(mark) or "" for mark in marks if mark not in ids), ids


class TextChoice:
    """One sample of one prompt."""

    def __init__(
        self, index: int, logprobs: LegacyLogprobs | None, origins: OriginTokens | None
    ) -> None:
        self._index = index
        self._logprobs = logprobs
        self._origins = origins

    def echo(
        self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """The prompt, which comes first where it was asked for."""
        part = self._part(text, self._logprobs_of(token_ids, entries))
        if self._origins is not None:
            part["tokens"] = []
        return part

    def take(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds."""
        logprobs = self._logprobs_of(piece.token_ids, piece.logprobs)
        part = self._part(piece.text, logprobs, piece.finish_reason, piece.stop_reason)
        if self._origins is not None:
            part["tokens"] = self._origins.take(piece)
        return part

    def end(self) -> dict[str, Any]:
        """Nothing more, for an answer of no tokens."""
        return self._part("", None, "length")

    def _logprobs_of(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]] | None:
        return None if self._logprobs is None else self._logprobs.part(token_ids, entries)

    def _part(
        self,
        text: str,
        logprobs: dict[str, list[Any]] | None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A whole choice from its parts; there is at least one."""
    whole = {name: value for part in parts for name, value in part.items()}
    whole["text"] = "".join(part["text"] for part in parts)
    lists = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    if lists:
        whole["logprobs"] = {
            name: [each for part in lists for each in part[name]] for name in lists[0]
        }
    for name in whole.keys() & {"tokens", "token_ids"}:
        whole[name] = [token for part in parts for token in part.get(name, ())]
    return whole
