"""An answer as Ollama tells it: pieces with words, thoughts and whole calls, then counts and times.

Takes the parts of a chat's choice or of a completion's. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from paceline.server.chat.calls.written_json import values_of
from paceline.server.http.sse import encode_json

Shape = Literal["message", "response"]
"""Where the words are: of a chat in a message, of a completion in a string."""


def timestamp(seconds: float) -> str:
    """Seconds of the epoch, as Ollama writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def line(value: Mapping[str, Any]) -> bytes:
    """One piece of a stream."""
    return encode_json(value) + b"\n"


def piece(model: str, shape: Shape, told: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
    """One of Ollama's objects.

    Args:
        told: ``content``, and ``thinking``, ``tool_calls`` and ``logprobs`` where there are some.
    """
    head: dict[str, Any] = {"model": model, "created_at": timestamp(time.time())}
    words = {name: value for name, value in told.items() if name != "logprobs"}
    logprobs = {"logprobs": told["logprobs"]} if "logprobs" in told else {}
    if shape == "message":
        head["message"] = {"role": "assistant", **words}
    else:
        head["response"] = words.pop("content")
        head |= words
    return {**head, **logprobs, "done": False, **rest}


class Telling:
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
        told = list[dict[str, Any]]()
        words, thoughts = delta.get("content"), delta.get("reasoning_content")
        if words or thoughts:
            told += self._end_call()
        logprobs = (part.get("logprobs") or {}).get("content")
        if words or thoughts or logprobs:
            told.append({"content": words or ""})
            told[-1] |= {"thinking": thoughts} if thoughts else {}
            told[-1] |= {"logprobs": logprobs} if logprobs else {}
        for begun in delta.get("tool_calls", ()):
            if "id" in begun:
                told += self._end_call()
                self._begin_call(begun)
            else:
                self._calls[-1]["arguments"] += begun["function"]["arguments"]
        if part["finish_reason"] is not None:
            self.reason = "length" if part["finish_reason"] == "length" else "stop"
            told += self._end_call()
        return told

    def _begin_call(self, call: Mapping[str, Any]) -> None:
        self._calls.append({"id": call["id"], "index": self._num_calls, **call["function"]})
        self._num_calls += 1

    def _end_call(self) -> list[dict[str, Any]]:
        calls, self._calls = self._calls, []
        return [{"content": "", "tool_calls": [_whole_call(call)]} for call in calls]


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object; an empty one where the answer ended in their middle."""
    try:
        arguments = values_of(call["arguments"])
    except (ValueError, RecursionError):
        arguments = {}
    function = {"index": call["index"], "name": call["name"], "arguments": arguments}
    return {"id": call["id"], "function": function}


def joined(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all pieces tell together."""
    whole: dict[str, Any] = {"content": ""}
    for told in pieces:
        for name, value in told.items():
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
