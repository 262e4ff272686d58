"""What recorded drafts are of: the traces, the draft model, and how it drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from paceline import __version__
from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError, TraceError
from paceline.models.checkpoint import Checkpoint
from paceline.models.ops.resolve import resolve_ops
from paceline.models.stored import StoredTensors
from paceline.proposers.base import TargetInfo
from paceline.proposers.draft_model.build import EXPANSION, vocabulary_pair
from paceline.proposers.draft_model.growth import branching
from paceline.proposers.draft_model.loading import draft_dtype, open_draft
from paceline.proposers.draft_model.vocabulary import VocabularyPair
from paceline.workbench.trace_requests import trace_params
from paceline.workbench.traces import Trace

FORMAT_VERSION = 2
_RANKING = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True)
class DraftsKey:
    """What drafts were recorded from. Equal keys give equal drafts.

    Attributes:
        traces: hash of their tokens, and how they were sampled.
        draft: name of the draft model and hash of its weights.
        form: what is kept of its drafts: ``levels`` one by one, those of one forward (``masks``),
            or in which vocabularies they were ``translated``.
        arithmetic: how it is run.
        vocab_size: of the recorded tokens.
        max_len: the draft's context, in tokens.
        branching, max_nodes, max_depth, min_accept_prob: how far trees were grown.
        temperature, top_p, top_k: how candidates were ranked, where not as the traces.
        version: of Paceline.
    """

    traces: str
    draft: str
    form: str
    arithmetic: str
    vocab_size: int
    max_len: int
    branching: int
    max_nodes: int
    max_depth: int
    min_accept_prob: float
    temperature: float | None
    top_p: float | None
    top_k: int | None
    version: str

    @property
    def text(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, sort_keys=True)

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128(self.text.encode()).hexdigest()

    def check_covers(self, config: SpeculativeConfig) -> None:
        """Raise :class:`ConfigError` unless drafts by ``config`` are part of what was recorded."""
        wanted = {"branching": branching(config), **{k: getattr(config, k) for k in _RANKING}}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"drafts with {name} {value} were not recorded, only with "
                    f"{getattr(self, name)}: record them for this configuration"
                )
        if (
            config.tree_nodes > self.max_nodes
            or config.num_speculative_tokens > self.max_depth
            or config.min_accept_prob < self.min_accept_prob
        ):
            raise ConfigError(
                f"drafts were recorded up to {self.max_nodes} nodes, {self.max_depth} tokens deep, "
                f"from a probability of {self.min_accept_prob} on: record them for larger ones"
            )


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model before it runs; ``pair`` are target's and draft's vocabularies if two."""

    checkpoint: Checkpoint
    pair: VocabularyPair | None


def draft_source(config: SpeculativeConfig, target: TargetInfo) -> DraftSource:
    """The draft model that a configuration names.

    Raises:
        ConfigError, ModelLoadError: there is no such model, or its vocabulary cannot be translated.
    """
    checkpoint = open_draft(config, target)
    if not config.use_heterogeneous_vocab:
        return DraftSource(checkpoint, None)
    if target.tokenizer is None or checkpoint.tokenizer is None:
        raise ConfigError(
            "use_heterogeneous_vocab needs texts, and target or draft has no tokenizer"
        )
    return DraftSource(checkpoint, vocabulary_pair(checkpoint, config, target))


def drafts_key(
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    config: SpeculativeConfig,
    target: TargetInfo,
    source: DraftSource | None = None,
) -> DraftsKey:
    """The key of the drafts by a configuration for the traces of a target.

    Reads all of the draft's weights.

    Args:
        source: of ``config``; None opens it.

    Raises:
        TraceError: the traces do not say how they were sampled.
        ConfigError, ModelLoadError: there is no such draft model.
    """
    source = source or draft_source(config, target)
    checkpoint, shape = source.checkpoint, source.checkpoint.config
    expansion = 1 if source.pair is None else EXPANSION
    return DraftsKey(
        traces=_traces_digest(traces, meta),
        draft=f"{checkpoint.name} {_weights_digest(checkpoint)}",
        form=_form(source, config, target),
        arithmetic=_arithmetic(checkpoint, config, target),
        vocab_size=target.vocab_size if source.pair is None else shape.vocab_size,
        max_len=min(expansion * target.max_model_len, shape.max_position),
        branching=branching(config),
        max_nodes=config.tree_nodes,
        max_depth=config.num_speculative_tokens,
        min_accept_prob=config.min_accept_prob,
        **{name: getattr(config, name) for name in _RANKING},
        version=__version__,
    )


def _form(source: DraftSource, config: SpeculativeConfig, target: TargetInfo) -> str:
    if source.pair is None:
        return "masks" if config.method == "parallel_draft" else "levels"
    tokenizer = source.checkpoint.tokenizer
    assert tokenizer is not None
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
    tensors = checkpoint.tensors
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        if isinstance(tensors, StoredTensors):
            tensors.release(name)
    return digest.hexdigest()


def _arithmetic(checkpoint: Checkpoint, config: SpeculativeConfig, target: TargetInfo) -> str:
    """How :func:`~paceline.proposers.draft_model.loading.load_draft` will run the model."""
    dtype = draft_dtype(config, checkpoint, target)
    ops = resolve_ops(dtype, target.device, config.deterministic, target.backend)
    return f"{ops.name}, {dtype}" + (", deterministic" if ops.identity else "")
