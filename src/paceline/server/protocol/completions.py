"""The body of ``/v1/completions``, which other APIs' prompts become, and what a prompt may be.

Owns names, types and ranges.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from paceline.core.errors import RequestError
from paceline.request.sampling_params import LARGEST
from paceline.server.protocol.generation import (
    MAX_TOP_LOGPROBS,
    NO_LIMIT,
    TAKES_FLOATS,
    GenerationFields,
    ResponseFormat,
    TopLogprobs,
)
from paceline.text.fim import Gap

MAX_PROMPTS = 4096
TokenLimit = Annotated[int, Field(ge=NO_LIMIT, le=LARGEST), TAKES_FLOATS]
_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": LARGEST},
    "minItems": 1,
}
_NOT_OF_GAPS = ("echo", "truncate_prompt_tokens")
_ALLOWED = "a string, a list of token ids, or a list of strings or of lists of token ids"


def _prompts(value: Any, info: ValidationInfo) -> Any:
    """Check the types of a prompt, or of another field, in one pass: it can be a million numbers.

    Raises:
        ValueError: it is not one of the four kinds.
    """
    name = info.field_name
    if not isinstance(value, str | list):
        raise ValueError(f"{name} must be {_ALLOWED}")
    items = value if isinstance(value, list) else [value]
    is_flat = bool(items) and all(type(item) is int for item in items)
    batch = [items] if is_flat else items
    if not 0 < len(batch) <= MAX_PROMPTS:
        raise ValueError(f"{name} has {len(batch)} prompts; allowed: 1 to {MAX_PROMPTS}")
    if all(isinstance(each, str) for each in batch):
        return value
    if not all(isinstance(each, list) and each for each in batch):
        raise ValueError(f"{name} must be {_ALLOWED}, none of them empty")
    for ids in batch:
        if not all(type(token) is int and 0 <= token <= LARGEST for token in ids):
            raise ValueError(f"{name} must be {_ALLOWED}; token ids are whole numbers from 0")
    return value


PromptField = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


def batch_of(value: Any) -> list[str] | list[list[int]]:
    """What a :data:`PromptField` holds, as a batch."""
    if isinstance(value, str) or type(value[0]) is int:
        return [value]
    batch: list[Any] = value
    return batch


def _none_if_minus_one(value: Any) -> Any:
    """Clients with a number for "off" send -1."""
    return None if value == -1 else value


class CompletionRequest(GenerationFields):
    """The body of ``POST /v1/completions``."""

    prompt: PromptField
    suffix: str | None = None
    max_tokens: TokenLimit | None = None
    echo: bool | None = None
    logprobs: Annotated[
        TopLogprobs | None,
        BeforeValidator(
            _none_if_minus_one,
            json_schema_input_type=Annotated[int, Field(ge=-1, le=MAX_TOP_LOGPROBS), TAKES_FLOATS]
            | None,
        ),
    ] = None
    add_special_tokens: bool = True
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_named(self) -> CompletionRequest:
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise RequestError.of("logprob_token_ids", "is only allowed with logprobs")
        return self

    @model_validator(mode="after")
    def _check_gap(self) -> CompletionRequest:
        if self.suffix:
            if not isinstance(self.prompts[0], str):
                raise RequestError.of("suffix", "is only allowed with a prompt that is text")
            for name in _NOT_OF_GAPS:
                if getattr(self, name):
                    raise RequestError.of(name, "is only allowed without a suffix")
        return self

    def gaps(self) -> list[Gap]:
        """The gaps to fill; none where texts are continued."""
        if not self.suffix:
            return []
        return [Gap(str(prompt), self.suffix) for prompt in self.prompts]

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have; None is what the context leaves."""
        return None if self.max_tokens == NO_LIMIT else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a batch."""
        return batch_of(self.prompt)


class PromptTokensDetails(BaseModel):
    """``cached_tokens`` came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """``reasoning_tokens`` are those of a chat's thoughts, without their marks."""

    reasoning_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


Dimensions = Annotated[int, Field(ge=1, le=LARGEST), TAKES_FLOATS]
PoolingKind = Literal["mean", "last", "cls", "max", "weightedmean"]
