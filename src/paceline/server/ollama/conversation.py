"""From a body of Ollama's to the chat or the completion that it asks for.

Knows no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.request.sampling_defaults import OLLAMA
from paceline.server.ollama.fields import Asked, ChatRequest, GenerateRequest, InputMessage, Tool
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.completions import CompletionRequest

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "num_predict": "max_tokens",
}
"""Options, and what they are in a body of OpenAI's."""


class _CutChat(ChatCompletionRequest):
    is_cut_to_context: ClassVar[bool] = True
    unstated_sampling: ClassVar[Mapping[str, float]] = OLLAMA


class _CutCompletion(CompletionRequest):
    is_cut_to_context: ClassVar[bool] = True
    unstated_sampling: ClassVar[Mapping[str, float]] = OLLAMA


def chat_of(body: ChatRequest | GenerateRequest, model: str) -> ChatCompletionRequest:
    """The chat with the same words, tools and options.

    Raises:
        ValidationError: what the body says does not go together.
    """
    chat: dict[str, Any] = {"model": model, **_common(body)}
    if isinstance(body, ChatRequest):
        chat["messages"] = [_told(message) for message in body.messages or ()]
        chat["tools"] = [_tool(tool) for tool in body.tools or ()] or None
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        chat["messages"] = [*system, {"role": "user", "content": body.prompt}]
    if isinstance(body.think, bool):
        chat["chat_template_kwargs"] = {"enable_thinking": body.think, "thinking": body.think}
    elif body.think is not None:
        chat["reasoning_effort"] = body.think
    if body.format == "json":
        chat["response_format"] = {"type": "json_object"}
    elif body.format:
        schema = {"schema": body.format}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return _CutChat.model_validate(chat)


def completion_of(body: GenerateRequest, model: str) -> CompletionRequest:
    """The completion of a prompt that is taken as it is; raises as :func:`chat_of`."""
    asked: dict[str, Any] = {
        "model": model,
        "prompt": body.prompt,
        "suffix": body.suffix,
        **_common(body),
    }
    if body.format:
        shape = {"json_object": True} if body.format == "json" else {"json": body.format}
        asked["structured_outputs"] = shape
    return _CutCompletion.model_validate(asked)


def _common(body: Asked) -> dict[str, Any]:
    options = {} if body.options is None else body.options.model_dump(include={*_NAMES, "stop"})
    told = {_NAMES[name]: value for name, value in options.items() if name in _NAMES}
    if (told.get("max_tokens") or 0) <= 0:  # as far as the context goes
        told["max_tokens"] = None
    told["stop"] = options.get("stop") or None
    if body.speculative is not None:
        told["speculative"] = body.speculative.model_dump()
    return {**told, "stream": body.is_streamed}


def _told(message: InputMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.role == "assistant":
        told["reasoning_content"] = message.thoughts or None
        calls = [
            {"id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
            for call in message.tool_calls or ()
            for arguments in [json.dumps(call.function.arguments, ensure_ascii=False)]
        ]
        told["tool_calls"] = calls or None
    if message.role == "tool":
        told |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return told


def _tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump()}
