"""The chat that a body asks for, told as a response. Owns what a response says besides its items,
and the order of a stream's events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request

from paceline.core.errors import RequestError
from paceline.server.chat.logprobs import ChatLogprobs, WordLogprobs
from paceline.server.hosting.serving import Prompt, Serving
from paceline.server.http.errors import ApiError, to_api_error
from paceline.server.http.security import partition
from paceline.server.http.sse import Deadline, encode_json
from paceline.server.openai.chat import Chat
from paceline.server.responses.conversation import chat_of, new_id, told
from paceline.server.responses.fields import ENCRYPTED, Item, ResponsesRequest
from paceline.server.responses.output import Output
from paceline.server.responses.store import Kept, ResponseStore

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])
# Fields of the body that the response repeats, and what they are where the body has none.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
}
# Fields of chats that errors name, and what a response calls them.
_NAMES = (("response_format", "text.format"), (".function.parameters", ".parameters"))


def store_of(request: Request) -> ResponseStore:
    store = request.app.state.responses
    assert isinstance(store, ResponseStore)
    return store


def caller_of(request: Request) -> str:
    """Whose responses a request may see: those of its API key."""
    return partition(request.scope, None)


class Responses(Chat):
    """
    Args:
        items: of the body, without references.
        before: items of the conversation that it goes on from.
    """

    def __init__(
        self,
        serving: Serving,
        body: ResponsesRequest,
        deadline: Deadline,
        items: Sequence[Any],
        before: Sequence[dict[str, Any]],
    ) -> None:
        earlier = _ITEMS.validate_python(before)
        super().__init__(serving, chat_of(body, [*earlier, *items]), deadline)
        self._before, self._input = before, [told(item) for item in items]
        self._output = Output(ENCRYPTED in (body.include or ()))
        self._num_events = 0
        self._response = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "model": body.model or serving.name,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "store": body.store is not False,
            **_repeated(body),
        }

    async def _prepare(self) -> list[Prompt]:
        try:
            prompts = await super()._prepare()
        except ApiError as error:
            raise _renamed(error) from error
        params = prompts[0].params
        self._response |= {"temperature": params.temperature, "top_p": params.top_p}
        return prompts

    def _blamed(self, error: RequestError) -> Exception:
        return _renamed(super()._blamed(error))

    def _logprobs(self) -> ChatLogprobs:
        return WordLogprobs(self._serving.texts)

    async def document(self, request: Request) -> dict[str, Any]:
        async with self._answers(request) as found:
            async for piece in found:
                for part in await self._parts(found, piece):
                    for _ in self._output.take(part):
                        pass
        return self._ended(request)

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with self._answers(request) as found:
            begun = {**self._response, "status": "in_progress", "output": [], "usage": None}
            yield b"".join(
                self._event({"type": f"response.{name}", "response": begun})
                for name in ("created", "in_progress")
            )
            async for piece in found:
                parts = await self._parts(found, piece)
                events = [self._event(each) for part in parts for each in self._output.take(part)]
                yield b"".join(events)
        document = self._ended(request)
        yield self._event({"type": f"response.{document['status']}", "response": document})

    def failure(self, error: BaseException) -> bytes:
        """The end of a stream that failed."""
        known = to_api_error(error)
        # Codes of responses are a closed list; the event before has the server's own.
        said = {
            "code": "invalid_prompt" if known.status == 400 else "server_error",
            "message": known.message,
        }
        failed = {**self._response, "status": "failed", "error": said, "output": [], "usage": None}
        event = {"type": "error", "code": known.code or known.type, "message": known.message}
        return self._event({**event, "param": known.param}) + self._event(
            {"type": "response.failed", "response": failed}
        )

    def _event(self, value: dict[str, Any]) -> bytes:
        name: str = value["type"]
        numbered = {**value, "sequence_number": self._num_events}
        self._num_events += 1
        return b"event: " + name.encode() + b"\ndata: " + encode_json(numbered) + b"\n\n"

    def _ended(self, request: Request) -> dict[str, Any]:
        """The whole response, kept where it may be."""
        is_cut = self._output.finish_reason == "length"
        document = {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items,
            "usage": self._used(),
        }
        if document["store"]:
            kept = Kept.of(document, self._before, self._input)
            store_of(request).put(caller_of(request), document["id"], kept)
        return document

    def _used(self) -> dict[str, Any]:
        usage = self._usage.document()
        used = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        return used | ({"metrics": usage["metrics"]} if "metrics" in usage else {})


def _repeated(body: ResponsesRequest) -> dict[str, Any]:
    asked = body.model_dump(by_alias=True, include=set(_REPEATED))
    repeated = {
        name: usual if asked[name] is None else asked[name] for name, usual in _REPEATED.items()
    }
    text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    return {**repeated, "text": {"format": {"type": "text"}, **text}}


def _renamed(error: Exception) -> Exception:
    """The error in the words of a body of responses."""
    if not isinstance(error, ApiError):
        return error
    for ours, theirs in _NAMES:
        error.message = error.message.replace(ours, theirs)
        error.param = error.param and error.param.replace(ours, theirs)
    return error
