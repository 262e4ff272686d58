"""``POST /api/chat``, ``/api/generate`` and ``/api/embed``, and the older ``/api/embeddings``.

Owns the form of an answer: pieces with words, thoughts and whole calls, made of the parts of a
chat's choice or of a completion's, then counts and times.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Generic, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.chat.tool_calls.values import arguments_of
from paceline.server.hosting.answering import (
    Answering,
    Body,
    encode_all,
    received,
    respond,
)
from paceline.server.hosting.serving import EncodedPrompt, Serving
from paceline.server.http.body import WholeAnswer
from paceline.server.http.errors import to_api_error
from paceline.server.http.openapi import GENERATION_ERRORS, posts
from paceline.server.http.sse import Deadline, StreamForm, encode_json, while_connected
from paceline.server.ollama.request import (
    ChatAnswer,
    ChatRequest,
    EmbedAnswer,
    EmbeddingAnswer,
    EmbedRequest,
    GenerateAnswer,
    GenerateRequest,
    OllamaEmbeddingRequest,
    OllamaRequest,
    chat_of,
    completion_of,
)
from paceline.server.openai.chat import ServedChat
from paceline.server.openai.completions import ServedCompletion
from paceline.server.openai.embeddings import floats, pooled, pooling_params

PIECES = StreamForm("application/x-ndjson")
router = APIRouter()


@posts(router, ChatRequest, "/api/chat", answer=ChatAnswer, events=PIECES)
async def chat(request: Request) -> Response:
    return await _respond(request, ChatRequest)


@posts(router, GenerateRequest, "/api/generate", answer=GenerateAnswer, events=PIECES)
async def generate(request: Request) -> Response:
    return await _respond(request, GenerateRequest)


async def _respond(request: Request, kind: type[ChatRequest] | type[GenerateRequest]) -> Response:
    serving, body, deadline = await received(request, kind)
    if not (body.messages if isinstance(body, ChatRequest) else body.prompt):
        return await _settled(request, serving, body, deadline)
    name = serving.adapter_of(body.model) or serving.name
    asked: OllamaChat | OllamaCompletion
    if isinstance(body, GenerateRequest) and body.is_plain:
        asked = OllamaCompletion(serving, completion_of(body, name), deadline, body)
    else:
        asked = OllamaChat(serving, chat_of(body, name), deadline, body)
    idle = line(asked.piece({"content": ""}))
    return await respond(request, asked, _error_line, StreamForm(PIECES.media_type, idle))


async def _settled(
    request: Request, serving: Serving, body: ChatRequest | GenerateRequest, deadline: Deadline
) -> Response:
    """Load the model, or with a ``keep_alive`` of 0 unload it; that is all that is asked for."""
    is_over = body.keep_alive == 0

    async def settle() -> None:
        if serving.resident.is_here or not is_over:
            async with serving.using(body.keep_alive):
                pass

    await while_connected(request.receive, settle(), deadline)
    reason = "unload" if is_over else "load"
    document = piece(body.model, _shape(body), {"content": ""}, done=True, done_reason=reason)
    return WholeAnswer.of(request, document)


def _shape(body: OllamaRequest) -> Shape:
    return "message" if isinstance(body, ChatRequest) else "response"


def _error_line(error: BaseException) -> bytes:
    """The end of a stream that failed."""
    return line({"error": to_api_error(error).message})


class _OllamaAnswering(Answering[Body], Generic[Body]):
    """An answer in Ollama's form, with the parts of whatever this is mixed into."""

    def __init__(
        self, serving: Serving, body: Body, deadline: Deadline, asked: OllamaRequest
    ) -> None:
        super().__init__(serving, body, deadline)
        self._model = asked.model
        self.shape = _shape(asked)
        self.keep_alive = asked.keep_alive
        self._waits = not self.is_loaded
        self._reader, self._times = PartReader(), Times(deadline.began)

    async def _prepare(self) -> list[EncodedPrompt]:
        if self._waits:
            self._times.note_loaded()
        return await super()._prepare()  # type: ignore[safe-super]

    def piece(self, added: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return piece(self._model, self.shape, added, **rest)

    async def document(self, request: Request) -> dict[str, Any]:
        async with aclosing(self._pieces(request)) as pieces:
            additions = [each async for each in pieces if each is not None]
        return self.piece(joined(additions), **self._end())

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pieces(request)) as pieces:
            async for added in pieces:
                yield b"" if added is None else line(self.piece(added))
        yield line(self.piece({"content": ""}, **self._end()))

    async def _pieces(self, request: Request) -> AsyncGenerator[dict[str, Any] | None, None]:
        """What the answer tells; None first, which says that it was accepted."""
        async with self._answers(request) as answers:
            yield None
            async for each in answers:
                self._times.note_tokens()
                for part in await self._parts(answers, each):
                    for added in self._reader.take(part):
                        yield added

    def _end(self) -> dict[str, Any]:
        totals = self._times.totals(self._usage.document())
        return {"done": True, "done_reason": self._reader.reason, **totals}


class OllamaChat(_OllamaAnswering[Any], ServedChat):
    """A chat."""


class OllamaCompletion(_OllamaAnswering[Any], ServedCompletion):
    """A prompt that is continued as it is."""


Shape = Literal["message", "response"]
"""Where the words are: of a chat in a message, of a completion in a string."""


def timestamp(seconds: float) -> str:
    """Seconds of the epoch, as Ollama writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def line(value: Mapping[str, Any]) -> bytes:
    """One piece of a stream."""
    return encode_json(value) + b"\n"


def piece(model: str, shape: Shape, added: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
    """One of Ollama's objects.

    Args:
        added: ``content``, and ``thinking``, ``tool_calls`` and ``logprobs`` where there are some.
    """
    head: dict[str, Any] = {"model": model, "created_at": timestamp(time.time())}
    words = {name: value for name, value in added.items() if name != "logprobs"}
    logprobs = {"logprobs": added["logprobs"]} if "logprobs" in added else {}
    if shape == "message":
        head["message"] = {"role": "assistant", **words}
    else:
        head["response"] = words.pop("content")
        head |= words
    return {**head, **logprobs, "done": False, **rest}


class PartReader:
    """What the parts of one choice add, as ``content``, ``thinking`` and the like.

    A call is told when its arguments are complete, which they are when something else follows.
    """

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []  # those that are not told yet: at most one
        self._num_calls = 0
        self.reason = "stop"

    def take(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What became certain with a part."""
        delta = part["delta"] if "delta" in part else {"content": part["text"]}
        certain = list[dict[str, Any]]()
        words, thoughts = delta.get("content"), delta.get("reasoning_content")
        if words or thoughts:
            certain += self._end_call()
        logprobs = (part.get("logprobs") or {}).get("content")
        if words or thoughts or logprobs:
            certain.append({"content": words or ""})
            certain[-1] |= {"thinking": thoughts} if thoughts else {}
            certain[-1] |= {"logprobs": logprobs} if logprobs else {}
        for begun in delta.get("tool_calls", ()):
            if "id" in begun:
                certain += self._end_call()
                self._begin_call(begun)
            else:
                self._calls[-1]["arguments"] += begun["function"]["arguments"]
        if part["finish_reason"] is not None:
            self.reason = "length" if part["finish_reason"] == "length" else "stop"
            certain += self._end_call()
        return certain

    def _begin_call(self, call: Mapping[str, Any]) -> None:
        self._calls.append({"id": call["id"], "index": self._num_calls, **call["function"]})
        self._num_calls += 1

    def _end_call(self) -> list[dict[str, Any]]:
        calls, self._calls = self._calls, []
        return [{"content": "", "tool_calls": [_whole_call(call)]} for call in calls]


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = arguments_of(call["arguments"])
    function = {"index": call["index"], "name": call["name"], "arguments": arguments}
    return {"id": call["id"], "function": function}


def joined(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all pieces tell together."""
    whole: dict[str, Any] = {"content": ""}
    for added in pieces:
        for name, value in added.items():
            whole[name] = whole[name] + value if name in whole else value
    return whole


class Times:
    """When an answer began and when its first tokens came, by :func:`time.monotonic`."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._loaded = began
        self._first: float | None = None

    def note_loaded(self) -> None:
        """The model is there, for which the request may have waited."""
        self._loaded = time.monotonic()

    def note_tokens(self) -> None:
        self._first = self._first or time.monotonic()

    def totals(self, usage: Mapping[str, Any]) -> dict[str, int]:
        """Counts, and durations in nanoseconds; those that are divided by are never 0."""
        end = time.monotonic()
        first = self._first or end
        return {
            "total_duration": _nanoseconds(end - self._began),
            "load_duration": int((self._loaded - self._began) * 1e9),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first - self._loaded),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(end - first),
        }


def _nanoseconds(seconds: float) -> int:
    return max(1, int(seconds * 1e9))


@posts(router, EmbedRequest, "/api/embed", answer=EmbedAnswer, statuses=GENERATION_ERRORS)
async def embed(request: Request) -> Response:
    serving, body, deadline = await received(request, EmbedRequest)
    vectors, count = await _embedded(request, serving, body, deadline)
    totals = Times(deadline.began).totals({"prompt_tokens": count, "completion_tokens": 0})
    shown = ("total_duration", "load_duration", "prompt_eval_count")
    document = {
        "model": body.model,
        "embeddings": [floats(vector) for vector in vectors],
        **{name: totals[name] for name in shown},
    }
    return WholeAnswer.of(request, document)


@posts(
    router,
    OllamaEmbeddingRequest,
    "/api/embeddings",
    answer=EmbeddingAnswer,
    statuses=GENERATION_ERRORS,
)
async def embedding(request: Request) -> Response:
    serving, body, deadline = await received(request, OllamaEmbeddingRequest)
    same = EmbedRequest(model=body.model, input=body.prompt, keep_alive=body.keep_alive)
    vectors, _ = await _embedded(request, serving, same, deadline)
    return WholeAnswer.of(request, {"embedding": floats(vectors[0]) if vectors else ()})


async def _embedded(
    request: Request, serving: Serving, body: EmbedRequest, deadline: Deadline
) -> tuple[list[bytes], int]:
    """The vectors of a request's texts, and how many tokens these are."""

    async def embedded() -> tuple[list[bytes], int]:
        async with serving.using(body.keep_alive):
            params = pooling_params(serving, body.pooling, body.dimensions)
            inputs = await _inputs(serving, body)
            asked = request, serving, deadline, serving.adapter_of(body.model)
            vectors = await pooled(inputs, params, body.dimensions, *asked)
            return vectors, sum(map(len, inputs))

    return await while_connected(request.receive, embedded(), deadline)


async def _inputs(serving: Serving, body: EmbedRequest) -> list[list[int]]:
    """The token ids of each text.

    Unless the request says otherwise, the ends of texts that do not fit into the context are left
    out, but not what encoding puts behind a text.
    """
    if body.truncate is False or not body.texts:
        return await encode_all(serving, body.texts)
    info, end = serving.client.info, serving.tokenizer.end_ids
    # No encoding of the rest could begin within the context.
    longest = info.max_model_len * info.longest_token
    inputs = await encode_all(serving, [text[:longest] for text in body.texts])
    return [_cut(token_ids, info.max_model_len - 1, end) for token_ids in inputs]


def _cut(token_ids: list[int], most: int, end: Sequence[int]) -> list[int]:
    return token_ids if len(token_ids) <= most else [*token_ids[: most - len(end)], *end]
