"""Bodies of llama.cpp's endpoints, ``/tokenize`` among them, which vLLM has too, and their answers.

Owns names, types and ranges as llama.cpp has them (b11549). Fields of completions that it has under
the same name, or does not have, mean the same as there.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator

from paceline.core.errors import RequestError
from paceline.request.sampling_params import LARGEST
from paceline.server.protocol.chat import Messages, Tools
from paceline.server.protocol.completions import (
    MAX_PROMPTS,
    CompletionRequest,
    TokenLimit,
)
from paceline.server.protocol.foreign import Values
from paceline.server.protocol.generation import (
    ApiModel,
    Number,
    NumSamples,
    TokenId,
    TopLogprobs,
    up_to,
)
from paceline.text.fim import Gap

MAX_FILES = 1024
MAX_RESPONSE_FIELDS = 1024
_ELSEWHERE = (
    *("suffix", "echo", "truncate_prompt_tokens", "prompt_logprobs"),
    *("return_token_ids", "return_origins"),
)
ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]
"""In which a token's logits are edited and filtered, by llama.cpp's names."""
_ALIASES = {
    "n_predict": ("max_tokens", "max_completion_tokens"),
    "n_probs": ("logprobs",),
    "n_cmpl": ("n",),
}
"""Fields that llama.cpp knows by other names as well."""
_ALLOWED = (
    "a string, a list of strings and token ids with at least one id, an object with prompt_string, "
    "or a list of these"
)
_PIECES = {"type": "array", "items": {"type": ["string", "integer"], "minimum": 0}, "minItems": 1}
_PROMPT = [
    {"type": "string"},
    _PIECES,
    {"type": "object", "properties": {"prompt_string": {"type": "string"}}},
]

NativePrompt = str | list[str | int]
"""A text, or texts and token ids in any order."""


def _prompts(value: Any) -> list[NativePrompt]:
    """The prompts of a request: a list that holds a number is one of them.

    Raises:
        ValueError: it is none of what is allowed.
    """
    is_batch = isinstance(value, list) and not any(type(piece) is int for piece in value)
    batch = value if is_batch else [value]
    if not 0 < len(batch) <= MAX_PROMPTS:
        raise ValueError(f"prompt has {len(batch)} prompts; allowed: 1 to {MAX_PROMPTS}")
    return [_one_prompt(prompt) for prompt in batch]


def _one_prompt(value: Any) -> NativePrompt:
    if isinstance(value, dict) and value.keys() == {"prompt_string"}:
        value = value["prompt_string"]
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not any(type(piece) is int for piece in value):
        raise ValueError(f"prompt must be {_ALLOWED}")
    if not all(isinstance(piece, str) or _is_id(piece) for piece in value):
        raise ValueError(f"prompt must be {_ALLOWED}; token ids are whole numbers from 0")
    return value


def _is_id(piece: Any) -> bool:
    return type(piece) is int and 0 <= piece <= LARGEST


def _none_if_empty(value: Any) -> Any:
    """No grammar, as clients send it that have a field for one."""
    return None if value == "" else value


def _any_object_if_empty(value: Any) -> Any:
    return {"type": "object"} if value == {} else value


class NativeRequest(CompletionRequest):
    """What both have in common.

    ``cache_prompt: false`` keeps the request from prefixes that others have computed.
    """

    is_cut_to_context: ClassVar[bool] = True
    neutral: ClassVar[Mapping[str, Values]] = {
        **CompletionRequest.neutral,
        # The order that answers tell, and what editors send. The filters come in it here, and the
        # last one of editors only joins likely tokens that begin alike.
        "samplers": (
            *CompletionRequest.neutral["samplers"],
            ORDER,
            ["top_k", "top_p", "infill"],
            ["top_k", "top_p"],
        ),
    }

    n_predict: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n_cmpl: NumSamples | None = None
    n_probs: TopLogprobs | None = None
    grammar: Annotated[str | None, BeforeValidator(_none_if_empty)] = None
    json_schema: Annotated[dict[str, Any] | str | None, BeforeValidator(_any_object_if_empty)] = (
        None
    )
    cache_prompt: bool | None = None
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: Annotated[list[str] | None, up_to(MAX_RESPONSE_FIELDS)] = None
    # Taken and without effect: requests have no slots, and texts are not shifted in the context.
    id_slot: Number | None = None
    n_keep: Number | None = None
    n_discard: Number | None = None
    n_cache_reuse: Number | None = None
    sse_ping_interval: Number | None = None
    verbose: bool | None = None

    @model_validator(mode="after")
    def _take_aliases(self) -> NativeRequest:
        """Put what a field says under llama.cpp's name where completions look for it."""
        for name, others in _ALIASES.items():
            values = [getattr(self, each) for each in (name, *others)]
            given = [value for value in values if value is not None]
            if len(set(given)) > 1:
                raise RequestError.of(name, f"is another name of {others[0]}; send one of them")
            setattr(self, others[0], given[0] if given else None)
        self.logprobs = self.logprobs or None
        return self

    @model_validator(mode="after")
    def _check_elsewhere(self) -> NativeRequest:
        for name in _ELSEWHERE:
            if getattr(self, name) not in (None, False, ""):
                raise RequestError.of(name, "is only allowed in /v1/completions")
        if self.cache_prompt is False and self.cache_salt is None:
            self.cache_salt = secrets.token_hex(16)
        return self


class NativeCompletionRequest(NativeRequest):
    """The body of ``POST /completion`` and ``POST /completions``."""

    prompt: Annotated[
        Any,
        BeforeValidator(_prompts),
        WithJsonSchema({"anyOf": [*_PROMPT, {"type": "array", "items": {"anyOf": _PROMPT}}]}),
    ]

    @property
    def prompts(self) -> list[Any]:
        return self.prompt  # type: ignore[no-any-return]


class File(ApiModel):
    """Another file of the same work, which the model may draw on."""

    text: str
    filename: str = ""


class InfillRequest(NativeRequest):
    """The body of ``POST /infill``."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[File], up_to(MAX_FILES)] | None = None
    prompt: str = ""
    # Taken and ignored: they end an answer sooner.
    n_indent: Number | None = None
    t_max_prompt_ms: Number | None = None
    t_max_predict_ms: Number | None = None

    @model_validator(mode="after")
    def _check_single(self) -> InfillRequest:
        if self.n not in (None, 1):
            raise RequestError.of("n", f"is {self.n}; /infill gives one answer")
        return self

    @property
    def prompts(self) -> list[Any]:
        return [self.input_prefix]

    def gaps(self) -> list[Gap]:
        files = [(file.filename, file.text) for file in self.input_extra or ()]
        return [Gap(self.input_prefix, self.input_suffix, self.prompt, files)]


class NativeAnswer(BaseModel):
    """An answer in llama.cpp's form; several prompts or answers are told as a list of them.

    Events of a stream have ``content`` and ``tokens``; the last of each answer has the rest.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | None = None
    generation_settings: dict[str, Any] | None = None
    prompt: str | None = None
    has_new_line: bool | None = None
    truncated: bool | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    tokens_cached: int | None = None
    timings: dict[str, float] | None = None
    completion_probabilities: list[dict[str, Any]] | None = None


MAX_TOKENS = 1 << 20

_SUBJECTS = {
    "prompt": ("add_special_tokens", "return_token_strs"),
    "messages": (
        *("add_special_tokens", "return_token_strs", "add_generation_prompt"),
        *("continue_final_message", "tools", "chat_template_kwargs"),
    ),
    "content": ("add_special", "parse_special", "with_pieces"),
}
"""What can be made tokens of, with the fields that belong to it."""
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def _given(name: str) -> dict[str, Any]:
    """That a field is there and is not null, as a JSON schema."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class TokenizeRequest(ApiModel):
    """A text or the messages of a chat, as vLLM takes them, or llama.cpp's ``content``.

    That one is a text, or a list of texts and token ids in any order. Without ``parse_special``
    special tokens that a text spells out are mere text.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given(name) for name in _SUBJECTS]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    content: str | Annotated[list[str | TokenId], up_to(MAX_TOKENS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        given = [name for name in _SUBJECTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("prompt, messages or content must be given, and only one of them")
        own = _SUBJECTS[given[0]]
        for subject, names in _SUBJECTS.items():
            for name in names:
                if name not in own and getattr(self, name) is not None:
                    raise RequestError.of(name, f"is for {subject} and not for {given[0]}")
        return self

    @property
    def chat(self) -> dict[str, Any]:
        """What a chat with these messages would say."""
        given = {name: getattr(self, name) for name in _OF_CHATS}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"messages": self.messages, **chosen}


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(BaseModel):
    """A token's text, or its bytes where they are no UTF-8."""

    id: int
    piece: str | list[int]


class ContentTokens(BaseModel):
    """What llama.cpp's ``content`` is answered with."""

    tokens: list[int] | list[TokenPiece]


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Annotated[list[TokenId], up_to(MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    """The text as vLLM tells it, and as llama.cpp does: the texts of all tokens in a row."""

    prompt: str
    content: str
