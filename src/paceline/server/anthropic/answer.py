"""A chat's answer as one of Anthropic's messages, whole or as events.

Thoughts, words and calls are blocks, in the order in which the chat tells them. The signature of
thoughts is their digest: it comes back with them and is not looked at.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from paceline.server.sse import encode_json

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def event(value: dict[str, Any]) -> bytes:
    """One event, named by its type."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode_json(value) + b"\n\n"


def usage_of(usage: dict[str, Any]) -> dict[str, int]:
    """Anthropic's usage, of OpenAI's."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def stop_of(choice: dict[str, Any], stop_sequences: Sequence[str]) -> dict[str, Any]:
    """Why a choice ended; its template's own stop strings are the end of a turn."""
    found = choice["stop_reason"]
    if choice["finish_reason"] == "stop" and found in stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    return {"stop_reason": _REASONS[choice["finish_reason"]], "stop_sequence": None}


def blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The content of a whole message of a chat."""
    blocks = list[dict[str, Any]]()
    thoughts = message.get("reasoning_content")
    if thoughts:
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": _signature(thoughts)})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        called = {"id": _tool_id(call["id"]), "name": function["name"]}
        blocks.append({"type": "tool_use", **called, "input": _input(function["arguments"])})
    return blocks


class MessageEvents:
    """The events of one message."""

    def __init__(self, head: dict[str, Any], stop_sequences: Sequence[str]) -> None:
        self._head, self._stops = head, stop_sequences
        self._index = -1
        self._kind = ""  # of the block that is open
        self._thoughts = ""
        self._end: dict[str, Any] = {}

    def begin(self, usage: dict[str, int]) -> bytes:
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        start = {"type": "message_start", "message": {**self._head, **empty}}
        return event(start) + event({"type": "ping"})

    def take(self, part: dict[str, Any]) -> bytes:
        """What a part of the chat's choice adds."""
        delta, told = part["delta"], b""
        thoughts, words = delta.get("reasoning_content"), delta.get("content")
        if thoughts:
            self._thoughts += thoughts
            told += self._opened("thinking", {"thinking": "", "signature": ""})
            told += self._delta("thinking_delta", thinking=thoughts)
        if words:
            told += self._opened("text", {"text": ""}) + self._delta("text_delta", text=words)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                told += self._closed()
                named = {"id": _tool_id(call["id"]), "name": function["name"], "input": {}}
                told += self._opened("tool_use", named)
            if function["arguments"]:
                told += self._delta("input_json_delta", partial_json=function["arguments"])
        if part["finish_reason"] is not None:
            self._end = stop_of(part, self._stops)
        return told

    def end(self, usage: dict[str, int]) -> bytes:
        last = {"type": "message_delta", "delta": self._end, "usage": usage}
        return self._closed() + event(last) + event({"type": "message_stop"})

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        """The block that what follows goes into; the one before it ends where it is another."""
        if self._kind == kind:
            return b""
        before = self._closed()
        self._index, self._kind = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index}
        return before + event({**start, "content_block": {"type": kind, **block}})

    def _delta(self, kind: str, **more: str) -> bytes:
        delta = {"type": kind, **more}
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _closed(self) -> bytes:
        if not self._kind:
            return b""
        told = b""
        if self._kind == "thinking":
            told = self._delta("signature_delta", signature=_signature(self._thoughts))
            self._thoughts = ""
        self._kind = ""
        return told + event({"type": "content_block_stop", "index": self._index})


def _signature(thoughts: str) -> str:
    digest = hashlib.sha256(thoughts.encode("utf-8", "surrogatepass")).digest()
    return base64.b64encode(digest).decode()


def _tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; empty where the answer ended in their middle."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
