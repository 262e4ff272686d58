"""What a caller may ask of one request, and how a model is sampled where a request says nothing.

A model's own files go first (``generation_config.json``, or ``general.sampling`` of a GGUF file),
then its makers' card, which the catalogue keeps for models that have a name. Most small models
write nonsense at temperature 1 without a filter, so a model of which neither says anything is
sampled as llama.cpp does. Owns validation; knows no model, no tensor and no file format.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from itertools import chain
from typing import Any

from paceline.config import check_method
from paceline.core.checks import check_number, refuses_unknown, setting
from paceline.core.errors import RequestError
from paceline.request.structured_outputs import StructuredOutputs

__all__ = ["SamplingParams", "SpeculativeParams", "StructuredOutputs"]
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one mean arg-max."""
DRAWN_SEED = -1
"""A seed that is drawn for each request, as in vLLM, llama.cpp and Ollama; None is the same."""
POOLINGS = ("mean", "last", "cls", "max", "weightedmean")
"""Ways in which hidden states become one vector: the mean of all tokens, the last token's, the
first token's, the highest of each number, and a mean that weights tokens by their positions."""
MAX_N = 128
MAX_LOGPROBS = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 512
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BIAS = 100.0
MAX_DRAFT_DEPTH = 64
LARGEST = (1 << 31) - 1
"""Of counts and token ids."""
_LISTS = (
    *("stop", "stop_token_ids", "banned_token_ids", "bad_words", "bad_words_ids"),
    *("allowed_token_ids", "logprob_token_ids"),
)
_check_number = partial(check_number, error=RequestError)


@refuses_unknown(RequestError)
@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """Per-request control of speculation. Never changes the tokens, only how they are found.

    Attributes:
        enabled: ``False`` decodes this request plainly.
        methods: only these proposers draft, by ``method``; ``None`` means all configured ones.
        num_speculative_tokens: upper limit on draft depth; ``None`` leaves it to the planner.
    """

    enabled: bool = True
    methods: Sequence[str] | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_switch("speculative.enabled", self.enabled)
        if self.num_speculative_tokens is not None:
            _check_number("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_DEPTH)
        if self.methods is not None:
            names = _listed("speculative.methods", self.methods)
            known = tuple(check_method(each, "speculative.method", RequestError) for each in names)
            object.__setattr__(self, "methods", known)


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError.of(name, f"is {value!r}; allowed: true and false")


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """A list's items: none of None, and one of a string."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise RequestError.of(name, f"has {value!r:.80} where a list is needed")
    return tuple(value)


def _check_biases(value: Any) -> None:
    name = "logit_bias"
    if not isinstance(value, Mapping):
        raise RequestError.of(name, f"is {value!r:.80}; allowed: mappings of token ids to numbers")
    for token_id, bias in value.items():
        of_token = f"{name} of token {token_id!r}"
        _check_number(of_token, bias, -MAX_BIAS, MAX_BIAS, float, param=name)


def _speculation(value: Any) -> SpeculativeParams:
    if value is None:
        return SpeculativeParams()
    if not isinstance(value, Mapping):
        raise RequestError.of(
            "speculative",
            f"is {value!r:.80}; allowed: SpeculativeParams, and mappings of its fields",
        )
    return SpeculativeParams(**value)


def _number(default: Any, allowed: tuple[float, float], help: str) -> Any:
    """A field with its least and its largest value, which are whole numbers if all of them are."""
    return field(default=default, metadata={"help": help, "range": allowed})


@refuses_unknown(RequestError)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops; names and meanings as in vLLM and OpenAI.

    For lists, ``logit_bias`` and ``speculative`` None is the default, as in vLLM. A string in place
    of a list is its only item, and a mapping in place of :class:`SpeculativeParams` has its fields.

    Raises:
        RequestError: a value is outside its range, or there is no such field; the message names
            the range or the fields.
    """

    max_tokens: int | None = _number(16, (1, LARGEST), "Maximum tokens per answer.")
    min_tokens: int = _number(0, (0, LARGEST), "Minimum tokens per answer.")
    temperature: float = _number(
        1.0, (0.0, 100.0), "Sampling temperature; 0 always picks the most likely token."
    )
    top_p: float = _number(
        1.0,
        (0.0, 1.0),
        "Sample only from the most likely tokens whose probabilities add up to this; 1 means all.",
    )
    top_k: int = _number(
        0, (-1, LARGEST), "Sample only from this many of the most likely tokens; 0 means all."
    )
    min_p: float = _number(
        0.0,
        (0.0, 1.0),
        "Sample only from tokens at least this likely relative to the most likely one; 0 means "
        "all.",
    )
    repetition_penalty: float = _number(
        1.0,
        (1e-3, 100.0),
        "Divisor for the logits of tokens that occur in the prompt or the answer; 1 means no "
        "penalty.",
    )
    presence_penalty: float = _number(
        0.0,
        (-2.0, 2.0),
        "Subtracted from the logits of tokens that occur in the answer; 0 means no penalty.",
    )
    frequency_penalty: float = _number(
        0.0,
        (-2.0, 2.0),
        "Subtracted from the logits of tokens for each time they occur in the answer; 0 means no "
        "penalty.",
    )
    logit_bias: Mapping[int, float] = setting(
        MISSING, "What is added to the logits of tokens, by their ids.", default_factory=dict
    )
    allowed_token_ids: tuple[int, ...] | None = setting(None, "Sample only from these tokens.")
    banned_token_ids: tuple[int, ...] = setting((), "Never sample these tokens.")
    bad_words: Sequence[str] = setting(
        (), "Do not sample a token that would complete one of these texts in the answer."
    )
    bad_words_ids: Sequence[Sequence[int]] = setting((), "The same, as token ids.")
    seed: int | None = _number(
        None, (-(2**63), 2**64 - 1), "Seed for repeatable sampling; -1 draws one (default: random)."
    )
    stop: Sequence[str] = setting((), "Text that ends the answer and is left out of it.")
    stop_token_ids: tuple[int, ...] = setting((), "Stop the answer after one of these tokens.")
    include_stop_str_in_output: bool = setting(
        False, "Include the text that ends the answer in it."
    )
    ignore_eos: bool = setting(
        False, "Ignore the model's end token, and continue up to the token limit."
    )
    logprobs: int | None = _number(
        None,
        (0, MAX_LOGPROBS),
        "Report the log-probabilities of this many of the most likely tokens at each position.",
    )
    prompt_logprobs: int | None = _number(None, (0, MAX_LOGPROBS), "The same for the prompt.")
    logprob_token_ids: Sequence[int] | None = setting(
        None, "Report the log-probabilities of these tokens instead of the most likely ones."
    )
    pooling: str | None = setting(
        None, f"Return the prompt's hidden states as one vector: {', '.join(POOLINGS)}."
    )
    n: int = _number(1, (1, MAX_N), "Number of answers to each prompt.")
    structured_outputs: StructuredOutputs | None = setting(None, "What the answer must match.")
    speculative: SpeculativeParams = setting(
        MISSING, "How speculation works for this request.", default_factory=SpeculativeParams
    )

    def __post_init__(self) -> None:
        # Made for every request: what is as it should be is not handed to a function.
        for name in _LISTS:
            value = getattr(self, name)
            if type(value) is not tuple and (value is not None or name not in _OPTIONAL):
                object.__setattr__(self, name, _listed(name, value))
        if self.bad_words_ids:
            words = (_listed("bad_words_ids", word) for word in self.bad_words_ids)
            object.__setattr__(self, "bad_words_ids", tuple(words))
        biases: Any = self.logit_bias
        if biases is None:
            object.__setattr__(self, "logit_bias", {})
        speculation: Any = self.speculative
        if not isinstance(speculation, SpeculativeParams):
            object.__setattr__(self, "speculative", _speculation(speculation))
        self._check_ranges()
        self._check_lists()
        if self.seed == DRAWN_SEED:
            object.__setattr__(self, "seed", None)

    def _check_ranges(self) -> None:
        for name, (low, high) in RANGES.items():
            value, kind = getattr(self, name), type(low)
            if type(value) is kind and low <= value <= high:
                continue
            if value is not None or name not in _OPTIONAL:
                _check_number(name, value, low, high, kind)
        most = self.max_tokens
        if most is not None and self.min_tokens > most:
            raise RequestError.of(
                "min_tokens",
                f"is {self.min_tokens}; allowed: values up to max_tokens, which is {most}",
            )
        if self.top_p == 0.0:
            raise RequestError.of("top_p", "is 0; allowed: values above 0 up to 1")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError.of(
                "structured_outputs",
                f"is {self.structured_outputs!r:.80}; it must be a StructuredOutputs",
            )
        if self.pooling is not None:
            if self.pooling not in POOLINGS:
                raise RequestError.of(
                    "pooling", f"is {self.pooling!r:.80}; allowed: {', '.join(POOLINGS)}"
                )
            if self.n != 1:
                raise RequestError.of("n", f"is {self.n}; with pooling it must be 1")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _check_switch(name, getattr(self, name))

    def _check_lists(self) -> None:
        for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            texts = getattr(self, name)
            if len(texts) > most:
                raise RequestError.of(name, f"has {len(texts)} strings; at most {most} allowed")
            for text in texts:
                if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                    raise RequestError.of(
                        name,
                        f"holds {str(text)[:40]!r}; allowed: strings of 1 to "
                        f"{MAX_STOP_LENGTH} characters",
                    )
        if not all(self.bad_words_ids):
            raise RequestError.of(
                "bad_words_ids", "holds an empty list; name at least one token in each"
            )
        _check_biases(self.logit_bias)
        named = self.logprob_token_ids
        if named is not None and not 0 < len(named) <= MAX_LOGPROB_TOKEN_IDS:
            raise RequestError.of(
                "logprob_token_ids",
                f"names {len(named)} tokens; allowed: 1 to {MAX_LOGPROB_TOKEN_IDS}",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError.of(
                "allowed_token_ids", "is empty; name at least one token, or leave it out"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise :class:`RequestError` when a token id named here is not in the vocabulary."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "banned_token_ids": self.banned_token_ids,
            "bad_words_ids": chain.from_iterable(self.bad_words_ids),
            "stop_token_ids": self.stop_token_ids,
            "logprob_token_ids": self.logprob_token_ids or (),
        }
        for name, ids in named.items():
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id < vocab_size:
                    raise RequestError.of(
                        name, f"names token {token_id!r}; the vocabulary is 0 to {vocab_size - 1}"
                    )

    @property
    def reports_logprobs(self) -> bool:
        """Whether log-probabilities are reported for the output."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether each token of the prompt has to be computed, none of them found in a cache."""
        return self.prompt_logprobs is not None or self.pooling is not None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def uses_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_plain_greedy(self) -> bool:
        """True when the token is the arg-max of the raw logits: nothing edits them."""
        return (
            self.is_greedy
            and self.structured_outputs is None
            and not self.uses_penalties
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.banned_token_ids
            and not self.bad_words
            and not self.bad_words_ids
            and self.min_tokens == 0
        )


RANGES: Mapping[str, tuple[float, float]] = {
    each.name: each.metadata["range"] for each in fields(SamplingParams) if "range" in each.metadata
}
"""The least and the largest value of each parameter that is a number; bodies of servers too."""
_OPTIONAL = {"max_tokens", *(each.name for each in fields(SamplingParams) if each.default is None)}

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What a model's makers may set, and the values that change nothing."""
LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults (``common_params_sampling`` of b11549)."""
OLLAMA: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's (``DefaultOptions`` of its API), without the penalty, which counts 64 tokens there."""
FROM_FILES = "the model's files"
FROM_CARD = "its model card"
UNSTATED = "llama.cpp's defaults; the model states none"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's sampling, and where it comes from.

    Attributes:
        values: those of :data:`NEUTRAL` that are set; the others change nothing.
        source: for people.
    """

    values: Mapping[str, float]
    source: str = UNSTATED

    @property
    def is_stated(self) -> bool:
        """Whether the model's makers chose it."""
        return self.source != UNSTATED

    def __str__(self) -> str:
        values = {**NEUTRAL, **self.values}
        told = [
            f"{name.replace('_', '-')} {value:g}"
            for name, value in values.items()
            if value != NEUTRAL[name] or name == "temperature"
        ]
        return f"{', '.join(told)} ({self.source})"

    def params(self) -> SamplingParams:
        """For a request that says nothing at all: it may go on to the end of the context."""
        return SamplingParams(max_tokens=None, **self.values)  # type: ignore[arg-type]


AS_LLAMA_CPP = SamplingDefaults(LLAMA_CPP)


def sampling_defaults(
    files: Mapping[str, Any], card: Mapping[str, float] | None = None
) -> SamplingDefaults:
    """The first of the sources that says anything.

    Args:
        files: what the model's files say, by Hugging Face's names; other keys are passed over,
            and a value that no request could have is told to the log.
        card: what its model card says.
    """
    usable = usable_sampling(files)
    if usable:
        return SamplingDefaults(usable, FROM_FILES)
    if card:
        return SamplingDefaults(card, FROM_CARD)
    return AS_LLAMA_CPP


def usable_sampling(given: Mapping[str, Any]) -> dict[str, float]:
    """Those of :data:`NEUTRAL` that a request can have; the log tells of values out of range."""
    usable = {}
    for name in NEUTRAL:
        value = given.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            log.warning("a default of the model's sampling is not followed: %s", error)
        else:
            usable[name] = value
    return usable
