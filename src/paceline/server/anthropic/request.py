"""Bodies of ``/v1/messages``, and the chats that they ask for.

Owns names, types and ranges, as Anthropic has them. Keys that are not known are ignored, since
agents send those of every beta; what would change an answer and is not supported is refused by
name. Knows no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, Tag, model_validator

from paceline.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledName,
    ChatCompletionRequest,
    Limit,
    OwnName,
    ReasoningEffort,
)
from paceline.server.protocol.generation import (
    TAKES_FLOATS,
    LenientModel,
    MayHaveThoughts,
    MinP,
    Seed,
    Speculation,
    StopStrings,
    Temperature,
    TopK,
    TopP,
    by_kind,
    of_kinds,
    up_to,
)

_READ_TEXT = ": the models served here read text"
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class TextBlock(LenientModel):
    type: Literal["text"]
    text: str


TextAlone = Annotated[TextBlock, of_kinds(("text",), "content blocks", _READ_TEXT)]


class ThinkingBlock(LenientModel):
    """Thoughts of an earlier answer; the signature is taken as it is."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(LenientModel):
    """Thoughts of another model, which nobody here can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(LenientModel):
    type: Literal["tool_use"]
    id: str
    name: CalledName
    input: dict[str, Any]


class ToolResultBlock(LenientModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextAlone], up_to(None)] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("type-text")]
    | Annotated[ThinkingBlock, Tag("type-thinking")]
    | Annotated[RedactedThinkingBlock, Tag("type-redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("type-tool_use")]
    | Annotated[ToolResultBlock, Tag("type-tool_result")],
    by_kind(),
    of_kinds(_BLOCKS, "content blocks", _READ_TEXT),
]
Blocks = Annotated[list[Block], up_to(MAX_MESSAGES)]


_ROLE_OF = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
"""Whose message a block may stand in; text may stand in both."""


class AnthropicMessage(MayHaveThoughts):
    role: Literal["user", "assistant"]
    content: str | Blocks

    @model_validator(mode="after")
    def _is_of_its_role(self) -> Self:
        """A block that nobody would read is refused, as Anthropic's API does."""
        for block in () if isinstance(self.content, str) else self.content:
            role = _ROLE_OF.get(block.type, self.role)
            if role != self.role:
                raise ValueError(
                    f"messages: a block of type {block.type} may stand in messages of role "
                    f"{role!r} only, not of {self.role!r}"
                )
        return self


class AnthropicTool(LenientModel):
    """A tool that the caller runs; those that Anthropic's servers run have another type."""

    type: Literal["custom"] | None = None
    name: OwnName
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(LenientModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(LenientModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=1 << 32), TAKES_FLOATS] | None = None


class OutputFormat(LenientModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientModel):
    format: OutputFormat | None = None
    effort: ReasoningEffort | None = None


class Metadata(LenientModel):
    user_id: str | None = None


class AnthropicConversation(LenientModel):
    """The body of ``POST /v1/messages/count_tokens``, and what one of ``/v1/messages`` has too."""

    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "the server calls no tools itself",
        "container": "the server runs no code",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mcp_servers": ([],)}

    model: str
    messages: Annotated[list[AnthropicMessage], up_to(MAX_MESSAGES, 1)]
    system: str | Annotated[list[TextAlone], up_to(MAX_MESSAGES)] | None = None
    tools: Annotated[list[AnthropicTool], up_to(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(AnthropicConversation):
    """The body of ``POST /v1/messages``; ``seed``, ``min_p`` and ``speculative`` are ours."""

    max_tokens: Limit
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    seed: Seed | None = None
    min_p: MinP | None = None
    speculative: Speculation | None = None


class OutputTokensDetails(BaseModel):
    """``thinking_tokens`` are those of thoughts and of their marks."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """``input_tokens`` are those that were computed; the others came from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(BaseModel):
    """What ``/v1/messages`` answers with in one body."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stream")


class _MessagesChat(ChatCompletionRequest):
    wording: ClassVar[Mapping[str, str]] = {
        "response_format": "output_config.format",
        "function.parameters": "input_schema",
    }


def chat_of(body: AnthropicConversation) -> ChatCompletionRequest:
    """The chat with the same words, tools and options."""
    system = [{"role": "system", "content": _joined(body.system, "\n")}] if body.system else []
    messages = [*system, *(message for each in body.messages for message in _chat_messages(each))]
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
        chat |= {name: getattr(body, name) for name in _SAME}
        chat["stop"] = body.stop_sequences or None
        if body.speculative is not None:
            chat["speculative"] = body.speculative.model_dump()
    return _MessagesChat.model_validate(chat)


def _joined(content: str | Sequence[TextBlock] | None, between: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(block.text for block in content)


def _chat_messages(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
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
    answer: dict[str, Any] = {"role": "assistant", "content": _joined(texts, "")}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    answer["reasoning_content"] = "\n".join(thoughts) if thoughts else message.thoughts
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        answer["tool_calls"] = calls
    yield answer


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _tools(body: AnthropicConversation) -> dict[str, Any]:
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
