"""From the messages of a chat to the text of a prompt, by the model's own template.

Owns what templates are handed, what single ones want to have otherwise, what callers may set in
them, and where thoughts begin. Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.config.template_options import protected_among
from paceline.core.errors import RequestError, TemplateError
from paceline.request.structured_outputs import ThoughtMarks
from paceline.server.chat.answer import Wrapping
from paceline.server.chat.answer_formats import ChatFormats, ReasoningFormat
from paceline.server.chat.tool_calls.json_calls import PHI4_MARKS
from paceline.server.chat.tool_calls.values import values_of
from paceline.server.protocol.chat import (
    NO_EFFORT,
    ChatCompletionRequest,
    ChatMessage,
    MessageToolCall,
    Tool,
    switched_by_effort,
)
from paceline.text.tokenizer import Tokenizer

_THINKING_SWITCHES = ("enable_thinking", "thinking")


def prompt_text(
    tokenizer: Tokenizer, body: ChatCompletionRequest, formats: ChatFormats | None = None
) -> str:
    """The prompt of a chat. It waits for the process that renders: call it in a thread.

    Raises:
        TemplateError: there is no template, it refuses the messages, or passes its limits.
        RequestError: an option would replace what the request itself says.
    """
    formats = formats or ChatFormats.of(tokenizer)
    try:
        return _rendered(tokenizer, body, formats)
    except TemplateError:
        if any(message.tool_calls for message in body.messages):
            with contextlib.suppress(TemplateError):
                return _rendered(tokenizer, body, formats, with_text=True)
        raise


def _rendered(
    tokenizer: Tokenizer,
    body: ChatCompletionRequest,
    formats: ChatFormats,
    *,
    with_text: bool = False,
) -> str:
    options = template_options(body.template_kwargs)
    tools = None if body.tool_choice == "none" else template_tools(body.tools)
    messages = template_messages(body.messages, formats, with_text=with_text)
    if formats.has_tools_in_message:
        messages = tools_in_messages(messages, tools)
    if body.continue_final_message:
        return _continued(tokenizer, messages, tools, options)
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=tools,
        **options,
    )


async def warm_up(tokenizer: Tokenizer | None) -> None:
    """Start the process that renders, which the first chat would wait for. Raises nothing."""
    if tokenizer is not None and tokenizer.has_chat_template:
        with contextlib.suppress(RequestError):  # a template may refuse so short a chat
            messages = [{"role": "user", "content": "Hello."}]
            await asyncio.to_thread(tokenizer.apply_chat_template, messages)


def _continued(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: Mapping[str, Any],
) -> str:
    """The prompt up to the end of the last message's words, whatever the template puts there.

    A template that cuts off the blanks behind these words has taught the model to go on without
    them (as in transformers 5.24).
    """
    mark = secrets.token_hex(16)
    words = messages[-1]["content"]
    marked = {**messages[-1], "content": f"{words}{mark} "}
    text = tokenizer.apply_chat_template(
        [*messages[:-1], marked], add_generation_prompt=False, tools=tools, **options
    )
    before, has_mark, behind = text.rpartition(mark)
    if not has_mark:
        raise TemplateError(
            "continue_final_message is true, but the model's chat template leaves out the last "
            "message"
        )
    is_cut = not behind.startswith(" ") and words.strip()
    return before.rstrip() if is_cut else before


def template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """``chat_template_kwargs``; ``RequestError`` for messages, tools and special tokens."""
    if not options:
        return {}
    name = protected_among(options)
    if name is not None:
        raise RequestError.of(
            "chat_template_kwargs", f"holds {name[:60]!r}, which it cannot replace"
        )
    return dict(options)


def with_defaults(
    body: ChatCompletionRequest, defaults: Mapping[str, Any]
) -> ChatCompletionRequest:
    """The chat with the server's options of templates where it does not say otherwise.

    Whether there are thoughts has several names. What a chat says under one of them, or by its
    effort, counts under the one that the server's option has, too.
    """
    if not defaults:
        return body
    own, options = body.template_kwargs, switched_by_effort(defaults)
    wish = _thinks(own)
    if wish is not None:
        options |= {name: wish for name in _THINKING_SWITCHES if name in options}
    return body.model_copy(update={"chat_template_kwargs": options | own})


def _thinks(options: Mapping[str, Any]) -> bool | None:
    """Whether options ask for thoughts; None where they say nothing of them."""
    wishes = [options[name] for name in _THINKING_SWITCHES if isinstance(options.get(name), bool)]
    if wishes:
        return bool(wishes[0])
    effort = options.get("reasoning_effort")
    return None if effort is None else effort != NO_EFFORT


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates write them out; ``strict`` is between caller and server."""
    described = []
    for tool in tools or ():
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        if tool.function.parameters is not None:
            function["parameters"] = tool.function.parameters
        described.append({"type": "function", "function": function})
    return described or None


def thoughts_of(
    form: ReasoningFormat | None, body: ChatCompletionRequest, text: str
) -> ThoughtMarks | None:
    """Marks of the thoughts that the answer to the prompt ``text`` may begin with, or None.

    Models that think have a template that knows the marks. It may open the thoughts, or open and
    close them where thinking is switched off.
    """
    options = body.template_kwargs
    if (
        form is None
        or not form.opening
        or any(options.get(name) is False for name in _THINKING_SWITCHES)
    ):
        return None
    possible = ThoughtMarks(form.opening, form.closing)
    opened = replace(possible, opened=True)
    if body.continue_final_message and body.messages[-1].text:
        words = body.messages[-1].text
        return opened if _last(words, form.opening) > _last(words, form.closing) else None
    end = text.rstrip()
    if end.endswith(form.opening):
        return opened
    return None if end.endswith(form.closing) else possible


def wrapping_of(form: ReasoningFormat | None, text: str) -> Wrapping | None:
    """Marks around the answer to the prompt ``text``, or None if there are none."""
    if form is None or not form.answer:
        return None
    opening, closing = form.answer
    return Wrapping(opening, closing, form.tail, opened=text.rstrip().endswith(opening))


def _last(text: str, marks: Sequence[str]) -> int:
    return max(text.rfind(mark) for mark in marks)


_FIRST = {"role": "system", "content": "You are a helpful assistant with some tools."}
"""The message that holds the tools where the chat has none; as in the authors' examples."""
_RESULT = "tool_response"
"""The role of a call's result, in whose name Phi-4-mini's vocabulary has a token."""
_ID_LENGTH = 9
"""Of a call, in templates of Mistral, which refuse others."""


def template_messages(
    messages: Sequence[ChatMessage], formats: ChatFormats, *, with_text: bool = False
) -> list[dict[str, Any]]:
    """Messages as templates expect them: contents are strings, arguments of calls are objects, or
    with ``with_text`` stay the text that they came as, which some templates want.
    """
    ids = _template_ids(messages, formats)
    knows_developers = formats.knows_developers
    rendered = [
        _template_message(message, knows_developers, ids, with_text) for message in messages
    ]
    return [*map(_in_channels, rendered)] if formats.has_channels else rendered


def tools_in_messages(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages with tools, calls and results where Phi-4-mini's template takes them from: it
    has no variable for tools and passes over calls.
    """
    written = [_with_call_text(message) for message in messages]
    if tools:
        if not any(message["role"] == "system" for message in written):
            written.insert(0, _FIRST)
        at = next(i for i, message in enumerate(written) if message["role"] == "system")
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        written[at] = {**written[at], "tools": functions}
    return written


def _with_call_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {**message, "role": _RESULT}
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    text = json.dumps(calls, ensure_ascii=False).join(PHI4_MARKS)
    return {**message, "content": f"{message['content']}{text}"}


def _in_channels(message: dict[str, Any]) -> dict[str, Any]:
    """The message as gpt-oss's template takes it: one with calls has thoughts or words."""
    return (
        {**message, "content": ""}
        if message.keys() >= {"reasoning_content", "tool_calls"}
        else message
    )


def _template_ids(messages: Sequence[ChatMessage], formats: ChatFormats) -> dict[str, str]:
    """Ids of calls, as they came -> as the template wants them, where it wants others."""
    if not formats.call_ids:
        return {}
    calls = [call for message in messages for call in message.tool_calls or ()]
    if formats.call_ids == "short":
        return {call.id: _short(call.id) for call in calls if call.id}
    named = ((call.id, call.function.name) for call in calls)
    return {one: f"functions.{name}:{i}" for i, (one, name) in enumerate(named) if one}


def _short(call_id: str) -> str:
    letters = re.sub("[^a-zA-Z0-9]", "", call_id)
    return letters[-_ID_LENGTH:].rjust(_ID_LENGTH, "0")


def _template_message(
    message: ChatMessage, knows_developers: bool, ids: Mapping[str, str], with_text: bool
) -> dict[str, Any]:
    role: str = message.role
    if role == "developer" and not knows_developers:
        role = "system"
    written: dict[str, Any] = {"role": role, "content": message.text}
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            written[field] = ids.get(value, value) if field == "tool_call_id" else value
    if message.tool_calls:
        written["tool_calls"] = [
            _template_call(call, ids, with_text) for call in message.tool_calls
        ]
    return written


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
