"""Earlier messages of a chat as templates expect them: words, thoughts, calls and their results.

Owns what single templates want to have otherwise. Renders nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.server.chat.calls.json_formats import PHI4_MARKS
from paceline.server.chat.calls.written_json import values_of
from paceline.server.chat.harmony import CHANNEL
from paceline.server.protocol.chat import ChatMessage, MessageToolCall
from paceline.text.tokenizer import Tokenizer

_WITH_TOOLS = "message['tools']"
"""What Phi-4-mini's template takes the tools from: a text in the message of the system."""
_FIRST = {"role": "system", "content": "You are a helpful assistant with some tools."}
"""The message that holds the tools where the chat has none; as in the authors' examples."""
_RESULT = "tool_response"
"""The role of a call's result, in whose name Phi-4-mini's vocabulary has a token."""
_ID_LENGTH = 9
"""Of a call, in templates of Mistral, which refuse others."""


def template_messages(
    messages: Sequence[ChatMessage], tokenizer: Tokenizer, *, with_text: bool = False
) -> list[dict[str, Any]]:
    """Messages as templates expect them: contents are strings, arguments of calls are objects.

    Args:
        with_text: arguments stay the text that they came as, which some templates want.
    """
    knows_developers = tokenizer.template_mentions("developer")
    ids = _template_ids(messages, tokenizer)
    told = [_template_message(message, knows_developers, ids, with_text) for message in messages]
    in_channels = all(map(tokenizer.template_mentions, (CHANNEL, "message.thinking")))
    return [*map(_in_channels, told)] if in_channels else told


def tools_in_messages(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The messages with tools, calls and results where Phi-4-mini's template takes them from.

    It has no variable for tools and passes over calls, so that these are written as the model does.
    """
    if not tokenizer.template_mentions(_WITH_TOOLS):
        return messages
    told = [_with_call_text(message) for message in messages]
    if tools:
        if not any(message["role"] == "system" for message in told):
            told.insert(0, _FIRST)
        at = next(i for i, message in enumerate(told) if message["role"] == "system")
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        told[at] = {**told[at], "tools": functions}
    return told


def _with_call_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {**message, "role": _RESULT}
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    text = json.dumps(calls, ensure_ascii=False).join(PHI4_MARKS)
    return {**message, "content": f"{message['content']}{text}"}


def _in_channels(told: dict[str, Any]) -> dict[str, Any]:
    """The message as gpt-oss's template takes it: one with calls has thoughts or words."""
    return {**told, "content": ""} if told.keys() >= {"reasoning_content", "tool_calls"} else told


def _template_ids(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> dict[str, str]:
    """Ids of calls, as they came -> as the template wants them, where it wants others."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    if tokenizer.template_mentions("<|tool_call_argument_begin|>"):  # Kimi writes them out
        named = ((call.id, call.function.name) for call in calls)
        return {one: f"functions.{name}:{i}" for i, (one, name) in enumerate(named) if one}
    if tokenizer.template_mentions("[TOOL_CALLS]"):
        return {call.id: _short(call.id) for call in calls if call.id}
    return {}


def _short(call_id: str) -> str:
    letters = re.sub("[^a-zA-Z0-9]", "", call_id)
    return letters[-_ID_LENGTH:].rjust(_ID_LENGTH, "0")


def _template_message(
    message: ChatMessage, knows_developers: bool, ids: Mapping[str, str], with_text: bool
) -> dict[str, Any]:
    role: str = message.role
    if role == "developer" and not knows_developers:
        role = "system"
    told: dict[str, Any] = {"role": role, "content": message.text}
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            told[field] = ids.get(value, value) if field == "tool_call_id" else value
    if message.tool_calls:
        told["tool_calls"] = [_template_call(call, ids, with_text) for call in message.tool_calls]
    return told


def _template_call(
    call: MessageToolCall, ids: Mapping[str, str], with_text: bool
) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    function = {"name": call.function.name, "arguments": text if with_text else _arguments(text)}
    known = {} if call.id is None else {"id": ids.get(call.id, call.id)}
    return {**known, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """The object; a call that was cut short has none, and the template gets what there is."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = values_of(text)
        if isinstance(parsed, dict):
            return parsed
    return text
