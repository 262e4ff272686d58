"""Bodies of ``/v1/responses``, the chats that their items ask for, and items as they are kept.

Owns names, types and ranges, as OpenAI has them. Knows no HTTP and no engine.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, Tag, model_validator

from paceline.core.errors import RequestError
from paceline.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_TOOLS,
    CalledName,
    ChatCompletionRequest,
    Limit,
    OwnName,
    ReasoningEffort,
)
from paceline.server.protocol.foreign import INSTEAD
from paceline.server.protocol.generation import (
    GUIDED,
    ApiModel,
    GenerationFields,
    LenientModel,
    MayHaveThoughts,
    TopLogprobs,
    Whole,
    at_most,
    by_kind,
    of_kinds,
    up_to,
)

MAX_ITEMS = MAX_MESSAGES
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_ELSEWHERE = ("prompt_logprobs", "return_token_ids", "return_origins")


class ItemPart(LenientModel):
    """Some text; what else a part of an answer has comes back with it and is not looked at."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> ItemPart:
        if self.text is None and self.refusal is None:
            raise ValueError(f"a content part of type {self.type[:40]!r} has no text")
        return self


Parts = Annotated[
    list[Annotated[ItemPart, of_kinds(PARTS, "content parts")]],
    up_to(MAX_ITEMS),
]


class MessageItem(MayHaveThoughts):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class CallItem(LenientModel):
    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: str


class CallOutputItem(LenientModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(LenientModel):
    """Thoughts of an earlier answer, in words or as this server encoded them."""

    type: Literal["reasoning"]
    content: Parts | None = None
    encrypted_content: str | None = None


class ReferenceItem(LenientModel):
    """An item of the output of a kept response."""

    type: Literal["item_reference"]
    id: str


Item = Annotated[
    Annotated[MessageItem, Tag("type-message")]
    | Annotated[CallItem, Tag("type-function_call")]
    | Annotated[CallOutputItem, Tag("type-function_call_output")]
    | Annotated[ReasoningItem, Tag("type-reasoning")]
    | Annotated[ReferenceItem, Tag("type-item_reference")],
    by_kind("message"),
    of_kinds(ITEMS, "items"),
]
Items = Annotated[list[Item], up_to(MAX_ITEMS, 1)]


class FunctionTool(LenientModel):
    type: Literal["function"]
    name: OwnName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


FunctionItem = Annotated[FunctionTool, of_kinds(("function",), "tools")]


class ChosenTool(ApiModel):
    type: Literal["function"]
    name: str


class AllowedTools(ApiModel):
    """The model may call only these of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[ChosenTool, of_kinds(("function",), "tools")]],
        up_to(MAX_TOOLS, 1),
    ]


ToolChoice = Annotated[
    Annotated[ChosenTool, Tag("type-function")]
    | Annotated[AllowedTools, Tag("type-allowed_tools")],
    by_kind(),
    of_kinds(("function", "allowed_tools"), "tool choices"),
]


class TextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if (self.schema_ is None) == (self.type == "json_schema"):
            raise ValueError("schema is for text.format.type json_schema, and needed there")
        return self


class Text(ApiModel):
    """``verbosity`` is taken and without effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(ApiModel):
    """Only the effort counts. There are no summaries: thoughts are told as they are."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesRequest(GenerationFields):
    """The body of ``POST /v1/responses``; what completions have for sampling applies too."""

    refused: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        "conversation": "send previous_response_id, or all items",
        "prompt": "templates of prompts are not kept here",
        "max_tokens": "send max_output_tokens instead",
        "max_completion_tokens": "send max_output_tokens instead",
        "messages": "send input instead",
        "response_format": "send text.format instead",
        "reasoning_effort": "send reasoning.effort instead",
        "context_management": "conversations are not compacted here",
        "moderation": "the server does not moderate",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.neutral,
        "background": (False,),
    }

    input: str | Items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: Annotated[list[str], up_to(None)] | None = None
    max_output_tokens: Limit | None = None
    top_logprobs: TopLogprobs | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionItem], up_to(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    # Taken and ignored: they cannot change an answer.
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Whole | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_answerable(self) -> ResponsesRequest:
        if self.n not in (None, 1):
            raise RequestError.of("n", f"is {self.n}; a response is one answer")
        for name in _ELSEWHERE:
            if getattr(self, name) is not None and getattr(self, name) is not False:
                raise RequestError.of(name, "is only allowed in /v1/chat/completions")
        return self


class ResponseBody(BaseModel):
    """What ``/v1/responses`` answers with in one body."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


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


def kept_item(item: Any) -> dict[str, Any]:
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


class _ResponsesChat(ChatCompletionRequest):
    wording: ClassVar[Mapping[str, str]] = {
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "function.parameters": "parameters",
    }


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
        raise RequestError.of(
            "input", "holds no words: its reasoning was encoded by another server"
        )
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
    return _ResponsesChat.model_validate(chat)


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
        names = ", ".join(sorted(known)) or "none"
        raise RequestError.of(
            "tool_choice", f"names {name[:64]!r}; the functions in tools are {names}"
        )
    return [tool for tool in tools if tool.name in allowed]


def _format(body: ResponsesRequest) -> dict[str, Any]:
    assert body.text is not None
    assert body.text.format is not None
    wish = body.text.format
    if wish.type != "json_schema":
        return {"type": wish.type}
    schema = wish.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


def _text(content: str | Sequence[ItemPart], between: str) -> str:
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
