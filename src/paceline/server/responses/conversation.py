"""From the items of a response to the chat that they ask for, and back to items as they are kept.

Knows no HTTP and no engine.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.errors import RequestError
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.common import GUIDED, GenerationFields
from paceline.server.responses.fields import (
    LOGPROBS,
    AllowedTools,
    CallItem,
    CallOutputItem,
    FunctionTool,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesRequest,
)

_MARK = b"paceline:"
_NOT_OF_CHATS = {"prompt_logprobs", "return_token_ids"}


def encoded(thoughts: str) -> str:
    """Thoughts as ``encrypted_content``; they are no secret, since the item has them in words."""
    return base64.b64encode(_MARK + thoughts.encode()).decode()


def decoded(text: str) -> str:
    """What :func:`encoded` was given; nothing where it is the work of another server."""
    try:
        whole = base64.b64decode(text, validate=True)
        return whole.removeprefix(_MARK).decode() if whole.startswith(_MARK) else ""
    except ValueError:
        return ""


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def told(item: Any) -> dict[str, Any]:
    """An input item as it is kept: under a name, with its words in parts."""
    prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(item.type, "fco")
    document = {"id": new_id(prefix), "status": "completed", **item.model_dump(exclude_none=True)}
    if isinstance(item, ReasoningItem):
        document["summary"] = []
    elif isinstance(item, MessageItem):
        of_whom = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, str):
            document["content"] = [{"type": of_whom, "text": item.content}]
        for part in document["content"]:
            if part["type"] == "output_text":
                part["annotations"] = []
    return document


def items_of(body: ResponsesRequest) -> list[Any]:
    """The input as items."""
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


def chat_of(body: ResponsesRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """The chat with the same words, tools and options.

    Args:
        items: those of the responses before it, and its own.

    Raises:
        ValidationError, RequestError: what the body says does not go together.
    """
    chat: dict[str, Any] = {
        name: value
        for name in GenerationFields.model_fields
        if name not in _NOT_OF_CHATS
        if (value := getattr(body, name)) is not None
    }
    if any(name in chat for name in GUIDED):
        del chat["structured_outputs"]  # which was filled from them, as the chat's will be
    for name in ("stream_options", "structured_outputs", "speculative"):
        if name in chat:
            chat[name] = chat[name].model_dump(by_alias=True, exclude_none=True)
    messages = _messages(items)
    if not messages:
        raise RequestError("input holds no words: its reasoning was encoded by another server")
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    chat["messages"] = messages
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body)
    chat |= _tools(body)
    return ChatCompletionRequest.model_validate(chat)


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    """The tools of a chat, and which of them it calls."""
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, AllowedTools):
        tools, choice = _allowed(choice, tools), choice.mode
    chat: dict[str, Any] = {}
    if tools:
        functions = [tool.model_dump(exclude={"type"}) for tool in tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice is not None and not isinstance(choice, str):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None and (tools or choice == "required"):
        chat["tool_choice"] = choice
    return chat


def _allowed(choice: AllowedTools, tools: Sequence[FunctionTool]) -> list[FunctionTool]:
    """
    Raises:
        RequestError: one that is allowed is none of the tools.
    """
    allowed, known = {tool.name for tool in choice.tools}, {tool.name for tool in tools}
    for name in sorted(allowed - known):
        told = ", ".join(sorted(known)) or "none"
        raise RequestError(f"tool_choice names {name[:64]!r}; the functions in tools are {told}")
    return [tool for tool in tools if tool.name in allowed]


def _format(body: ResponsesRequest) -> dict[str, Any]:
    assert body.text is not None
    assert body.text.format is not None
    wish = body.text.format
    if wish.type != "json_schema":
        return {"type": wish.type}
    schema = wish.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


def _text(content: str | Sequence[Part], between: str) -> str:
    if isinstance(content, str):
        return content
    return between.join(part.text or part.refusal or "" for part in content)


def _messages(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Thoughts, words and calls that follow each other are one message of the assistant."""
    messages = list[dict[str, Any]]()
    answer: dict[str, Any] = {}

    def end_answer() -> None:
        if answer:
            messages.append({"role": "assistant", "content": "", **answer})
            answer.clear()

    for item in items:
        match item:
            case ReasoningItem():
                thoughts = _text(item.content, "\n") if item.content else ""
                thoughts = thoughts or decoded(item.encrypted_content or "")
                if "content" in answer or "tool_calls" in answer:
                    end_answer()
                if thoughts:
                    before = answer.get("reasoning_content")
                    answer["reasoning_content"] = f"{before}\n{thoughts}" if before else thoughts
            case MessageItem(role="assistant"):
                if "content" in answer and "tool_calls" not in answer:
                    end_answer()
                # Words behind a call are of the message that calls.
                answer["content"] = answer.get("content", "") + _text(item.content, "")
                if item.thoughts:
                    answer.setdefault("reasoning_content", item.thoughts)
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                end_answer()
                output = _text(item.output, "\n")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case MessageItem():
                end_answer()
                messages.append({"role": item.role, "content": _text(item.content, "\n")})
    end_answer()
    return messages
