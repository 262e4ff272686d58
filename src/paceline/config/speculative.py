"""Proposers as a user configures them, checked key by key, and what methods draft by default.

Knows no models and no files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.config.methods import HEAD_METHODS, METHODS, MODEL_METHODS, check_method
from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError

DTYPES = ("auto", "file", "float32", "bfloat16", "float16", "int8", "int4", "int3", "int2")
BITS = {8: "int8", 4: "int4", 3: "int3", 2: "int2"}
"""What ``bits`` is short for, as a ``dtype``."""
MAX_SPECULATIVE_TOKENS = 64
MAX_TREE_NODES = 256
_RANGES: tuple[tuple[str, float, float, type], ...] = (
    ("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS, int),
    ("max_tree_nodes", 0, MAX_TREE_NODES, int),
    ("max_branching", 1, 16, int),
    ("min_accept_prob", 0.0, 1.0, float),
    ("prompt_lookup_min", 1, 32, int),
    ("prompt_lookup_window", 1, 1 << 24, int),
    ("suffix_decoding_max_tree_depth", 1, 256, int),
    ("suffix_decoding_max_spec_factor", 0.0, 1000.0, float),
    ("suffix_decoding_min_token_prob", 0.0, 1.0, float),
    ("suffix_decoding_max_cached_requests", 0, 1 << 24, int),
    ("suffix_decoding_max_cached_tokens", 1, 1 << 28, int),
    ("ngram_window", 0, 1 << 24, int),
    ("catch_up_tokens", 1, 1 << 20, int),
)
_OPTIONAL_RANGES: tuple[tuple[str, float, float, type], ...] = (
    ("draft_layers", 1, 1 << 16, int),
    ("temperature", 0.0, 100.0, float),
    ("top_p", 1e-9, 1.0, float),
    ("top_k", -1, 1 << 31, int),
)
OPTIONAL_MODELS = ("mtp",)
"""Methods that take ``model``, and without it draft by a part of the target."""
NEEDED_MODELS = {
    "draft_model": "the draft's folder or hub id",
    "ngram_model": "a file that paceline train ngram wrote",
    "parallel_draft": "the folder or hub id of a draft that was trained for it",
    **{
        method: "the folder, GGUF file or hub id of a head that was trained for the target"
        for method in HEAD_METHODS
        if method not in OPTIONAL_MODELS
    },
}
"""What ``model`` must name, by the built-in methods that need one."""
GRAMMAR_DRAFTS: dict[str, Any] = {"num_speculative_tokens": 16, "max_tree_nodes": 24}
"""What a grammar is sure of goes further than what others guess."""
SUFFIX_DRAFTS: dict[str, Any] = {
    "num_speculative_tokens": 16,
    "max_tree_nodes": 16,
    "max_branching": 4,
}
"""Trees that go on for as long as their match lets hope."""
NGRAM_DRAFTS: dict[str, Any] = {
    "num_speculative_tokens": 8,
    "max_tree_nodes": 16,
    "max_branching": 4,
}
"""Look-ups cost nothing worth mentioning, and the planner verifies no more than pays."""
PARALLEL_DRAFTS: dict[str, Any] = {"num_speculative_tokens": 8}
"""Further tokens of a forward that is made anyway."""
HEAD_DRAFTS: dict[str, Any] = {
    "num_speculative_tokens": 5,
    "max_tree_nodes": 16,
    "max_branching": 4,
}
"""A head's forward is cheap beside the target's, and the planner stops where a level does not pay.
"""
BLOCK_DRAFTS: dict[str, Any] = {**HEAD_DRAFTS, "num_speculative_tokens": 8}
"""All tokens of a draft come at once, and the planner verifies no more than pays."""
PARALLEL_FLAG = "parallel_drafting"
_PARALLEL = {"draft_model": "parallel_draft", "eagle3": "peagle"}
"""What vLLM's flag makes of a method."""
LOOSENING_KEYS = (
    "acceptance_threshold",
    "min_acceptance_ratio",
    "typical_acceptance",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha",
    "assistant_ensemble_weight",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)
_DRAFTS = {
    "grammar": GRAMMAR_DRAFTS,
    "suffix": SUFFIX_DRAFTS,
    "ngram_model": NGRAM_DRAFTS,
    "parallel_draft": PARALLEL_DRAFTS,
    "eagle3": HEAD_DRAFTS,
    "peagle": BLOCK_DRAFTS,
    "mtp": HEAD_DRAFTS,
    "dflash": BLOCK_DRAFTS,
    "dspark": BLOCK_DRAFTS,
}
_KEY_ALIASES = {"max_tree_depth": "num_speculative_tokens"}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """One proposer and how it drafts. Keys are vLLM's where it has one.

    Attributes:
        method: one of :data:`~paceline.config.methods.METHODS`, an alias, or an installed
            plugin's. ``grammar`` drafts for requests with structured output alone and joins the
            others by itself.
        use_heterogeneous_vocab: the draft model may have another vocabulary than the target.
        vocab_replacements: texts of the target and what the draft model reads instead, such as
            the markers of chats.
        draft_layers: layers of the target that ``self`` runs; None is all of them.
        model: folder, GGUF file or hub id of the draft model, of the head or of the model whose
            MTP layer drafts, None for the target; the file of the n-gram model.
        num_speculative_tokens: most tokens along one path of a draft.
        max_tree_nodes: most nodes of one draft tree; 0 means a chain, or as many as
            ``max_branching`` chains have where that is above 1.
        max_branching: most children of one node.
        min_accept_prob: nodes less likely to be reached and accepted than this are not verified,
            the first one included. Chooses what is verified, never what is accepted.
        prompt_lookup_min, prompt_lookup_max: shortest and longest match, in tokens.
        prompt_lookup_window: how far back a match may lie, in tokens.
        suffix_decoding_max_tree_depth: longest match of ``suffix`` that is told from a longer one.
        suffix_decoding_max_spec_factor: longest draft as a multiple of its match; 8 tokens are
            always allowed.
        suffix_decoding_min_token_prob: least share of what followed a match that a token must have
            to be drafted.
        suffix_decoding_max_cached_requests: finished requests whose answers are matched, too; the
            least recently used go first. 0 is none.
        suffix_decoding_max_cached_tokens: most tokens of these answers.
        ngram_window: how far back ``ngram_model`` learns from the request's own text, in tokens; 0
            leaves that to the trained model.
        temperature, top_p, top_k: how the draft model ranks candidates; None takes the request's.
        dtype: precision of the draft model.
        deterministic: run the draft on the target's reproducible kernels (slower).
        catch_up_tokens: most tokens per step with which a lagging draft model catches up.
        options: what a plugin's proposer is told, in its own keys.
    """

    method: str = "prompt_lookup"
    model: str | None = None
    num_speculative_tokens: int = 4
    max_tree_nodes: int = 0
    max_branching: int = 1
    min_accept_prob: float = 0.02
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    prompt_lookup_window: int = 8192
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_tokens: int = 1 << 20
    ngram_window: int = 8192
    use_heterogeneous_vocab: bool = False
    vocab_replacements: tuple[tuple[str, str], ...] = ()
    draft_layers: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    dtype: str = "auto"
    deterministic: bool = False
    catch_up_tokens: int = 512
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", check_method(self.method))
        for key, low, high, kind in _RANGES:
            check_number(key, getattr(self, key), low, high, kind)
        check_number("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 32)
        for key, low, high, kind in _OPTIONAL_RANGES:
            if getattr(self, key) is not None:
                check_number(key, getattr(self, key), low, high, kind)
        check_choice("dtype", self.dtype, DTYPES)
        for key in ("deterministic", "use_heterogeneous_vocab"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(f"{key} is {getattr(self, key)!r}; allowed: true and false")
        self._check_replacements()
        self._check_model()
        if self.method == "self":
            self._check_self()
        self._check_options()
        if self.max_branching > 1 and self.max_tree_nodes == 0:
            nodes = min(MAX_TREE_NODES, self.num_speculative_tokens * self.max_branching)
            object.__setattr__(self, "max_tree_nodes", nodes)

    def _check_model(self) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"model is {self.model!r}; it must be a string")
        needed = NEEDED_MODELS.get(self.method)
        if needed and not self.model:
            raise ConfigError(f'method "{self.method}" needs "model": {needed}')

    def _check_replacements(self) -> None:
        pairs = self.vocab_replacements
        if not isinstance(pairs, list | tuple) or not all(map(_is_replacement, pairs)):
            raise ConfigError(
                f"vocab_replacements is {pairs!r}; it must be a list of [text of the target, text "
                "of the draft], the first of which is not empty"
            )
        object.__setattr__(self, "vocab_replacements", tuple(map(tuple, pairs)))
        if self.use_heterogeneous_vocab and self.method != "draft_model":
            raise ConfigError(
                f'use_heterogeneous_vocab is for method "draft_model"; {self.method} has no draft '
                "of another vocabulary"
            )
        if pairs and not self.use_heterogeneous_vocab:
            raise ConfigError(
                "vocab_replacements needs use_heterogeneous_vocab: a draft of the target's own "
                "vocabulary reads its tokens as they are"
            )

    def _check_self(self) -> None:
        if self.model is not None:
            raise ConfigError('method "self" takes no "model": the target itself drafts')
        if self.draft_layers is None and self.dtype == "auto":
            raise ConfigError(
                'method "self" needs "draft_layers", fewer "bits", or both: the whole target in '
                "its own precision would cost as much as it drafts for"
            )

    def _check_options(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options is {self.options!r}; it must be an object")
        if self.options and self.method in METHODS:
            raise ConfigError(
                f"options is for plugins; {self.method} takes its keys next to its method"
            )

    @property
    def needs_constraint(self) -> bool:
        """It drafts only for requests whose output has to fit a grammar."""
        return self.method == "grammar"

    @property
    def needs_forwards(self) -> bool:
        """It drafts by forwards of a model of its own."""
        return self.method in MODEL_METHODS

    @property
    def has_own_kv(self) -> bool:
        """The model by which it drafts has a KV cache beside the target's."""
        return self.needs_forwards and self.method != "self"

    @property
    def tree_nodes(self) -> int:
        """Node cap of one draft, the chain's length when no tree was asked for."""
        return max(self.max_tree_nodes, self.num_speculative_tokens)


def _is_replacement(pair: object) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(text, str) and _is_encodable(text) for text in pair)
        and bool(pair[0])
    )


def _is_encodable(text: str) -> bool:
    """Whether it has no lone surrogates, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def parse_speculative_config(
    source: str | Mapping[str, Any] | SpeculativeConfig | Sequence[Any],
) -> tuple[SpeculativeConfig, ...]:
    """Read a speculative configuration: JSON text, one mapping, or a list of mappings.

    An empty list is plain decoding.

    Raises:
        ConfigError: not JSON, an unknown key (the allowed ones are listed), a key that would
            loosen acceptance, or a value out of range.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:  # numbers and nesting have limits, too
            raise ConfigError(f"the speculative configuration is not JSON: {error}") from error
    items = [source] if isinstance(source, Mapping | SpeculativeConfig) else source
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ConfigError("the speculative configuration must be an object or a list of objects")
    return tuple(_parse_one(item) for item in items)


def _parse_one(item: object) -> SpeculativeConfig:
    if isinstance(item, SpeculativeConfig):
        return item
    if not isinstance(item, Mapping):
        raise ConfigError(f"a speculative configuration must be an object, not {item!r}")
    allowed = [*(f.name for f in fields(SpeculativeConfig)), "bits"]
    values: dict[str, Any] = {}
    for key, value in _without_flag(item).items():
        if key in LOOSENING_KEYS:
            raise ConfigError(
                f"{key!r} is refused: it would accept tokens that the target did not choose. "
                "Outputs here are always those of plain decoding"
            )
        name = _KEY_ALIASES.get(key, key)
        if name not in allowed:
            known = ", ".join([*allowed, *_KEY_ALIASES])
            raise ConfigError(f"unknown speculative key {key!r}; allowed: {known}")
        if name in values:
            raise ConfigError(f"{key!r} is given twice, under two names")
        values[name] = value
    if "bits" in values:
        values["dtype"] = _dtype_of(values.pop("bits"), values.get("dtype"))
    if "model" in values:
        values.setdefault("method", "draft_model")
    values = _DRAFTS.get(str(values.get("method")), {}) | values
    _widen_lookup(values)
    return SpeculativeConfig(**values)


def _without_flag(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM asks for drafts of several tokens at once by a flag of other methods."""
    if PARALLEL_FLAG not in item:
        return item
    flag, rest = item[PARALLEL_FLAG], {k: v for k, v in item.items() if k != PARALLEL_FLAG}
    method = rest.get("method", "draft_model")
    if not isinstance(flag, bool) or (flag and method not in _PARALLEL):
        allowed = " and ".join(f'"{one}", which it makes "{_PARALLEL[one]}",' for one in _PARALLEL)
        raise ConfigError(
            f"{PARALLEL_FLAG} is {flag!r} for method {method!r}; it is true or false, and true for "
            f"{allowed} alone"
        )
    return {**rest, "method": _PARALLEL[method]} if flag else rest


def _dtype_of(bits: object, dtype: object) -> str:
    if dtype is not None:
        raise ConfigError(f"bits is {bits!r} and dtype {dtype!r}: give one of them")
    if type(bits) is not int or bits not in BITS:
        raise ConfigError(f"bits is {bits!r}; allowed: {', '.join(map(str, BITS))}")
    return BITS[bits]


def _widen_lookup(values: dict[str, Any]) -> None:
    """Let one bound of the match length, given alone, move the other's default."""
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if low is None and isinstance(high, int) and high >= 1:
        values["prompt_lookup_min"] = min(high, SpeculativeConfig().prompt_lookup_min)
    elif high is None and isinstance(low, int):
        values["prompt_lookup_max"] = max(low, SpeculativeConfig().prompt_lookup_max)
