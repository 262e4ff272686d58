"""Bodies of Ollama's API, and the chats and completions that they ask for.

Owns names, types and ranges as Ollama has them, and which of its fields are without effect here or
refused. Knows no HTTP and no engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paceline.core.checks import seconds_of
from paceline.core.errors import RequestError
from paceline.request.sampling_params import OLLAMA
from paceline.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledName,
    ChatCompletionRequest,
    OwnName,
    ReasoningEffort,
    Role,
)
from paceline.server.protocol.completions import (
    MAX_PROMPTS,
    CompletionRequest,
    Dimensions,
    PoolingKind,
)
from paceline.server.protocol.foreign import Values
from paceline.server.protocol.generation import (
    MAX_NAME_LENGTH,
    MAX_NAMES_NOTED,
    ApiModel,
    FrequencyPenalty,
    LenientModel,
    MayHaveThoughts,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Speculation,
    StopString,
    StopStrings,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    Whole,
    check_window,
    up_to,
)

log = logging.getLogger(__name__)


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(seconds_of)]
"""Seconds that a model stays loaded after a request, infinite for ever."""

_OTHER_SAMPLING = "use temperature, top_k, top_p and min_p"
_WITHOUT_EFFECT = (
    *("num_ctx", "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
    *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
    *("mirostat_tau", "mirostat_eta"),
)
"""Options that are taken: how a model is loaded is the server's to say, and a text that reaches the
end of the context is not shifted."""
_USUAL_WINDOW = 64
"""Ollama's ``repeat_last_n`` where a request says nothing; it changes nothing here."""
_READS_TEXT = "the models served here read text"


def _with_all(schema: dict[str, Any]) -> None:
    schema["properties"] |= {name: {} for name in _WITHOUT_EFFECT}


class Options(ApiModel):
    """How to sample; what is left out is as with ``/v1``, and what is not known without effect."""

    model_config = ConfigDict(json_schema_extra=_with_all)
    refused: ClassVar[Mapping[str, str]] = {
        "mirostat": _OTHER_SAMPLING,
        "typical_p": _OTHER_SAMPLING,
        "tfs_z": _OTHER_SAMPLING,
        "penalize_newline": "penalties here count every token",
    }
    neutral: ClassVar[Mapping[str, Values]] = {
        "mirostat": (0,),
        "typical_p": (1,),
        "tfs_z": (1,),
        "penalize_newline": (True,),
    }

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    repeat_last_n: Whole | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    num_predict: Whole | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        """Warn of what is not known, as Ollama does."""
        if not isinstance(values, dict):
            return values
        known = {*cls._names(), *cls.refused, *cls.neutral}
        unknown = [name for name in values if name not in known and name not in _WITHOUT_EFFECT]
        if unknown:
            shown = ", ".join(ascii(name[:MAX_NAME_LENGTH]) for name in unknown[:MAX_NAMES_NOTED])
            log.warning("options that are not known are without effect: %s", shown)
        return {name: value for name, value in values.items() if name in known}

    @model_validator(mode="after")
    def _check_window(self) -> Options:
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        check_window(self.repeat_last_n, penalties, usual=(_USUAL_WINDOW,))
        return self


class OllamaRequest(ApiModel):
    """What every request has that generates; ``speculative`` is ours."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | ReasoningEffort | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    speculative: Speculation | None = None
    # Taken and without effect: a prompt that is too long is an error, and an answer ends where the
    # context does.
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class OllamaCalledFunction(LenientModel):
    name: CalledName
    arguments: dict[str, Any]


class OllamaCall(LenientModel):
    """A call that the model made earlier."""

    id: str | None = None
    function: OllamaCalledFunction


class OllamaMessage(MayHaveThoughts):
    refused: ClassVar[Mapping[str, str]] = {"images": _READS_TEXT}
    neutral: ClassVar[Mapping[str, Values]] = {"images": ([],)}

    role: Role
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], up_to(MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(LenientModel):
    name: OwnName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(LenientModel):
    type: Literal["function"] | None = None
    function: OllamaFunction


class ChatRequest(OllamaRequest):
    """The body of ``POST /api/chat``; without messages it asks whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], up_to(MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], up_to(MAX_TOOLS)] | None = None


class GenerateRequest(OllamaRequest):
    """The body of ``POST /api/generate``; without a prompt it asks whether the model is loaded."""

    refused: ClassVar[Mapping[str, str]] = {
        "template": "the template comes with the model or by --chat-template; with raw the prompt "
        "is taken as it is",
        "images": _READS_TEXT,
        "context": "send the conversation to /api/chat",
    }
    neutral: ClassVar[Mapping[str, Values]] = {
        "template": ("",),
        "images": ([],),
        "context": ([],),
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is no message of a chat."""
        return bool(self.raw or self.suffix)

    @model_validator(mode="after")
    def _check_plain(self) -> GenerateRequest:
        if self.is_plain:
            for name in ("system", "think", "logprobs"):
                if getattr(self, name):
                    raise RequestError.of(name, "is only allowed without raw: true and a suffix")
        return self


class EmbedRequest(ApiModel):
    """The body of ``POST /api/embed``; ``pooling`` is ours."""

    model: Annotated[str, Field(min_length=1)]
    input: str | Annotated[list[str], up_to(MAX_PROMPTS)] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    pooling: PoolingKind | None = None

    @property
    def texts(self) -> list[str]:
        """Those to embed; none where the input is empty."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []


class OllamaEmbeddingRequest(ApiModel):
    """The body of ``POST /api/embeddings``."""

    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class ShowRequest(ApiModel):
    """The body of ``POST /api/show``; ``name`` is an older name of ``model``."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    @model_validator(mode="after")
    def _check_named(self) -> ShowRequest:
        if not (self.model or self.name):
            raise RequestError.of("model", "is missing")
        return self


class OllamaAnswer(BaseModel):
    """What a request that generates is answered with; durations are in nanoseconds.

    The pieces of a stream have the same shape, and the last of them the counts and durations.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatAnswer(OllamaAnswer):
    message: dict[str, Any]


class GenerateAnswer(OllamaAnswer):
    response: str
    thinking: str | None = None


class EmbedAnswer(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingAnswer(BaseModel):
    embedding: list[float]


_RENAMED = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Options that have another name in a body of OpenAI's."""


class _Cut:
    wording: ClassVar[Mapping[str, str]] = {
        "response_format": "format",
        "structured_outputs": "format",
    }
    is_cut_to_context: ClassVar[bool] = True
    unstated_sampling: ClassVar[Mapping[str, float]] = OLLAMA


class _CutChat(_Cut, ChatCompletionRequest):
    """A chat whose limit ends at the latest where the context does."""


class _CutCompletion(_Cut, CompletionRequest):
    """The same of a completion."""


def chat_of(body: ChatRequest | GenerateRequest, model: str) -> ChatCompletionRequest:
    """The chat with the same words, tools and options.

    Raises:
        ValidationError: what the body says does not go together.
    """
    chat: dict[str, Any] = {"model": model, **_common(body)}
    if isinstance(body, ChatRequest):
        chat["messages"] = [_chat_message(message) for message in body.messages or ()]
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


def _common(body: OllamaRequest) -> dict[str, Any]:
    options = (body.options or Options()).model_dump(exclude={"repeat_last_n"})
    common = {_RENAMED.get(name, name): value for name, value in options.items()}
    if (common["max_tokens"] or 0) <= 0:  # as far as the context goes
        common["max_tokens"] = None
    common["stop"] = common["stop"] or None
    if body.speculative is not None:
        common["speculative"] = body.speculative.model_dump()
    return {**common, "stream": body.is_streamed}


def _chat_message(message: OllamaMessage) -> dict[str, Any]:
    chat_message: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.role == "assistant":
        chat_message["reasoning_content"] = message.thoughts or None
        calls = [
            {"id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
            for call in message.tool_calls or ()
            for arguments in [json.dumps(call.function.arguments, ensure_ascii=False)]
        ]
        chat_message["tool_calls"] = calls or None
    if message.role == "tool":
        chat_message |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return chat_message


def _tool(tool: OllamaTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump()}
