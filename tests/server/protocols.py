"""One chat by four protocols, whole and streamed, each told as one document without what is drawn.

Streams are added up as the clients do it: by the places that their events name.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from paceline.server.app import create_app
from paceline.server.http.config import ServerConfig
from tests.server.asgi import client_of
from tests.server.chats import USER, chat_tokenizer
from tests.server.fakes import FakeEngine

TOOLS = ("f", "g", "get", "weather", "add")
DRAWN = ("id", "call_id", "created", "created_at", "completed_at", "model")
DRAWN += ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Asked:
    """A fake engine's answer, character by character, behind the application.

    Attributes:
        engine: its ``cuts`` say how many characters a piece has.
    """

    def __init__(self, answer: str, template: str, **config: Any) -> None:
        tokenizer = chat_tokenizer(template)
        self.ids = [i for each in answer for i in tokenizer.encode(each, add_special_tokens=False)]
        self.engine = FakeEngine(self.ids, tokenizer, max_model_len=4096)
        self.engine.state = "ready"
        self._app = create_app(self.engine, ServerConfig(**config))

    async def told(self, protocol: str, streams: bool) -> Any:
        async with client_of(self._app) as http:
            return without_drawn(await PROTOCOLS[protocol](http, streams))


async def _post(http: httpx.AsyncClient, path: str, streams: bool, **body: Any) -> str:
    tools = body.pop("tools")
    response = await http.post(path, json={"model": "fake", "stream": streams, **body, **tools})
    assert response.status_code == 200, response.text
    return response.text


def _functions(**more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name, **more}} for name in TOOLS]}


def _events(text: str) -> list[Any]:
    """The documents of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def _chat(http: httpx.AsyncClient, streams: bool) -> Any:
    fields: dict[str, Any] = {"messages": [USER], "tools": _functions(), "logprobs": True}
    if streams:
        fields["stream_options"] = {"include_usage": True}
    text = await _post(http, "/v1/chat/completions", streams, **fields)
    if not streams:
        document = json.loads(text)
        choice = {**document["choices"][0], "usage": document["usage"]}
        for number, call in enumerate(choice["message"].get("tool_calls", ())):
            call["index"] = number
        return choice
    choice = {"message": {}, "logprobs": {"content": []}}
    for chunk in _events(text):
        for part in chunk["choices"]:
            _grow(choice["message"], part.pop("delta"))
            logprobs = part.pop("logprobs") or {}
            choice["logprobs"]["content"] += logprobs.get("content", ())
            choice |= part
        choice["usage"] = chunk["usage"]
    if "tool_calls" in choice["message"]:
        choice["message"]["content"] = choice["message"]["content"] or None
    return choice


def _grow(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for call in delta.pop("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append(call)
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for name, text in delta.items():
        message[name] = message.get(name, "") + text


async def _responses(http: httpx.AsyncClient, streams: bool) -> Any:
    tools = {"tools": [{"type": "function", "name": name, "parameters": {}} for name in TOOLS]}
    include = ["message.output_text.logprobs"]
    text = await _post(http, "/v1/responses", streams, input="Hi.", tools=tools, include=include)
    if not streams:
        return json.loads(text)
    events = _events(text)
    items = list[dict[str, Any]]()
    for event in events:
        _place(items, event)
    assert items == events[-1]["response"]["output"]
    return events[-1]["response"]


def _place(items: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Put what an event of a response tells where it says."""
    kind = event["type"].removeprefix("response.")
    if kind == "output_item.added":
        assert event["output_index"] == len(items)
        items.append(event["item"])
    elif kind == "content_part.added":
        items[event["output_index"]]["content"].append(event["part"])
    elif kind in ("output_text.delta", "reasoning_text.delta"):
        part = items[event["output_index"]]["content"][event["content_index"]]
        part["text"] += event["delta"]
        if "logprobs" in event:
            part["logprobs"] += event["logprobs"]
    elif kind == "function_call_arguments.delta":
        items[event["output_index"]]["arguments"] += event["delta"]
    elif kind == "output_item.done":
        grown = items[event["output_index"]]
        assert {**grown, "status": event["item"]["status"]} == event["item"]
        items[event["output_index"]] = event["item"]


async def _messages(http: httpx.AsyncClient, streams: bool) -> Any:
    tools = {"tools": [{"name": name, "input_schema": {"type": "object"}} for name in TOOLS]}
    fields = {"messages": [USER], "max_tokens": 2000, "tools": tools}
    text = await _post(http, "/v1/messages", streams, **fields)
    if not streams:
        return json.loads(text)
    message, arguments = dict[str, Any](), ""
    for event in _events(text):
        blocks = message.get("content", [])
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                arguments += _grow_block(blocks[-1], event["delta"])
            case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


_NAMES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
_KINDS = {"text_delta": "text", "input_json_delta": "tool_use"}


def _grow_block(block: dict[str, Any], delta: dict[str, Any]) -> str:
    """Add what a delta tells to its block; return what it tells of arguments."""
    kind = delta["type"]
    assert block["type"] == _KINDS.get(kind, "thinking")
    if kind == "input_json_delta":
        return str(delta["partial_json"])
    block[_NAMES[kind]] += delta[_NAMES[kind]]
    return ""


async def _ollama(http: httpx.AsyncClient, streams: bool) -> Any:
    fields = {"messages": [USER], "tools": _functions(parameters={}), "logprobs": True}
    text = await _post(http, "/api/chat", streams, **fields)
    if not streams:
        return json.loads(text)
    lines = [json.loads(line) for line in text.splitlines()]
    whole: dict[str, Any] = {**lines[-1], "message": {}}
    for line in lines:
        for name, value in line["message"].items():
            before = whole["message"].get(name)
            joins = before is not None and name != "role"
            whole["message"][name] = before + value if joins else value
        if "logprobs" in line:
            whole.setdefault("logprobs", [])
            whole["logprobs"] += line["logprobs"]
    return whole


PROTOCOLS: dict[str, Callable[[httpx.AsyncClient, bool], Awaitable[Any]]] = {
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
    "ollama": _ollama,
}


def without_drawn(value: Any) -> Any:
    """A document without its ids and times."""
    if isinstance(value, dict):
        return {name: without_drawn(each) for name, each in value.items() if name not in DRAWN}
    return [without_drawn(each) for each in value] if isinstance(value, list) else value
