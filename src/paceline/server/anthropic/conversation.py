"""From a body of Anthropic's to the chat that it asks for. Knows no HTTP and no engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.server.anthropic.fields import (
    Conversation,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.server.protocol.chat import ChatCompletionRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stream", "speculative")


def chat_of(body: Conversation) -> ChatCompletionRequest:
    """The chat with the same words, tools and options."""
    messages = [*_system(body), *(told for each in body.messages for told in _told(each))]
    chat: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body)}
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        chat["continue_final_message"] = True
    thinking = body.thinking
    if thinking is not None:
        is_on = thinking.type != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": is_on, "thinking": is_on}
        chat["thinking_token_budget"] = thinking.budget_tokens
    output = body.output_config
    if output is not None and output.format is not None:
        schema = {"schema": output.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output is not None and output.effort is not None:
        chat["reasoning_effort"] = output.effort
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, name) for name in _SAME if name != "speculative"}
        chat["stop"] = body.stop_sequences or None
        if body.speculative is not None:
            chat["speculative"] = body.speculative.model_dump()
    return ChatCompletionRequest.model_validate(chat)


def _system(body: Conversation) -> list[dict[str, Any]]:
    if not body.system:
        return []
    return [{"role": "system", "content": _joined(body.system, "\n")}]


def _joined(content: str | Sequence[TextBlock] | None, between: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(block.text for block in content)


def _told(message: InputMessage) -> Iterator[dict[str, Any]]:
    """The messages of a chat that a message is: results of tools are messages of their own."""
    content = message.content
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if message.role == "user":
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                content = _joined(block.content, "\n")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if texts or not blocks:
            yield {"role": "user", "content": _joined(texts, "\n")}
        return
    told: dict[str, Any] = {"role": "assistant", "content": _joined(texts, "")}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    told["reasoning_content"] = "\n".join(thoughts) if thoughts else message.thoughts
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        told["tool_calls"] = calls
    yield told


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _tools(body: Conversation) -> dict[str, Any]:
    if not body.tools:
        return {}
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        for tool in body.tools
    ]
    chosen: dict[str, Any] = {
        "tools": [{"type": "function", "function": function} for function in functions]
    }
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        chosen["tool_choice"] = _CHOICES.get(choice.type, named)
        chosen["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chosen
