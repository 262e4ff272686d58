"""A chat's answer as a response: its items, the events that tell them, and what is kept of it.

Items and events are made by one reader of the chat's parts, so that a stream adds up to the
response. Responses are kept as JSON, bounded in bytes and in time; what was used longest ago goes
first. Whose they are is part of their name, so that no key finds another key's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request

from paceline.server.hosting.serving import EncodedPrompt, Serving
from paceline.server.http.errors import to_api_error
from paceline.server.http.security import partition
from paceline.server.http.sse import Deadline, encode_json, named_event
from paceline.server.openai.chat import ServedChat
from paceline.server.responses.request import (
    ENCRYPTED,
    Item,
    ResponsesRequest,
    chat_of,
    encoded,
    kept_item,
    new_id,
)

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


def store_of(request: Request) -> ResponseStore:
    store = request.app.state.responses
    assert isinstance(store, ResponseStore)
    return store


def caller_of(request: Request) -> str:
    """Whose responses a request may see: those of its API key."""
    return partition(request.scope, None)


class Responses(ServedChat):
    """
    Args:
        items: of the body, without references.
        before: items of the conversation that it goes on from.
    """

    _only_words_have_logprobs = True

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
        self._before, self._input = before, [kept_item(item) for item in items]
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

    async def _prepare(self) -> list[EncodedPrompt]:
        prompts = await super()._prepare()
        params = prompts[0].params
        self._response |= {"temperature": params.temperature, "top_p": params.top_p}
        return prompts

    async def document(self, request: Request) -> dict[str, Any]:
        async with self._answers(request) as answers:
            async for piece in answers:
                for part in await self._parts(answers, piece):
                    for _ in self._output.take(part):
                        pass
        return self._ended(request)

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with self._answers(request) as answers:
            begun = {**self._response, "status": "in_progress", "output": [], "usage": None}
            yield b"".join(
                self._event({"type": f"response.{name}", "response": begun})
                for name in ("created", "in_progress")
            )
            async for piece in answers:
                parts = await self._parts(answers, piece)
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
        self._num_events += 1
        return named_event({**value, "sequence_number": self._num_events - 1})

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


Event = dict[str, Any]


class Output:
    """The items of one response while they grow.

    Args:
        encodes: thoughts are also told as ``encrypted_content``.

    Attributes:
        items: all of them; the last one may go on.
        finish_reason: of the chat, once it has ended.
    """

    def __init__(self, encodes: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self._encodes = encodes
        self._is_open = False

    def take(self, part: dict[str, Any]) -> Iterator[Event]:
        """What a part of the chat's choice adds."""
        delta = part["delta"]
        if delta.get("reasoning_content"):
            yield from self._open("reasoning")
            yield self._more("response.reasoning_text.delta", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._open("message")
            more = self._more("response.output_text.delta", delta["content"])
            logprobs = (part["logprobs"] or {}).get("content", [])
            self.items[-1]["content"][0]["logprobs"] += logprobs
            yield {**more, "logprobs": logprobs}
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._open("function_call", call_id=call["id"], name=function["name"])
            if function["arguments"]:
                self.items[-1]["arguments"] += function["arguments"]
                kind = "response.function_call_arguments.delta"
                yield {**self._place(kind), "delta": function["arguments"]}
        if part["finish_reason"] is not None:
            self.finish_reason = part["finish_reason"]
            if not self.items:
                yield from self._open("message")
            yield from self._close("completed" if self.finish_reason != "length" else "incomplete")

    def _open(self, kind: str, **call: str) -> Iterator[Event]:
        """The item that what follows goes into; the one before it ends where it is another."""
        if self._is_open and self.items[-1]["type"] == kind != "function_call":
            return
        yield from self._close("completed")
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"id": new_id("msg"), "role": "assistant", "content": [part]}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item |= {"id": new_id("rs"), "summary": [], "content": [part]}
        else:
            item |= {"id": new_id("fc"), **call, "arguments": ""}
        self.items.append(item)
        self._is_open = True
        index = len(self.items) - 1
        empty = {**item, "content": []} if "content" in item else item
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(empty)}
        if "content" in item:
            yield {**self._place("response.content_part.added", True), "part": dict(part)}

    def _more(self, kind: str, text: str) -> Event:
        self.items[-1]["content"][0]["text"] += text
        return {**self._place(kind, True), "delta": text}

    def _place(self, kind: str, in_content: bool = False) -> Event:
        place = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        return {"type": kind, **place, **({"content_index": 0} if in_content else {})}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = self._place("response.function_call_arguments.done")
            yield {**done, "name": item["name"], "arguments": item["arguments"]}
        else:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            done = {**self._place(f"response.{kind}.done", True), "text": part["text"]}
            yield done | ({"logprobs": part["logprobs"]} if kind == "output_text" else {})
            yield {**self._place("response.content_part.done", True), "part": part}
            if item["type"] == "reasoning" and self._encodes:
                item["encrypted_content"] = encoded(part["text"])
        index = len(self.items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": item}


MAX_BYTES = 64 << 20
MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A response and what was said up to its end, each as JSON.

    Attributes:
        document: as it was answered.
        input: its own input items.
        items: all items of the conversation, its output included.
        output_ids: of the items of its output.
    """

    document: bytes
    input: bytes
    items: bytes
    output_ids: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        document: dict[str, Any],
        before: Sequence[dict[str, Any]],
        input: Sequence[dict[str, Any]],
    ) -> Kept:
        """Args: before: items of the conversation that the response went on from."""
        items = [*before, *input, *document["output"]]
        ids = tuple(item["id"] for item in document["output"])
        return cls(encode_json(document), encode_json(input), encode_json(items), ids)

    @property
    def num_bytes(self) -> int:
        return len(self.document) + len(self.input) + len(self.items)


class ResponseStore:
    """See the module's docstring."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._max_seconds, self._clock = max_bytes, max_seconds, clock
        # What ends first stands first: whoever uses one moves it to the end.
        self._kept: OrderedDict[tuple[str, str], tuple[Kept, float]] = OrderedDict()
        self._owners: dict[tuple[str, str], str] = {}  # of items of outputs
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, caller: str, response_id: str, kept: Kept) -> None:
        """Keep a response, unless it is larger than all that there is room for."""
        self.drop(caller, response_id)
        if kept.num_bytes <= self._max_bytes:
            self._kept[caller, response_id] = kept, self._clock() + self._max_seconds
            self.num_bytes += kept.num_bytes
            self._owners |= {(caller, item_id): response_id for item_id in kept.output_ids}
        self._make_room()

    def find(self, caller: str, response_id: str) -> Kept | None:
        """None where there is no such response, or no more."""
        self._make_room()
        kept = self._kept.pop((caller, response_id), None)
        if kept is None:
            return None
        self._kept[caller, response_id] = kept[0], self._clock() + self._max_seconds
        return kept[0]

    def owner(self, caller: str, item_id: str) -> str | None:
        """The id of the response whose output an item is of; None where it is not kept."""
        return self._owners.get((caller, item_id))

    def drop(self, caller: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        kept = self._kept.pop((caller, response_id), None)
        if kept is None:
            return False
        self.num_bytes -= kept[0].num_bytes
        for item_id in kept[0].output_ids:
            del self._owners[caller, item_id]
        return True

    def _make_room(self) -> None:
        while self._kept:
            name, (_, until) = next(iter(self._kept.items()))
            if self.num_bytes <= self._max_bytes and until > self._clock():
                return
            self.drop(*name)
