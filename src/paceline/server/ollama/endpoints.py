"""``POST /api/chat`` and ``/api/generate``. Owns the order of pieces in an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Generic

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.hosting.serving import Prompt, Serving
from paceline.server.http.errors import ApiError, to_api_error
from paceline.server.http.openapi import GENERATION_ERRORS, answers, errors, takes
from paceline.server.http.sse import Deadline, StreamForm, encode_json, while_connected
from paceline.server.ollama.answer import Shape, Telling, Times, joined, line, piece
from paceline.server.ollama.conversation import chat_of, completion_of
from paceline.server.ollama.fields import (
    Asked,
    ChatAnswer,
    ChatRequest,
    GenerateAnswer,
    GenerateRequest,
)
from paceline.server.openai.chat import Chat
from paceline.server.openai.common import Answering, Body, PlainRoute, received, respond
from paceline.server.openai.completions import Completion

NDJSON = "application/x-ndjson"
_WORDS = {
    "max_tokens": "num_predict",
    "response_format": "format",
    "structured_outputs": "format",
}
"""Fields of OpenAI's that errors speak of, and what they are here."""
router = APIRouter(route_class=PlainRoute)


@router.post(
    "/api/chat",
    responses=answers(ChatAnswer, NDJSON) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(ChatRequest),
)
async def chat(request: Request) -> Response:
    serving, body, deadline = await received(request, ChatRequest)
    if not body.messages:
        return await _settled(request, serving, body, deadline)
    name = serving.adapter_of(body.model) or serving.name
    asked = ToldChat(serving, chat_of(body, name), deadline, body)
    return await _respond(request, asked)


@router.post(
    "/api/generate",
    responses=answers(GenerateAnswer, NDJSON) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(GenerateRequest),
)
async def generate(request: Request) -> Response:
    serving, body, deadline = await received(request, GenerateRequest)
    if not body.prompt:
        return await _settled(request, serving, body, deadline)
    name = serving.adapter_of(body.model) or serving.name
    if body.is_plain:
        asked = completion_of(body, name)
        return await _respond(request, ToldCompletion(serving, asked, deadline, body))
    told = ToldChat(serving, chat_of(body, name), deadline, body)
    return await _respond(request, told)


async def _settled(
    request: Request, serving: Serving, body: ChatRequest | GenerateRequest, deadline: Deadline
) -> Response:
    """Load the model, or with a ``keep_alive`` of 0 unload it; that is all that is asked for."""
    shape, is_over = _shape(body), body.keep_alive == 0

    async def settle() -> None:
        if serving.resident.is_here or not is_over:
            async with serving.using(body.keep_alive):
                pass

    await while_connected(request.receive, settle(), deadline)
    reason = "unload" if is_over else "load"
    document = piece(body.model, shape, {"content": ""}, done=True, done_reason=reason)
    return Response(encode_json(document), media_type="application/json")


def _shape(body: Asked) -> Shape:
    return "message" if isinstance(body, ChatRequest) else "response"


def _renamed(error: Exception) -> ApiError:
    """An error that speaks of the fields that the request has."""
    told = to_api_error(error)
    for name, ours in _WORDS.items():
        told.message = told.message.replace(name, ours)
    return told


def _error_line(error: BaseException) -> bytes:
    """The end of a stream that failed."""
    return line({"error": to_api_error(error).message})


class _Told(Answering[Body], Generic[Body]):
    """An answer in Ollama's form, with the parts of whatever this is mixed into."""

    def __init__(self, serving: Serving, body: Body, deadline: Deadline, asked: Asked) -> None:
        super().__init__(serving, body, deadline)
        self._model = asked.model
        self.shape = _shape(asked)
        self.keep_alive = asked.keep_alive
        self._waits = not self.is_loaded
        self._telling, self._times = Telling(), Times(deadline.began)

    async def _prepare(self) -> list[Prompt]:
        if self._waits:
            self._times.note_loaded()
        return await super()._prepare()  # type: ignore[safe-super]

    def piece(self, told: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return piece(self._model, self.shape, told, **rest)

    async def document(self, request: Request) -> dict[str, Any]:
        async with aclosing(self._pieces(request)) as pieces:
            told = [each async for each in pieces if each is not None]
        return self.piece(joined(told), **self._end())

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pieces(request)) as pieces:
            async for told in pieces:
                yield b"" if told is None else line(self.piece(told))
        yield line(self.piece({"content": ""}, **self._end()))

    async def _pieces(self, request: Request) -> AsyncGenerator[dict[str, Any] | None, None]:
        """What the answer tells; None first, which says that it was accepted."""
        try:
            async with self._answers(request) as found:
                yield None
                async for each in found:
                    self._times.note_tokens()
                    for part in await self._parts(found, each):
                        for told in self._telling.take(part):
                            yield told
        except Exception as error:
            raise _renamed(error) from error

    def _end(self) -> dict[str, Any]:
        totals = self._times.totals(self._usage.document())
        return {"done": True, "done_reason": self._telling.reason, **totals}


class ToldChat(_Told[Any], Chat):
    """A chat."""


class ToldCompletion(_Told[Any], Completion):
    """A prompt that is continued as it is."""


async def _respond(request: Request, asked: ToldChat | ToldCompletion) -> Response:
    idle = line(asked.piece({"content": ""}))
    return await respond(request, asked, _error_line, StreamForm(NDJSON, idle))
