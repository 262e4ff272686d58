"""Proposers as a user configures them: a small configuration per method, and the methods there are.

A method's name, its keys with their defaults, what builds its proposer and what it drafts are said
here, once, in :data:`METHODS`; what a user writes is read in
:mod:`paceline.config.speculative_json`. Methods of other packages are entry points of the group
``paceline.proposers``, named as the method; each leads to a class, or a function, that takes a
configuration and what the proposer has to fit to. Imports none of them; knows no models and no
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

from paceline.core.checks import (
    Check,
    check_fields,
    check_number,
    check_settings,
    check_switch,
    check_text,
    number,
    one_of,
    optional,
    setting,
    whole,
)
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.installation import plugins_of

DTYPES = ("auto", "file", "float32", "bfloat16", "float16", "int8", "int4", "int3", "int2")
MAX_SPECULATIVE_TOKENS = 64
MAX_TREE_NODES = 256
LONGEST_MATCH = 32
"""Tokens of a match of ``prompt_lookup``."""
NGRAM_ORDERS = 2, 5
"""Least and most tokens of the n-grams of ``ngram_model``, the last one included."""
MAX_CONTINUATIONS = 64
"""Most continuations of one context: a look-up goes through all of them."""
ENTRY_POINTS = "paceline.proposers"
METHOD_ALIASES = {"ngram": "prompt_lookup"}
DEFAULT_METHOD, EMBEDDED_METHOD = "suffix", "ngram_model"
"""Who drafts for any model, and who for the embedded one as well, where nothing was said."""


def _method(default: str) -> Any:
    return setting(
        default,
        "One of METHODS, an alias, or an installed plugin's. grammar drafts for requests with "
        "structured output alone and joins the others by itself.",
    )


def _depth(default: int) -> Any:
    return setting(
        default,
        "Maximum length of a draft in tokens, along one path.",
        whole(1, MAX_SPECULATIVE_TOKENS),
    )


def _nodes(default: int) -> Any:
    return setting(
        default,
        "Most nodes of one draft tree; 0 means a chain, or as many as max_branching chains have "
        "where that is above 1.",
        whole(0, MAX_TREE_NODES),
    )


def _branching(default: int) -> Any:
    return setting(default, "Most children of one node.", whole(1, 16))


def _ranking(check: Check) -> Any:
    return setting(None, "For ranking candidates; None takes the request's.", optional(check))


def _check_object(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it must be an object")


def _check_replacements(name: str, pairs: object) -> None:
    if not isinstance(pairs, list | tuple) or not all(map(_is_replacement, pairs)):
        raise ConfigError(
            f"{name} is {pairs!r}; it must be a list of [text of the target, text of the draft], "
            "the first of which is not empty"
        )


def _is_replacement(pair: object) -> bool:
    """Whether it is two texts without lone surrogates, which JSON can spell and UTF-8 cannot."""
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not pair[0]:
        return False
    return all(
        isinstance(text, str) and not any("\ud800" <= char <= "\udfff" for char in text)
        for text in pair
    )


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """One proposer and how it drafts: what every method has. Keys are vLLM's where it has one.

    Made with a method's name it is the configuration of that method, whose keys it takes as well:
    ``SpeculativeConfig("suffix")`` is a :class:`SuffixConfig`.

    Raises:
        ConfigError: an unknown method, or a value that is not allowed.
    """

    needs_constraint: ClassVar[bool] = False
    """It drafts only for requests whose output has to fit a grammar."""
    needs_forwards: ClassVar[bool] = False
    """It drafts by forwards of a model of its own."""
    has_own_kv: ClassVar[bool] = False
    """The model by which it drafts has a KV cache beside the target's."""
    takes_model: ClassVar[bool] = False
    needed_model: ClassVar[str | None] = None
    """What ``model`` has to name; None where it may be left out."""

    method: str = _method("prompt_lookup")
    model: str | None = setting(
        None,
        "Folder, GGUF file or hub id of the draft model, of the head or of the model whose MTP "
        "layer drafts, None for the target; the file of the n-gram model.",
        optional(check_text),
    )
    num_speculative_tokens: int = _depth(4)
    max_tree_nodes: int = _nodes(0)
    max_branching: int = _branching(1)
    min_accept_prob: float = setting(
        0.02,
        "Nodes less likely to be reached and accepted than this are not verified, the first one "
        "included. Chooses what is verified, never what is accepted.",
        number(0.0, 1.0),
    )

    def __new__(cls, method: str = "prompt_lookup", *_: Any, **named: Any) -> SpeculativeConfig:
        """The configuration of the method, which :meth:`__init__` fills."""
        own = config_class(method) if cls is SpeculativeConfig else cls
        check_fields(own, {*named} - {"method"}, ConfigError)
        return object.__new__(own)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", check_method(self.method))
        if config_class(self.method) is not type(self):
            wanted = config_class(self.method).__name__
            raise ConfigError(f"{type(self).__name__} is not for {self.method}; {wanted} is")
        check_settings(self)
        self._check_own()
        if self.needed_model and not self.model:
            raise ConfigError(f'method "{self.method}" needs "model": {self.needed_model}')
        if self.max_branching > 1 and self.max_tree_nodes == 0:
            nodes = min(MAX_TREE_NODES, self.num_speculative_tokens * self.max_branching)
            object.__setattr__(self, "max_tree_nodes", nodes)

    def _check_own(self) -> None:
        """Raise :class:`ConfigError` where values that are allowed by themselves do not fit."""

    @property
    def tree_nodes(self) -> int:
        """Node cap of one draft, the chain's length when no tree was asked for."""
        return max(self.max_tree_nodes, self.num_speculative_tokens)

    @property
    def tree_branching(self) -> int:
        """Most children of one node; 1 where no tree was asked for."""
        return self.max_branching if self.max_tree_nodes else 1


@dataclass(frozen=True, slots=True)
class PromptLookupConfig(SpeculativeConfig):
    """Drafts of what followed the latest matches in the request."""

    prompt_lookup_min: int = setting(2, "Shortest match, in tokens.", whole(1, LONGEST_MATCH))
    prompt_lookup_max: int = setting(4, "Longest match, in tokens.", whole(1, LONGEST_MATCH))
    prompt_lookup_window: int = setting(
        8192, "How far back a match may lie, in tokens.", whole(1, 1 << 24)
    )

    def _check_own(self) -> None:
        check_number(
            "prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, LONGEST_MATCH
        )


@dataclass(frozen=True, slots=True)
class SuffixConfig(SpeculativeConfig):
    """Drafts of what followed the longest match: trees that go on for as long as it lets hope."""

    method: str = _method("suffix")
    num_speculative_tokens: int = _depth(16)
    max_tree_nodes: int = _nodes(16)
    max_branching: int = _branching(4)
    suffix_decoding_max_tree_depth: int = setting(
        24, "Longest match that is told from a longer one.", whole(1, 256)
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0,
        "Longest draft as a multiple of its match; 8 tokens are always allowed.",
        number(0.0, 1000.0),
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1,
        "Least share of what followed a match that a token must have to be drafted.",
        number(0.0, 1.0),
    )
    suffix_decoding_max_cached_requests: int = setting(
        10_000,
        "Finished requests whose answers are matched, too; the least recently used go first. "
        "0 is none.",
        whole(0, 1 << 24),
    )
    suffix_decoding_max_cached_tokens: int = setting(
        1 << 20, "Most tokens of these answers.", whole(1, 1 << 28)
    )


@dataclass(frozen=True, slots=True)
class NgramModelConfig(SpeculativeConfig):
    """Drafts by a trained n-gram model: look-ups cost next to nothing, and the planner verifies no
    more than pays."""

    takes_model = True
    needed_model = "a file that paceline train ngram wrote"

    method: str = _method("ngram_model")
    num_speculative_tokens: int = _depth(8)
    max_tree_nodes: int = _nodes(16)
    max_branching: int = _branching(4)
    ngram_window: int = setting(
        8192,
        "How far back it learns from the request's own text, in tokens; 0 leaves that to the "
        "trained model.",
        whole(0, 1 << 24),
    )


@dataclass(frozen=True, slots=True)
class GrammarConfig(SpeculativeConfig):
    """Drafts of what a grammar forces, which go further than what others guess."""

    needs_constraint = True

    method: str = _method("grammar")
    num_speculative_tokens: int = _depth(16)
    max_tree_nodes: int = _nodes(24)


@dataclass(frozen=True, slots=True)
class ForwardingConfig(SpeculativeConfig):
    """What all methods have that draft by forwards of a model."""

    needs_forwards = has_own_kv = True

    temperature: float | None = _ranking(number(0.0, 100.0))
    top_p: float | None = _ranking(number(1e-9, 1.0))
    top_k: int | None = _ranking(whole(-1, 1 << 31))
    dtype: str = setting("auto", "Precision of the model that drafts.", one_of(DTYPES))
    deterministic: bool = setting(
        False, "Draft with the target's reproducible kernels (slower).", check_switch
    )
    catch_up_tokens: int = setting(
        512, "Most tokens per step with which a lagging draft catches up.", whole(1, 1 << 20)
    )

    @property
    def may_translate(self) -> bool:
        """The model that drafts may have another vocabulary than the target."""
        return False


@dataclass(frozen=True, slots=True)
class DraftModelConfig(ForwardingConfig):
    """Drafts by a smaller model."""

    takes_model = True
    needed_model = "the draft's folder or hub id"

    method: str = _method("draft_model")
    use_heterogeneous_vocab: bool = setting(
        False, "The draft model may have another vocabulary than the target.", check_switch
    )
    vocab_replacements: tuple[tuple[str, str], ...] = setting(
        (),
        "Texts of the target and what the draft model reads instead, such as the markers of chats.",
        _check_replacements,
    )

    @property
    def may_translate(self) -> bool:
        return self.use_heterogeneous_vocab

    def _check_own(self) -> None:
        pairs = tuple((ours, theirs) for ours, theirs in self.vocab_replacements)
        object.__setattr__(self, "vocab_replacements", pairs)
        if pairs and not self.use_heterogeneous_vocab:
            raise ConfigError(
                "vocab_replacements needs use_heterogeneous_vocab: a draft of the target's own "
                "vocabulary reads its tokens as they are"
            )


@dataclass(frozen=True, slots=True)
class ParallelDraftConfig(ForwardingConfig):
    """Drafts of several tokens in one forward: further tokens of one that is made anyway."""

    takes_model = True
    needed_model = "the folder or hub id of a draft that was trained for it"

    method: str = _method("parallel_draft")
    num_speculative_tokens: int = _depth(8)


@dataclass(frozen=True, slots=True)
class SelfDraftConfig(ForwardingConfig):
    """Drafts by the target itself, with fewer layers, fewer bits, or both."""

    has_own_kv = False

    method: str = _method("self")
    draft_layers: int | None = setting(
        None, "Layers of the target that run; None is all of them.", optional(whole(1, 1 << 16))
    )

    def _check_own(self) -> None:
        if self.model is not None:
            raise ConfigError('method "self" takes no "model": the target itself drafts')
        if self.draft_layers is None and self.dtype == "auto":
            raise ConfigError(
                'method "self" needs "draft_layers", fewer "bits", or both: the whole target in '
                "its own precision would cost as much as it drafts for"
            )


@dataclass(frozen=True, slots=True)
class HeadConfig(ForwardingConfig):
    """Drafts by a head that reads the target's hidden states.

    Its forward is cheap beside the target's, and the planner stops where a level does not pay.
    """

    takes_model = True
    needed_model: ClassVar[str | None] = (
        "the folder, GGUF file or hub id of a head that was trained for the target"
    )

    method: str = _method("eagle3")
    num_speculative_tokens: int = _depth(5)
    max_tree_nodes: int = _nodes(16)
    max_branching: int = _branching(4)


@dataclass(frozen=True, slots=True)
class MtpConfig(HeadConfig):
    """Drafts by the MTP layer that came with the target, or with the model that is named."""

    needed_model: ClassVar[str | None] = None

    method: str = _method("mtp")


@dataclass(frozen=True, slots=True)
class BlockHeadConfig(HeadConfig):
    """Drafts by a head all of whose tokens come at once; the planner verifies what pays."""

    method: str = _method("dflash")
    num_speculative_tokens: int = _depth(8)


@dataclass(frozen=True, slots=True)
class AssistantConfig(HeadConfig):
    """Drafts by the small decoder that Gemma 4 models come with, which reads the target's KV."""

    has_own_kv = False

    method: str = _method("gemma4_assistant")


@dataclass(frozen=True, slots=True)
class PluginConfig(SpeculativeConfig):
    """Drafts by a proposer of another package."""

    takes_model = True

    method: str = _method("")
    options: Mapping[str, Any] = setting(
        MISSING,
        "What a plugin's proposer is told, in its own keys.",
        _check_object,
        default_factory=dict,
        hash=False,
    )


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft that is built in.

    Attributes:
        config: the class of its configurations.
        builder: ``module:function`` in :mod:`paceline.proposers`, which makes a proposer of such a
            configuration and of what it has to fit to.
        help: what it drafts.
    """

    config: type[SpeculativeConfig]
    builder: str
    help: str


_SEVERAL = "several tokens at once, out of the target's hidden states"
METHODS: dict[str, Method] = {
    "prompt_lookup": Method(
        PromptLookupConfig, "prompt_lookup:build", "what followed the latest matches in the request"
    ),
    "suffix": Method(
        SuffixConfig,
        "suffix:build",
        "what followed the longest match, in the request and in earlier answers",
    ),
    "ngram_model": Method(
        NgramModelConfig,
        "ngram_model:build",
        "what usually follows, as trained, and in the request",
    ),
    "draft_model": Method(DraftModelConfig, "draft_model:build", "what a smaller model would say"),
    "parallel_draft": Method(
        ParallelDraftConfig,
        "draft_model.proposer:build_parallel_draft",
        "several tokens in one forward, by mask tokens",
    ),
    "self": Method(
        SelfDraftConfig,
        "draft_model.self_draft:build",
        "what the target would say with fewer layers or bits",
    ),
    "eagle3": Method(
        HeadConfig, "heads:build", "what a head that reads the target's hidden states says"
    ),
    "peagle": Method(BlockHeadConfig, "heads:build", _SEVERAL),
    "mtp": Method(MtpConfig, "heads:build", "what the MTP layer that came with the target says"),
    "dflash": Method(BlockHeadConfig, "heads:build", _SEVERAL),
    "dspark": Method(BlockHeadConfig, "heads:build", _SEVERAL),
    "dflash2": Method(BlockHeadConfig, "heads:build", _SEVERAL),
    "gemma4_assistant": Method(
        AssistantConfig,
        "heads:build",
        "what Gemma 4's assistant says, which reads the target's keys and values",
    ),
    "grammar": Method(GrammarConfig, "grammar:build", "what a grammar forces"),
}
"""The built-in methods, by name. No plugin takes the place of one of them."""
HEAD_METHODS = tuple(name for name in METHODS if issubclass(METHODS[name].config, HeadConfig))


def config_class(method: object) -> type[SpeculativeConfig]:
    """The class of a method's configurations; ``ConfigError`` where there is no such method."""
    name = check_method(method)
    return METHODS[name].config if name in METHODS else PluginConfig


def plugins() -> dict[str, EntryPoint]:
    """The proposers of other packages that are installed, by their methods."""
    by_method: dict[str, EntryPoint] = {}
    for entry in plugins_of(ENTRY_POINTS):
        if entry.name not in METHODS:
            by_method.setdefault(entry.name, entry)
    return by_method


def check_method(
    name: object, key: str = "method", error: type[PacelineError] = ConfigError
) -> str:
    """The method of this name or alias.

    Raises:
        PacelineError: of type ``error``: it is neither built in nor an installed plugin's.
    """
    method = METHOD_ALIASES.get(name, name) if isinstance(name, str) else None
    if method is not None and (method in METHODS or method in plugins()):
        return method
    others = ", ".join(sorted(plugins())) or "none"
    raise error(
        f"{key} is {str(name)[:60]!r}; allowed: {', '.join(METHODS)}, and installed plugins "
        f"(entry points {ENTRY_POINTS}): {others}",
        key,
    )


def without_memory(configs: Iterable[SpeculativeConfig]) -> tuple[SpeculativeConfig, ...]:
    """The same proposers, which forget a request when it ends.

    For whatever runs a prompt more than once to measure it: drafts out of the answer that it got
    before would flatter speculation.
    """
    return tuple(
        replace(config, suffix_decoding_max_cached_requests=0)
        if isinstance(config, SuffixConfig)
        else config
        for config in configs
    )
