"""``POST /completion`` and ``POST /infill``: answers in the form of llama.cpp's server (b11549).

Owns that form: its pieces, its last document, its settings and times. What is generated is what
:mod:`paceline.server.openai.completions` generates of the same fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.request.request import TokenLogprobs
from paceline.request.sampling_params import SamplingParams
from paceline.server.engine_process.messages import Piece
from paceline.server.engine_process.tokens import TokenTexts, finite
from paceline.server.hosting.answering import check_length, received, respond
from paceline.server.hosting.serving import EncodedPrompt
from paceline.server.http.openapi import posts
from paceline.server.http.sse import EVENTS, event
from paceline.server.llama_cpp.model import mixed_ids, text_of
from paceline.server.llama_cpp.request import (
    ORDER,
    InfillRequest,
    NativeAnswer,
    NativeCompletionRequest,
    NativeRequest,
)
from paceline.server.openai.completions import ServedCompletion
from paceline.server.protocol.sampling import LLAMA_CPP_DRAWN_SEED

NO_SLOT = -1
_OFF: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "repeat_last_n": -1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "grammar": "",
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": ORDER,
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}
"""Settings of llama.cpp that are always the same here, unless a request repeats them."""
_AS_SAMPLED = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos"),
)

router = APIRouter()


@posts(
    router,
    NativeCompletionRequest,
    "/completion",
    "/completions",
    answer=NativeAnswer,
    events=EVENTS,
)
async def completion(request: Request) -> Response:
    serving, body, deadline = await received(request, NativeCompletionRequest)
    return await respond(request, NativeCompletion(serving, body, deadline))


@posts(router, InfillRequest, "/infill", answer=NativeAnswer, events=EVENTS)
async def infill(request: Request) -> Response:
    serving, body, deadline = await received(request, InfillRequest)
    return await respond(request, NativeCompletion(serving, body, deadline))


class NativeCompletion(ServedCompletion):
    """A completion, told as llama.cpp tells it."""

    body: NativeRequest
    may_be_empty = True
    _prompt_texts: list[str]  # once it is prepared

    async def _prepare(self) -> list[EncodedPrompt]:
        prompts = await super()._prepare()
        texts = self._serving.texts
        self._prompt_texts = await asyncio.to_thread(
            lambda: [text_of(prompt.token_ids, texts) for prompt in prompts]
        )
        self._samples = dict[int, NativeSample]()
        self._began = time.monotonic()
        return prompts

    async def _encoded(self) -> list[list[int]]:
        body, serving = self.body, self._serving
        if body.gaps():
            return await super()._encoded()
        batch: list[Any] = [[each] if isinstance(each, str) else each for each in body.prompts]
        texts = [piece for pieces in batch for piece in pieces if isinstance(piece, str)]
        if not texts:
            return batch
        check_length(serving, max(map(len, texts)))
        tokenizer, adds = serving.tokenizer, body.add_special_tokens
        return await asyncio.to_thread(
            lambda: [mixed_ids(tokenizer, pieces, adds) for pieces in batch]
        )

    async def document(self, request: Request) -> Any:
        async with self._answers(request) as answers:
            async for piece in answers:
                self._take(piece)
        documents = [self._end(self._samples[number]) for number in sorted(self._samples)]
        return documents if len(documents) > 1 else documents[0]

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with self._answers(request) as answers:
            yield b""
            async for piece in answers:
                sample = self._take(piece)
                has_more = bool(piece.text or piece.token_ids) and self.body.max_tokens != 0
                events = event(self._part(sample, piece)) if has_more else b""
                if piece.finish_reason is not None:
                    events += event(self._end(sample))
                yield events

    def _take(self, piece: Piece) -> NativeSample:
        if self.body.max_tokens == 0:  # the engine emits at least one token, which nobody asked for
            piece = piece._replace(token_ids=(), logprobs=(), text="", finish_reason="length")
        self._usage.take(piece)
        sample = self._samples.setdefault(piece.sample, NativeSample(piece.sample))
        sample.take(piece)
        return sample

    def _part(self, sample: NativeSample, piece: Piece) -> dict[str, Any]:
        """What a piece of a stream adds."""
        part = {
            "index": sample.index,
            "content": piece.text,
            "tokens": list(piece.token_ids),
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": len(sample.token_ids),
            "tokens_evaluated": len(self._prompt_of(sample).token_ids),
        }
        if self.body.timings_per_token:
            part["timings"] = self._timings(sample)
        if self.body.logprobs:
            part["completion_probabilities"] = self._probabilities(piece.logprobs)
        return part

    def _end(self, sample: NativeSample) -> dict[str, Any]:
        """The last document of an answer; of a stream without what its pieces have told."""
        body, prompt = self.body, self._prompt_of(sample)
        num_prompt, num_predicted = len(prompt.token_ids), len(sample.token_ids)
        document = {
            "index": sample.index,
            "content": "" if body.stream else sample.content,
            "tokens": sample.token_ids if body.return_tokens and not body.stream else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._head["model"],
            "tokens_predicted": num_predicted,
            "tokens_evaluated": num_prompt,
            "generation_settings": settings(body, prompt.params),
            "prompt": self._prompt_texts[sample.index // (body.n or 1)],
            "has_new_line": "\n" in sample.content,
            "truncated": False,
            "stop_type": sample.stop_type,
            "stopping_word": sample.stopping_word,
            "tokens_cached": num_prompt + max(0, num_predicted - 1),
            "timings": self._timings(sample),
        }
        if body.logprobs and not body.stream:
            document["completion_probabilities"] = self._probabilities(sample.logprobs)
        if body.include_metrics:
            document["usage"] = self._usage.document()
        return document if not body.response_fields else chosen(document, body.response_fields)

    def _prompt_of(self, sample: NativeSample) -> EncodedPrompt:
        return self._prompts[sample.index // (self.body.n or 1)]

    def _timings(self, sample: NativeSample) -> dict[str, float]:
        num_read = len(self._prompt_of(sample).token_ids) - sample.num_cached
        return sample.timings(self._began, num_read)

    def _probabilities(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        texts = self._serving.texts
        return [
            {
                **_token(entry.token_id, entry.logprob, texts),
                "top_logprobs": [_token(*likely, texts) for likely in entry.top],
            }
            for entry in entries
        ]


class NativeSample:
    """One answer while it grows."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.content = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.stop_type = "none"
        self.stopping_word = ""
        self.num_cached = 0
        self._drafted: tuple[int, int] = (0, 0)  # tokens of drafts, and those of them accepted
        self._first_token = self._last_token = 0.0

    def take(self, piece: Piece) -> None:
        self._last_token = time.monotonic()
        self._first_token = self._first_token or self._last_token
        self.content += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.num_cached += piece.num_cached_tokens
        if piece.counters is not None:
            self._drafted = piece.counters.num_draft_tokens, piece.counters.num_accepted_tokens
        if piece.finish_reason == "length":
            self.stop_type = "limit"
        elif piece.finish_reason is not None:
            self.stopping_word = piece.stop_reason if isinstance(piece.stop_reason, str) else ""
            self.stop_type = "word" if self.stopping_word else "eos"

    def timings(self, began: float, num_read: int) -> dict[str, float]:
        """Counts, and times in milliseconds; the first token comes with the prompt.

        Args:
            began: when the engine was asked, by :func:`time.monotonic`.
            num_read: tokens of the prompt that no cache had.
        """
        reading = (self._first_token - began) * 1e3
        writing = (self._last_token - self._first_token) * 1e3
        count = len(self.token_ids)
        num_draft_tokens, num_accepted = self._drafted
        drafted = {"draft_n": num_draft_tokens, "draft_n_accepted": num_accepted}
        return {
            "cache_n": self.num_cached,
            **_rates("prompt", num_read, num_read, reading),
            **_rates("predicted", count, max(0, count - 1), writing),
            **(drafted if num_draft_tokens else {}),
        }


def _rates(what: str, count: int, num_timed: int, milliseconds: float) -> dict[str, float]:
    return {
        f"{what}_n": count,
        f"{what}_ms": milliseconds,
        f"{what}_per_token_ms": milliseconds / num_timed if num_timed else 0.0,
        f"{what}_per_second": 1e3 * num_timed / milliseconds if milliseconds else 0.0,
    }


def _token(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    raw = texts.raw(token_id)
    text = raw.decode(errors="ignore")
    return {"id": token_id, "token": text, "bytes": list(raw), "logprob": finite(logprob)}


def settings(body: NativeRequest, params: SamplingParams) -> dict[str, Any]:
    """How an answer was sampled, in llama.cpp's words."""
    repeated = {name: getattr(body, name, None) for name in _OFF}
    limit = -1 if body.max_tokens is None else body.max_tokens
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    biases: list[dict[str, Any]] = [
        {"token": token, "bias": bias} for token, bias in params.logit_bias.items()
    ]
    biases += [{"token": token, "bias": None} for token in params.banned_token_ids]
    return {
        **_OFF,
        **{name: value for name, value in repeated.items() if value is not None},
        "seed": LLAMA_CPP_DRAWN_SEED if params.seed is None else params.seed,
        **{name: getattr(params, name) for name in _AS_SAMPLED},
        "top_k": max(0, params.top_k),
        "repeat_penalty": params.repetition_penalty,
        "stop": stop,
        "max_tokens": limit,
        "n_predict": limit,
        "stream": bool(body.stream),
        "logit_bias": biases,
        "n_probs": body.logprobs or 0,
    }


def chosen(document: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The parts of a document that are asked for, by their paths; what is not there is left out.

    >>> chosen({"a": {"b": 1}, "c": 2}, ["a/b", "d"])
    {'a/b': 1}
    """
    parts = dict[str, Any]()
    for path in paths:
        value: Any = document
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            parts[path] = value
    return parts
