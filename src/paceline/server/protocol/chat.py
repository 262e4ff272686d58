"""Bodies of ``/v1/chat/completions``. Owns names, types, and which fields go together.

Keys that are not known are ignored inside messages and tools, which clients send back with what
they keep there, and refused elsewhere. Fields of OpenAI's that cannot change an answer are taken
and ignored; those that would, and are not supported, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from paceline.core.errors import RequestError
from paceline.server.protocol.foreign import INSTEAD
from paceline.server.protocol.generation import (
    NO_LIMIT,
    TAKES_FLOATS,
    ApiModel,
    GenerationFields,
    LenientModel,
    MayHaveThoughts,
    ResponseFormat,
    TopLogprobs,
    at_most,
    number_of,
    up_to,
)

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_METADATA = 64
OwnName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
"""Of a function that may be called."""
CalledName = Annotated[str, Field(min_length=1, max_length=256)]
"""Of a function that was called, which an earlier model may have misspelt."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Limit = Annotated[int, number_of("max_tokens"), TAKES_FLOATS]

LimitOrNone = Annotated[Limit | Literal[-1], TAKES_FLOATS]
"""-1 is llama.cpp's for "as far as the context goes"."""


def _text_part(value: Any) -> Any:
    """Say what other kinds of parts are missing, and not which of their keys are unknown.

    An earlier refusal of the assistant's is a part of its words, to a template.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "refusal" and "refusal" in value:
        return {"type": "text", "text": value["refusal"]}
    if isinstance(kind, str) and kind != "text":
        raise ValueError(
            f"content parts of type {kind[:40]!r} are not supported: the models served here read "
            "text; send parts of type 'text'"
        )
    return value


class TextPart(LenientModel):
    type: Literal["text"]
    text: str


ContentPart = Annotated[TextPart, BeforeValidator(_text_part)]
ContentParts = Annotated[list[ContentPart], up_to(MAX_MESSAGES, 1)]
Content = str | ContentParts


class CalledFunction(LenientModel):
    name: CalledName
    arguments: str


class MessageToolCall(LenientModel):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Role = Annotated[str, Field(pattern=r"^[a-zA-Z][a-zA-Z0-9_-]{0,63}$")]
"""OpenAI's are system, developer, user, assistant and tool; templates may know others.

No mark of a template's can be one.
"""


class ChatMessage(MayHaveThoughts):
    """One message of a conversation; ``annotations``, ``parsed`` and the like are ignored."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "the models served here read text",
        "function_call": "send tool_calls instead",
    }

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], up_to(MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        is_assistant = self.role == "assistant"
        if is_assistant:
            self.reasoning_content = self.thoughts
        for field in ("tool_calls", "reasoning_content", "refusal"):
            if getattr(self, field) is not None and not is_assistant:
                raise ValueError(f"{field} is only allowed in messages of the assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id is only allowed in messages of the role tool")
        others = (self.tool_calls, self.reasoning_content, self.refusal)
        if self.content is None and not (is_assistant and any(others)):
            raise ValueError(f"content is missing in a message of the role {self.role}")
        return self

    @property
    def text(self) -> str:
        """The content as one string: an assistant's parts are one utterance, others' are lines."""
        if isinstance(self.content, list):
            between = "" if self.role == "assistant" else "\n"
            return between.join(part.text for part in self.content)
        return self.content or self.refusal or ""


Messages = Annotated[list[ChatMessage], up_to(MAX_MESSAGES, 1)]


class FunctionDefinition(LenientModel):
    name: OwnName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(LenientModel):
    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[Tool], up_to(MAX_TOOLS)]


class FunctionName(ApiModel):
    name: str


class NamedTool(ApiModel):
    type: Literal["function"]
    function: FunctionName


ChosenFunction = Annotated[NamedTool, Tag("named-tool")]
"""With a hyphen, a tag is no part of the place that an error names."""
NO_EFFORT = "none"


def switched_by_effort(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a template, in which no effort switches thinking off under both of its names."""
    if options.get("reasoning_effort") != NO_EFFORT:
        return dict(options)
    return {"enable_thinking": False, "thinking": False, **options}


Budget = Annotated[int, Field(ge=NO_LIMIT, le=1 << 32), TAKES_FLOATS]
"""Of thoughts, in tokens."""


class ChatCompletionRequest(GenerationFields):
    """The body of ``POST /v1/chat/completions``."""

    refused: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        "functions": "send tools instead",
        "function_call": "send tool_choice instead",
        "audio": "the models served here write text",
        "prediction": "drafts are found by the server's own proposers",
        "web_search_options": "the server does not search",
        "moderation": "the server does not moderate",
        "verbosity": "options of a chat template go into chat_template_kwargs",
    }

    messages: Messages
    max_tokens: LimitOrNone | None = None
    max_completion_tokens: LimitOrNone | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    # Taken and ignored: they cannot change an answer.
    store: bool | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError.of("top_logprobs", "is only allowed with logprobs: true")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise RequestError.of("logprob_token_ids", "is only allowed with logprobs: true")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError.of("prompt_logprobs", "is only allowed without stream: true")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise RequestError.of(
                    "continue_final_message", "is true; add_generation_prompt cannot be true then"
                )
            if self.messages[-1].role != "assistant":
                raise RequestError.of(
                    "continue_final_message",
                    "is true; the last message must then be the assistant's",
                )
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError.of("tools", "names a function twice; names must differ")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            known = ", ".join(names) or "none"
            raise RequestError.of(
                "tool_choice",
                f"is {choice.function.name[:64]!r}; the functions in tools are {known}",
            )
        if (choice == "required" and not names) or (choice == "auto" and self.tools is None):
            raise RequestError.of("tool_choice", f"is {choice!r}; it is only allowed with tools")
        return self

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Options of the chat template: the effort, unless they name it themselves."""
        effort = self.reasoning_effort
        options = {} if effort is None else switched_by_effort({"reasoning_effort": effort})
        return options | (self.chat_template_kwargs or {})

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of thoughts, by vLLM's name or llama.cpp's; None is any number."""
        names = (
            self.thinking_token_budget,
            self.reasoning_budget_tokens,
            self.thinking_budget_tokens,
        )
        budget = next((each for each in names if each is not None), NO_LIMIT)
        has_none = budget == NO_LIMIT or (self.limit is not None and budget >= self.limit)
        return None if has_none else budget

    @property
    def limit_name(self) -> str:
        """The field that limits the answer; OpenAI's later name counts where both are given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have."""
        limit: int | None = getattr(self, self.limit_name)
        return None if limit == NO_LIMIT else limit
