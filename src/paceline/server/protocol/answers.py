"""What ``/v1/chat/completions`` answers with, and what describes a server. Owns names and types."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from paceline.server.protocol.chat import MessageToolCall
from paceline.server.protocol.completions import UsageBody

UNENFORCED = "x-paceline-unenforced-schema-keywords"
"""The header of an answer whose schema has keywords that no grammar can enforce: their names."""


class ChatResponseMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatResponseMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatCompletionResponse(BaseModel):
    """What a chat is answered with; events of a stream have ``delta`` in place of ``message``."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody | None


class ModelMeta(BaseModel):
    """The model's size under llama.cpp's names; ``size`` is in bytes, as the weights are stored."""

    n_vocab: int
    n_embd: int
    n_params: int
    size: int


class Sampling(BaseModel):
    """How a request that says nothing is sampled, and whose choice that is."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    source: str


class ModelCard(BaseModel):
    """One name under which the model is served, or an adapter of the model ``parent``.

    ``promise`` says whether answers with speculation are those of plain decoding bit for bit, or
    up to rounding, where near-ties can fall otherwise. What only a loaded model tells is null until
    it was loaded for the first time.

    ``state`` is ``unloaded``, ``loading`` or ``leaving``, and of a loaded model its engine's:
    ``ready``, ``starting``, ``hung``, ``draining`` or ``failed``. ``pooling`` is that of embeddings
    whose requests do not say.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["paceline"] = "paceline"
    root: str
    parent: str | None = None
    state: str
    max_model_len: int | None = None
    promise: Literal["identical", "up to rounding"] | None = None
    proposers: list[str] | None = None
    dtype: str | None = None
    backend: str | None = None
    architecture: str | None = None
    pooling: str | None = None
    meta: ModelMeta | None = None
    sampling: Sampling | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class Health(BaseModel):
    status: str
