"""Recorded drafts: what a draft model would propose at every place of traces, and their files.

A replay grows its trees from as many of the recorded levels as it asks for. With a draft of another
vocabulary it translates the texts of its requests and the trees as the proposer does, and only the
forwards come out of the recording.

One safetensors file per recording, with

    positions     int64 [traces + 1]     where each trace's positions begin and end in ``offsets``
    offsets       int64 [positions + 1]  where each position's candidates begin and end
    token_ids     int32 [candidates]
    parents       int32 [candidates]     index within the position, -1 for the first level
    accept_probs  float64 [candidates]   exact, for nodes are ranked by their products

and in its metadata the key, ``forwards`` of :class:`RecordedDrafts` as JSON, and the checksum.

Position i of a trace follows its prompt and i output tokens. Candidates are those of all levels,
level by level, the children of a node together and best first. A checksum tells whether a file is
whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paceline import __version__
from paceline.backends.resolve import resolve_ops
from paceline.cache.kv_cache import KVCache
from paceline.config import EngineConfig
from paceline.config.speculative import DraftModelConfig, ForwardingConfig, HeadConfig
from paceline.core.errors import ConfigError, TraceError
from paceline.core.files import whole_file
from paceline.loading.checkpoint import Checkpoint
from paceline.models.backend import Ops
from paceline.models.heads import PEAGLE
from paceline.planner.drafts import FREE, Prices
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Candidates, DraftState, Growth
from paceline.proposers.base.parallel import ParallelDrafter
from paceline.proposers.draft_model import EXPANSION, vocabulary_pair
from paceline.proposers.draft_model.heterogeneous import (
    HeterogeneousProposer,
    Shadow,
    ShadowDrafter,
    shadow_config,
)
from paceline.proposers.draft_model.loading import draft_dtype, open_draft
from paceline.proposers.draft_model.translation import VocabularyPair
from paceline.proposers.heads import open_head
from paceline.proposers.heads.checkpoint import HeadCheckpoint
from paceline.request.request import Request
from paceline.request.span import ROOT, Span
from paceline.request.traces import Trace
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.stored import StoredTensors
from paceline_lab.trace.requests import trace_params

NOWHERE = ROOT - 1


def cached_proposer(
    config: ForwardingConfig, drafts: RecordedDrafts, places: Sequence[int]
) -> Proposer:
    """A proposer whose drafts are those of a model, out of what was recorded of it.

    Args:
        config: how to draft; its trees no larger than those recorded.
        drafts: of the traces.
        places: of each request, by its id: which of the recorded traces it is.

    Raises:
        ConfigError: drafts of this configuration are not among those recorded.
    """
    drafts.key.check_covers(config)
    if drafts.pair is not None:
        drafter = _CachedShadows(shadow_config(config), drafts, places)
        return HeterogeneousProposer(config, cast(ShadowDrafter, drafter), drafts.pair)
    return _CACHED[drafts.key.form](config, drafts, places)


class CachedDrafts(Drafter):
    """Drafts as the draft model would, out of what was recorded of it; nothing is forwarded.

    Only where its KV cache is full does the model itself draft less. Arguments are those of
    :func:`cached_proposer`.

    Attributes:
        num_forwards, num_rows: what the draft model would have been asked for.
    """

    num_forwards = 0
    num_rows = 0

    def __init__(
        self, config: ForwardingConfig, drafts: RecordedDrafts, places: Sequence[int]
    ) -> None:
        super().__init__(config, KVCache(_NoMemory(), prefix_caching=False), drafts.key.max_len)
        self.name = config.method
        self._recorded = drafts
        self._trace_of = places
        self._places: dict[int, TracePlace] = {}

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._places.pop(request.request_id, None)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        self.num_forwards += 1
        self.num_rows += sum(len(span.token_ids) - span.num_cached for span in spans)
        return [self.place(row.request).below(row.path) for row in rows]

    def _kept(self, draft: DraftState, committed: Sequence[int]) -> Sequence[int]:
        """Heads read drafted tokens again, with the target's hidden states."""
        return () if isinstance(self.config, HeadConfig) else super()._kept(draft, committed)

    def position(self, request: Request) -> int:
        """How many output tokens of its trace a request holds."""
        return request.num_output_tokens

    def place(self, request: Request) -> TracePlace:
        position = self.position(request)
        place = self._places.get(request.request_id)
        if place is None or place.position != position:
            trace = self._trace_of[request.request_id]
            place = TracePlace(position, *self._recorded.candidates(trace, position))
            self._places[request.request_id] = place
        return place


class TracePlace:
    """What was recorded at one position of a trace, found by the path that leads to it."""

    __slots__ = ("_children", "_probs", "_tokens", "position")

    def __init__(
        self, position: int, tokens: list[int], parents: list[int], probs: list[float]
    ) -> None:
        self.position = position
        self._tokens = tokens
        self._probs = probs
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)

    def below(self, path: Sequence[int]) -> Candidates:
        tokens, node = self._tokens, ROOT
        for token in path:
            node = next(child for child in self._children[node] if tokens[child] == token)
        return self._candidates(node)

    def _candidates(self, node: int) -> Candidates:
        children = self._children.get(node, ())
        return [self._tokens[child] for child in children], [
            self._probs[child] for child in children
        ]

    def levels(self, count: int) -> list[Candidates]:
        """What was kept of each depth, each below the likeliest of the one before."""
        levels, node = list[Candidates](), ROOT
        for _ in range(count):
            levels.append(self._candidates(node))
            node = next(iter(self._children.get(node, ())), NOWHERE)
        return levels


class _NoMemory:
    """KV memory for the books alone, and more of it than a replay needs."""

    num_blocks = 1 << 16

    def move(self, source: Any, target: Any) -> None: ...

    def fill(self, slots: Any, value: float) -> None: ...

    def lent(self, layers: Sequence[int]) -> _NoMemory:
        return self


class CachedParallelDrafts(ParallelDrafter, CachedDrafts):
    """Drafts as the parallel draft would, out of what was recorded of it."""

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        depths = [self._depths[row.request.request_id] for row in rows]
        self.num_forwards += 1
        self.num_rows += sum(len(span.token_ids) for span in spans) + sum(depths) - len(depths)
        places = (self.place(row.request) for row in rows)
        wanted = zip(places, depths, strict=True)
        return [level for place, depth in wanted for level in place.levels(depth)]


class CachedBlockDrafts(CachedDrafts):
    """Drafts as a head would whose levels depend on their paths, and come of one forward."""

    costs_levels = False

    def _add_levels(
        self, growths: list[Growth], candidates: Iterable[Candidates], prices: Prices
    ) -> None:
        forwards = self.num_forwards
        super()._add_levels(growths, candidates, FREE)
        self.num_forwards = forwards


LEVELS, MASKS, BLOCK = "levels", "masks", "block"
_CACHED = {LEVELS: CachedDrafts, MASKS: CachedParallelDrafts, BLOCK: CachedBlockDrafts}


class _CachedShadows(CachedDrafts):
    """Drafts for shadows; a place of a trace is where the real request is."""

    def __init__(
        self, config: ForwardingConfig, drafts: RecordedDrafts, places: Sequence[int]
    ) -> None:
        super().__init__(config, drafts, places)
        self.shadows: dict[int, Shadow] = {}

    def position(self, request: Request) -> int:
        return self.shadows[request.request_id].real.num_output_tokens


FORMAT_VERSION = 3
_ARRAYS = ("positions", "offsets", "token_ids", "parents", "accept_probs")


@dataclass(frozen=True, slots=True)
class DraftsKey:
    """What drafts were recorded from. Equal texts give equal drafts.

    Attributes:
        config: of the draft model, with the largest trees.
        max_len: the draft's context, in tokens.
        text: everything that decides about drafts, as JSON.
        form: what is kept of a draft: levels that took a forward each (``levels``), those of one
            forward that know nothing of one another (``masks``), or those of one forward that
            depend on the tokens before them (``block``).
        block_rows: of a head's forward, whatever is drafted of them; 0: one for each known token
            that it reads and each further one that it drafts.
    """

    config: ForwardingConfig
    max_len: int
    text: str
    form: str = "levels"
    block_rows: int = 0

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128(self.text.encode()).hexdigest()

    def check_covers(self, config: ForwardingConfig) -> None:
        """Raise :class:`ConfigError` unless drafts by ``config`` are part of what was recorded."""
        largest = self.config
        known, wanted = _ranking(largest), _ranking(config)
        for name, value in wanted.items():
            if known[name] != value:
                raise ConfigError(
                    f"drafts with {name} {value} were not recorded, only with {known[name]}: "
                    "record them for this configuration"
                )
        if (
            config.tree_nodes > largest.tree_nodes
            or config.num_speculative_tokens > largest.num_speculative_tokens
            or config.min_accept_prob < largest.min_accept_prob
        ):
            raise ConfigError(
                f"drafts were recorded up to {largest.tree_nodes} nodes, "
                f"{largest.num_speculative_tokens} tokens deep, from a probability of "
                f"{largest.min_accept_prob} on: record them for larger ones"
            )


def _ranking(config: ForwardingConfig) -> dict[str, Any]:
    """What decides about the candidates below a node, whatever the size of trees."""
    names = ("temperature", "top_p", "top_k")
    return {"branching": config.tree_branching, **{name: getattr(config, name) for name in names}}


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model or head before it runs.

    Attributes:
        pair: target's and draft's vocabularies if they are two.
        head: None of a model.
    """

    checkpoint: Checkpoint
    pair: VocabularyPair | None = None
    head: HeadCheckpoint | None = None

    def form(self, config: ForwardingConfig) -> str:
        """See :class:`DraftsKey`."""
        block = self.head.block if self.head else None
        if block is not None and block.markov_rank:
            return BLOCK
        is_parallel = block is not None or config.method in ("parallel_draft", PEAGLE)
        return MASKS if is_parallel else LEVELS


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The target of heads, whose hidden states go into what they draft.

    Attributes:
        info: what drafts have to fit to.
        config: how the engine would be built.
    """

    info: TargetInfo
    config: EngineConfig
    ops: Ops

    def said(self) -> str:
        """Everything of the target that decides about hidden states; reads all of its weights."""
        checkpoint = self.info.checkpoint
        assert checkpoint is not None
        return (
            f"{checkpoint.name} {_weights_digest(checkpoint)}, "
            f"{_said_of_ops(self.ops, self.config.dtype)}, keys {self.config.kv_cache_dtype}"
        )


def draft_source(config: ForwardingConfig, target: TargetInfo) -> DraftSource:
    """The draft model or head that a configuration names, if one can be translated."""
    if isinstance(config, HeadConfig):
        head = open_head(config, target)
        return DraftSource(head.decoder, head=head)
    checkpoint = open_draft(config, target)
    if not isinstance(config, DraftModelConfig) or not config.may_translate:
        return DraftSource(checkpoint)
    return DraftSource(checkpoint, vocabulary_pair(checkpoint, config, target))


def drafts_key(
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    config: ForwardingConfig,
    target: TargetInfo,
    source: DraftSource,
    running: HeadTarget | None = None,
) -> DraftsKey:
    """The key of the drafts by a configuration for the traces of a target.

    Reads all of the draft's weights.

    Args:
        source: of ``config``.
        running: where that is a head.

    Raises:
        TraceError: the traces do not say how they were sampled.
    """
    checkpoint, shape = source.checkpoint, source.checkpoint.config
    expansion = 1 if source.pair is None else EXPANSION
    max_len = min(expansion * target.max_model_len, shape.max_position)
    head: dict[str, str] = {}
    if source.head is not None:
        assert running is not None
        max_len = target.max_model_len
        head = {"target": running.said(), "head": _head_digest(source.head)}
    said = {
        "format_version": FORMAT_VERSION,
        "version": __version__,
        "traces": _traces_digest(traces, meta),
        "draft": f"{checkpoint.name} {_weights_digest(checkpoint)}",
        "form": _form(source, config, target),
        "arithmetic": _arithmetic(checkpoint, config, target),
        "vocab_size": target.vocab_size if source.pair is None else shape.vocab_size,
        "max_len": max_len,
        "max_nodes": config.tree_nodes,
        "max_depth": config.num_speculative_tokens,
        "min_accept_prob": config.min_accept_prob,
        **_ranking(config),
        **head,
    }
    block = source.head.block if source.head else None
    rows, text = block.size if block else 0, json.dumps(said, sort_keys=True)
    return DraftsKey(config, max_len, text, source.form(config), rows)


def _form(source: DraftSource, config: ForwardingConfig, target: TargetInfo) -> str:
    """What is kept of a draft, and of which vocabulary its tokens were translated to which."""
    if source.pair is None:
        return source.form(config)
    tokenizer = source.checkpoint.tokenizer
    assert tokenizer is not None
    assert isinstance(config, DraftModelConfig)
    replacements = json.dumps(config.vocab_replacements)
    return f"translated from {tokenizer.fingerprint} to {target.fingerprint}, {replacements}"


def check_vocabulary(traces: Sequence[Trace], meta: Mapping[str, Any], target: TargetInfo) -> None:
    """Raise :class:`TraceError` where the traces' tokens are not the target's."""
    said = meta.get("vocab_fingerprint")
    if None not in (said, target.fingerprint) and said != target.fingerprint:
        raise TraceError("the traces are of a model with another vocabulary")
    highest = max((int(trace.token_ids.max()) for trace in traces), default=0)
    if highest >= target.vocab_size:
        raise TraceError(
            f"the traces hold token {highest}; the target's vocabulary has {target.vocab_size}: "
            "they are of another model"
        )


def _traces_digest(traces: Sequence[Trace], meta: Mapping[str, Any]) -> str:
    digest = xxhash.xxh3_128()
    for trace in traces:
        params = trace_params(trace, meta)
        lengths = f"{trace.prompt_len} {len(trace.token_ids)}"
        digest.update(f"{lengths} {params.temperature!r} {params.seed};".encode())
        digest.update(trace.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()


def _weights_digest(checkpoint: Checkpoint) -> str:
    shape = json.dumps(asdict(checkpoint.config), sort_keys=True)
    digest = xxhash.xxh3_128(f"{shape} {checkpoint.packed}".encode())
    _read_into(digest, checkpoint.tensors)
    return digest.hexdigest()


def _head_digest(head: HeadCheckpoint) -> str:
    """Of what a head has beside its layers."""
    tensors = ("decoder", "fusion", "further")
    said = {
        each.name: getattr(head, each.name) for each in fields(head) if each.name not in tensors
    }
    digest = xxhash.xxh3_128(repr(said).encode())
    for part in (head.fusion, head.further):
        _read_into(digest, part or {})
    return digest.hexdigest()


def _read_into(digest: xxhash.xxh3_128, tensors: Mapping[str, Any]) -> None:
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(np.ascontiguousarray(tensor.reshape(-1)).view(np.uint8).data)
        if isinstance(tensors, StoredTensors):
            tensors.release(name)


def _arithmetic(checkpoint: Checkpoint, config: ForwardingConfig, target: TargetInfo) -> str:
    """How :func:`~paceline.proposers.draft_model.loading.load_draft` will run the model."""
    dtype = draft_dtype(config, checkpoint, target)
    ops = resolve_ops(dtype, target.device, config.deterministic, target.backend)
    return _said_of_ops(ops, dtype)


def _said_of_ops(ops: Ops, dtype: str) -> str:
    return f"{ops.name}, {dtype}" + (", deterministic" if ops.identity else "")


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """The arrays that the module's docstring describes, and what they are of.

    Attributes:
        forwards: of the draft, for the first level of a draft and for each further one; others
            than 1 where a token of the target is several of the draft's.
        pair: the vocabularies of target and draft where they are two. Not in the file.
    """

    key: DraftsKey
    positions: NDArray[np.int64]
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    accept_probs: NDArray[np.float64]
    forwards: tuple[float, float] = (1.0, 1.0)
    pair: VocabularyPair | None = None

    def candidates(self, trace: int, position: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and probabilities of everything that was grown at a position."""
        at = int(self.positions[trace]) + position
        assert 0 <= position < int(self.positions[trace + 1]) - int(self.positions[trace])
        part = slice(int(self.offsets[at]), int(self.offsets[at + 1]))
        return (
            self.token_ids[part].tolist(),
            self.parents[part].tolist(),
            self.accept_probs[part].tolist(),
        )


def write_drafts(path: Path, drafts: RecordedDrafts) -> None:
    """Write a file as a whole or not at all; ``TraceError`` where it cannot be."""
    arrays, forwards = (
        {name: getattr(drafts, name) for name in _ARRAYS},
        json.dumps(drafts.forwards),
    )
    said = {"key": drafts.key.text, "forwards": forwards, "checksum": _checksum(arrays, forwards)}
    with whole_file(path, TraceError, make_folder=True) as partial:
        save_file(arrays, partial, said)


def read_drafts(path: Path, key: DraftsKey) -> RecordedDrafts:
    """The drafts in a file.

    Args:
        key: what they must be of.

    Raises:
        TraceError: the file cannot be read, is damaged, or holds drafts of something else.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            said = file.metadata() or {}
            if said.get("key") != key.text:
                raise TraceError(f"{path} holds drafts of something else")
            arrays: dict[str, Any] = {name: file.get_tensor(name) for name in _ARRAYS}
    except (OSError, SafetensorError, ValueError) as error:
        raise TraceError(f"{path} is damaged: {error}") from error
    forwards = said.get("forwards", "")
    if said.get("checksum") != _checksum(arrays, forwards):
        raise TraceError(f"{path} is damaged: its checksum does not match")
    first, further = json.loads(forwards)
    return RecordedDrafts(key, **arrays, forwards=(first, further))


def _checksum(arrays: Mapping[str, NDArray[Any]], forwards: str) -> str:
    digest = xxhash.xxh3_128(forwards.encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
