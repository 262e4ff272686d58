"""Bodies of ``/api/chat`` and ``/api/generate``, and what they are answered with.

Owns names, types and ranges as Ollama has them, and which of its fields are without effect here or
refused. Those for sampling have the ranges of :mod:`paceline.server.protocol.common`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paceline.core.checks import seconds_of
from paceline.request.sampling_params import MAX_STOP_STRINGS
from paceline.server.protocol.chat import MAX_MESSAGES, MAX_TOOLS, ReasoningEffort, Role
from paceline.server.protocol.common import (
    MAX_NAME_LENGTH,
    MAX_NAMES_NOTED,
    MAX_TOP_LOGPROBS,
    TAKES_FLOATS,
    ApiModel,
    LenientModel,
    RepetitionPenalty,
    Seed,
    Speculation,
    StopString,
    TopP,
    Whole,
    check_window,
)
from paceline.server.protocol.completions import MAX_PROMPTS
from paceline.server.protocol.embeddings import Dimensions, Pooling
from paceline.server.protocol.neutral import Values
from paceline.server.protocol.thoughts import MayHaveThoughts

_LARGE = (1 << 31) - 1
log = logging.getLogger(__name__)


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(seconds_of)]
"""Seconds that a model stays loaded after a request, infinite for ever."""

_OTHER_SAMPLING = "use temperature, top_k, top_p and min_p"
_USUAL_WINDOW = 64
"""Ollama's ``repeat_last_n`` where a request says nothing; it changes nothing here."""
_READS_TEXT = "the models served here read text"


class Options(ApiModel):
    """How to sample; what is left out is as with ``/v1``, and what is not known without effect."""

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

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=_LARGE), TAKES_FLOATS] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_last_n: Whole | None = None
    seed: Seed | None = None
    stop: (
        StopString
        | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = None
    num_predict: Whole | None = None
    # Taken and without effect: how a model is loaded is the server's to say, and a text that
    # reaches the end of the context is not shifted.
    num_ctx: Any = None
    numa: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None
    num_thread: Any = None
    num_keep: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        """Warn of what is not known, as Ollama does."""
        if not isinstance(values, dict):
            return values
        known = {*cls._names(), *cls.refused, *cls.neutral}
        unknown = [name for name in values if name not in known]
        if unknown:
            shown = ", ".join(ascii(name[:MAX_NAME_LENGTH]) for name in unknown[:MAX_NAMES_NOTED])
            log.warning("options that are not known are without effect: %s", shown)
        return {name: value for name, value in values.items() if name in known}

    @model_validator(mode="after")
    def _check_window(self) -> Options:
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        check_window(self.repeat_last_n, penalties, usual=(_USUAL_WINDOW,))
        return self


class Asked(ApiModel):
    """What every request has that generates; ``speculative`` is ours."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | ReasoningEffort | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), TAKES_FLOATS] | None = None
    speculative: Speculation | None = None
    # Taken and without effect: a prompt that is too long is an error, and an answer ends where the
    # context does.
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class CalledFunction(LenientModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any]


class MessageCall(LenientModel):
    """A call that the model made earlier."""

    id: str | None = None
    function: CalledFunction


class InputMessage(MayHaveThoughts):
    refused: ClassVar[Mapping[str, str]] = {"images": _READS_TEXT}
    neutral: ClassVar[Mapping[str, Values]] = {"images": ([],)}

    role: Role
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(LenientModel):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(LenientModel):
    type: Literal["function"] | None = None
    function: Function


class ChatRequest(Asked):
    """The body of ``POST /api/chat``; without messages it asks whether the model is loaded."""

    messages: (
        Annotated[list[InputMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class GenerateRequest(Asked):
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
                    raise ValueError(f"{name} is only allowed without raw: true and a suffix")
        return self


class EmbedRequest(ApiModel):
    """The body of ``POST /api/embed``; ``pooling`` is ours."""

    model: Annotated[str, Field(min_length=1)]
    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    pooling: Pooling | None = None

    @property
    def texts(self) -> list[str]:
        """Those to embed; none where the input is empty."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []


class EmbeddingRequest(ApiModel):
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
            raise ValueError("model is missing")
        return self


class Answer(BaseModel):
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


class ChatAnswer(Answer):
    message: dict[str, Any]


class GenerateAnswer(Answer):
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
