"""Fields that completions and chats share, and what every model of a body has in common.

Owns names, types and ranges as OpenAI, vLLM and llama.cpp have them; what they mean to the engine
is :mod:`paceline.server.protocol.sampling`'s. Ranges of parameters are those of
:mod:`paceline.request.sampling_params`, unless a protocol's own is narrower.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.core.errors import RequestError
from paceline.request.sampling_params import (
    LARGEST,
    LLAMA_CPP,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_DRAFT_DEPTH,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    RANGES,
)
from paceline.request.structured_outputs import MAX_CHOICES
from paceline.server.protocol.foreign import (
    ASKS_FOR_NOTHING,
    INSTEAD,
    Values,
    as_json,
    asks_for_nothing,
    refusal,
)

UNENFORCED = "x-paceline-unenforced-schema-keywords"
"""The header of an answer whose schema has keywords that no grammar can enforce: their names."""
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BIASED_TEXT = 256
MAX_NAMED_TOKENS = 4096
MAX_METHODS = 64
MAX_NAMES_NOTED = 20
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of vLLM's, SGLang's and llama.cpp's, and what these are in ``structured_outputs``."""
MAX_NAME_LENGTH = 60
NO_LIMIT = -1
"""llama.cpp's ``max_tokens`` for an answer that only the context ends."""
WHOLE_CONTEXT = -1
"""llama.cpp's ``repeat_last_n`` for penalties that count the whole text, as they do here."""


def _whole(value: Any) -> Any:
    """40.0 as 40, which is the same number to a client that knows one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


TAKES_FLOATS = BeforeValidator(_whole)


def up_to(most: int | None, least: int | None = None) -> Any:
    """How many items a list may have. It is checked up to its first wrong item."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def number_of(name: str) -> Any:
    """A field with the range of a parameter."""
    low, high = RANGES[name]
    return Field(ge=low, le=high)


Temperature = Annotated[float, number_of("temperature")]
TopP = Annotated[float, number_of("top_p")]
"""0 leaves the likeliest token alone."""
MinP = Annotated[float, number_of("min_p")]
RepetitionPenalty = Annotated[float, number_of("repetition_penalty")]
PresencePenalty = Annotated[float, number_of("presence_penalty")]
FrequencyPenalty = Annotated[float, number_of("frequency_penalty")]
TopK = Annotated[int, number_of("top_k"), TAKES_FLOATS]
# Larger ones have no place in 64 bits with a sign, which other servers' clients send.
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), TAKES_FLOATS]
NumSamples = Annotated[int, number_of("n"), TAKES_FLOATS]
MinTokens = Annotated[int, number_of("min_tokens"), TAKES_FLOATS]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), TAKES_FLOATS]
DraftDepth = Annotated[int, Field(ge=0, le=MAX_DRAFT_DEPTH), TAKES_FLOATS]
KeptTokens = Annotated[int, Field(ge=-1, le=LARGEST), TAKES_FLOATS]
Whole = Annotated[int, Field(ge=-LARGEST, le=LARGEST), TAKES_FLOATS]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
CacheSalt = Annotated[str, Field(max_length=256)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], up_to(MAX_STOP_STRINGS)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST), TAKES_FLOATS]
TokenIds = Annotated[list[TokenId], up_to(MAX_NAMED_TOKENS)]


def at_most(count: int) -> BeforeValidator:
    """That an object has few keys, asked before each of them is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError(
                "too_many_keys",
                "it has {found} keys; at most {most} are allowed",
                {"found": len(value), "most": count},
            )
        return value

    return BeforeValidator(check)


class ApiModel(BaseModel):
    """A JSON object in which every key is known and has exactly its type.

    ``refused`` names fields of others that mean something Paceline does not do, with the reason;
    ``neutral`` those with values that ask for nothing. Null asks for nothing in all of them.
    Checking ends at a list's first wrong item and an object's first unknown key: a body can hold a
    million of them, and reporting each would hold up everybody else.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    refused: ClassVar[Mapping[str, str]] = {}
    neutral: ClassVar[Mapping[str, Values]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        names = cls._names()
        kept = {name: values[name] for name in values if name in names}
        for name, value in values.items():
            if name in names:
                continue
            if name in cls.refused or name in cls.neutral:
                cls._check_neutral(name, value)
            elif cls.model_config.get("extra") == "ignore":
                note_ignored(info.context, name)
            else:
                return {**kept, name: value}
        return kept

    @classmethod
    def _check_neutral(cls, name: str, value: Any) -> None:
        allowed = cls.neutral.get(name, ())
        if not asks_for_nothing(value, allowed):
            reason = cls.refused.get(name, "what else it asks for is not supported")
            raise RequestError(refusal(name, value, allowed, reason), name)

    @classmethod
    @functools.cache
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


def of_kinds(kinds: Sequence[str], what: str, why: str = "") -> BeforeValidator:
    """Say which types there are, and not which keys of another type are unknown."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and "type" in value and value["type"] not in kinds:
            kind = value["type"]
            shown = repr(kind[:40]) if isinstance(kind, str) else as_json(kind)
            raise ValueError(
                f"{what} of type {shown} are not supported{why}; allowed: {', '.join(kinds)}"
            )
        return value

    return BeforeValidator(check)


def by_kind(default: str | None = None) -> Discriminator:
    """Choose among models with the tags ``type-<type>``; of an object without a type the default.

    With a hyphen, a tag is no part of the place that an error names.
    """

    def tag(value: Any) -> str | None:
        is_object = isinstance(value, dict)
        kind = value.get("type", default) if is_object else getattr(value, "type", None)
        return None if kind is None else f"type-{kind}"

    return Discriminator(tag)


class LenientModel(ApiModel):
    """A JSON object that clients send back as they got it: keys that are not known are ignored.

    Their names are noted in the context of the validation, where that is a set.
    """

    model_config = ConfigDict(extra="ignore")


def note_ignored(context: object, name: str) -> None:
    """Remember the name of a key that was ignored, for one line in the log."""
    if isinstance(context, set) and len(context) < MAX_NAMES_NOTED:
        context.add(name[:MAX_NAME_LENGTH])


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("a bias in logit_bias is true; allowed: numbers, and false for a ban")
    return value


# No literal: 0 would be one of false.
Bias = (
    Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
    | Annotated[bool, AfterValidator(_only_false)]
)
"""What is added to a token's logit; false bans it, as in llama.cpp."""
BiasedText = Annotated[str, Field(min_length=1, max_length=MAX_BIASED_TEXT)]
BiasPair = Annotated[tuple[TokenId | BiasedText, Bias], Field(strict=False)]
LogitBias = (
    Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS)]
    | Annotated[list[BiasPair], up_to(MAX_LOGIT_BIAS)]
)


class StreamOptions(ApiModel):
    """What a stream carries besides its pieces.

    ``continuous_usage_stats`` is vLLM's: with ``include_usage`` every event has the usage so far.
    ``include_obfuscation`` is taken and without effect.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


Methods = str | Annotated[list[str], up_to(MAX_METHODS)]


class Speculation(ApiModel):
    """Per-request control of speculation; it changes how fast tokens come and never which.

    ``method`` is another name of ``methods``, which is Python's.
    """

    enabled: bool = True
    methods: Methods | None = None
    method: Methods | None = None
    num_speculative_tokens: DraftDepth | None = None

    @model_validator(mode="after")
    def _check_methods(self) -> Speculation:
        if self.method is not None and self.methods is not None:
            raise ValueError(
                "speculative.method is given together with speculative.methods; send one of them"
            )
        return self


class StructuredOutputFields(ApiModel):
    """What the output must match, as in vLLM; exactly one of the fields."""

    # The name `json` is vLLM's; a method of pydantic's that nobody calls has it as well.
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], up_to(MAX_CHOICES, 1)] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    json_object: bool | None = None


def check_window(
    window: int | None, penalties: Sequence[float | None], usual: Sequence[int] = ()
) -> None:
    """That penalties are not asked to count the last tokens alone.

    Args:
        window: ``repeat_last_n``, which matters only where there is a penalty.
        penalties: for repetition, presence and frequency; None where nothing is said.
        usual: windows that a client sends without having chosen them.

    Raises:
        RequestError: they are.
    """
    repetition, *others = penalties
    is_penalised = repetition not in (None, 1.0) or any(others)
    allowed = (WHOLE_CONTEXT, *usual)
    if is_penalised and window is not None and window not in allowed:
        raise RequestError.of(
            "repeat_last_n",
            f"is {window}; penalties here count the whole text; allowed with "
            f"them: {', '.join(map(str, allowed))}",
        )


def _with_neutral(schema: dict[str, Any]) -> None:
    """Describe the fields that are accepted where they ask for nothing."""
    for name, values in ASKS_FOR_NOTHING.items():
        schema["properties"].setdefault(name, {"enum": [*values, None]})


class GenerationFields(ApiModel):
    """How to sample, when to stop, what to report."""

    model_config = ConfigDict(json_schema_extra=_with_neutral)
    refused: ClassVar[Mapping[str, str]] = INSTEAD
    neutral: ClassVar[Mapping[str, Values]] = ASKS_FOR_NOTHING
    is_cut_to_context: ClassVar[bool] = False
    """Whether a limit beyond the context means the context, instead of being an error."""
    wording: ClassVar[Mapping[str, str]] = {}
    """What the client calls fields that have another name in its body."""
    unstated_sampling: ClassVar[Mapping[str, float]] = LLAMA_CPP
    """How a model is sampled of which nobody says it."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    n: NumSamples | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: MinTokens | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Whole | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], up_to(MAX_BAD_WORDS)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    logprob_token_ids: Annotated[list[TokenId], up_to(MAX_LOGPROB_TOKEN_IDS, 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = None
    structured_outputs: StructuredOutputFields | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], up_to(None)] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    return_token_ids: bool = False
    speculative: Speculation | None = None
    disable_spec_decode: bool | None = None
    num_speculative_tokens: DraftDepth | None = None
    include_metrics: bool = False
    return_origins: bool = False
    # Taken and without effect: they tune samplers of llama.cpp that are always off here.
    xtc_threshold: Number | None = None
    dynatemp_exponent: Number | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    adaptive_decay: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: Number | None = None
    dry_penalty_last_n: Number | None = None
    dry_sequence_breakers: Annotated[list[str], up_to(MAX_STOP_STRINGS)] | None = None

    @model_validator(mode="after")
    def _take_guided(self) -> GenerationFields:
        """``guided_json`` and the like are other names of ``structured_outputs``' fields."""
        given = {name: getattr(self, name) for name in GUIDED if getattr(self, name) is not None}
        if not given:
            return self
        both = [*given, *(["structured_outputs"] if self.structured_outputs is not None else [])]
        if len(both) > 1:
            message = f"{', '.join(both)} are given together; give one of them"
            raise RequestError(message, both[0])
        fields = {GUIDED[name]: value for name, value in given.items()}
        self.structured_outputs = StructuredOutputFields.model_validate(fields)
        return self

    @model_validator(mode="after")
    def _take_penalty(self) -> GenerationFields:
        """``repeat_penalty`` and ``repeat_last_n``, which llama.cpp has."""
        if self.repeat_penalty is not None:
            if self.repetition_penalty is not None:
                raise RequestError.of(
                    "repeat_penalty", "is another name of repetition_penalty; send one of them"
                )
            self.repetition_penalty = self.repeat_penalty
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        check_window(self.repeat_last_n, penalties)
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise RequestError.of("stream_options", "is only allowed with stream: true")
        return self

    @classmethod
    def called(cls, name: str) -> str:
        """A field's name as the client knows it, for errors."""
        return cls.wording.get(name, name)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with an event of the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether every event of a stream has the usage up to it."""
        options = self.stream_options
        return options is not None and self.wants_usage and bool(options.continuous_usage_stats)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class JsonSchemaFormat(ApiModel):
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """What the answer must match.

    ``schema`` beside ``json_object`` is llama.cpp's; ``format``, or ``structures`` and
    ``triggers``, are those of :mod:`paceline.request.structural_tags`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError(
                "json_schema is for response_format.type json_schema, and needed there"
            )
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema is only allowed with response_format.type json_object")
        if bool(self.structural_tag) != (self.type == "structural_tag"):
            raise ValueError(
                "format, or structures and triggers, are for response_format.type structural_tag, "
                "and needed there"
            )
        return self

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The fields of a structural tag that are given."""
        names = ("format", "structures", "triggers")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class MayHaveThoughts(LenientModel):
    """A message that may carry its thoughts.

    ``reasoning_content`` is DeepSeek's name and that of most templates, ``thinking`` Ollama's and
    gpt-oss's, ``reasoning`` vLLM's later one. The latter two also have other meanings elsewhere:
    what is no text is ignored.
    """

    reasoning_content: str | None = None
    thinking: Any = None
    reasoning: Any = None

    @property
    def thoughts(self) -> str | None:
        """Where several are given, those under the name that comes first above."""
        named = (self.reasoning_content, self.thinking, self.reasoning)
        return next((text for text in named if isinstance(text, str)), None)
