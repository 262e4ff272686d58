"""A chat's answer as the items of a response, and as the events that tell them.

Both are made by one reader of the chat's parts, so that a stream adds up to the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.server.responses.conversation import encoded, new_id

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
            told = self._more("response.output_text.delta", delta["content"])
            logprobs = (part["logprobs"] or {}).get("content", [])
            self.items[-1]["content"][0]["logprobs"] += logprobs
            yield {**told, "logprobs": logprobs}
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
