"""Bodies of ``/infill``, and what they are answered with, as llama.cpp has them.

Owns names, types and ranges. Fields of completions that llama.cpp has under the same name, or does
not have, mean the same as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from paceline.server.protocol.common import TAKES_FLOATS, ApiModel, Number
from paceline.server.protocol.completions import CompletionRequest
from paceline.server.protocol.neutral import Values
from paceline.text.gaps import Gap

MAX_FILES = 1024
_LARGEST = (1 << 31) - 1
_NOT_HERE = ("suffix", "echo", "truncate_prompt_tokens", "logprobs", "prompt_logprobs")


class File(ApiModel):
    """Another file of the same work, which the model may draw on."""

    text: str
    filename: str = ""


class InfillRequest(CompletionRequest):
    """The body of ``POST /infill``."""

    is_cut_to_context: ClassVar[bool] = True
    neutral: ClassVar[Mapping[str, Values]] = {
        **CompletionRequest.neutral,
        # What editors send. Their order is the one that filters have here, and the last of them
        # only joins likely tokens that begin alike.
        "samplers": (
            *CompletionRequest.neutral["samplers"],
            ["top_k", "top_p", "infill"],
            ["top_k", "top_p"],
        ),
    }

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[File], Field(max_length=MAX_FILES, fail_fast=True)] | None = None
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1, le=_LARGEST), TAKES_FLOATS] | None = None
    # Taken and ignored: they place work or trim the answer's form, or end it sooner.
    id_slot: Number | None = None
    n_indent: Number | None = None
    t_max_prompt_ms: Number | None = None
    t_max_predict_ms: Number | None = None
    response_fields: Annotated[list[str], Field(max_length=MAX_FILES)] | None = None

    @model_validator(mode="after")
    def _check_gap(self) -> InfillRequest:
        for name in _NOT_HERE:
            if getattr(self, name) not in (None, False, ""):
                raise ValueError(f"{name} is only allowed in /v1/completions")
        if self.n not in (None, 1):
            raise ValueError(f"n is {self.n}; /infill gives one answer")
        return self

    @model_validator(mode="after")
    def _take_limit(self) -> InfillRequest:
        if self.n_predict is not None:
            if self.max_tokens is not None and self.max_tokens != self.n_predict:
                raise ValueError("n_predict is another name of max_tokens; send one of them")
            self.max_tokens = self.n_predict
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return [self.input_prefix]

    def gaps(self) -> list[Gap]:
        files = [(file.filename, file.text) for file in self.input_extra or ()]
        return [Gap(self.input_prefix, self.input_suffix, self.prompt, files)]


class InfillResponse(BaseModel):
    """What a gap is filled with. Events of a stream have ``content``; the last has the rest."""

    index: int
    content: str
    stop: bool
    model: str | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    usage: dict[str, Any] | None = None
