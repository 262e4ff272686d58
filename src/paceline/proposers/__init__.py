"""From configurations to proposers: one builder per method, imported when it is needed.

Owns the registry and what a draft model must share with its target. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError, PacelineError
from paceline.proposers.base import Proposer

if TYPE_CHECKING:
    from paceline.models.checkpoint import Checkpoint
    from paceline.models.config import ModelConfig
    from paceline.models.ops.base import Ops
    from paceline.runtime.kv_cache import KVCache
    from paceline.runtime.model_runner import ModelRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What proposers have to fit to.

    Attributes:
        vocab_size: width of the target's logits.
        fingerprint: hash of the target's vocabulary, None where it has no tokenizer.
        device: torch device string.
        backend: of the ops, ``auto`` or what was forced.
        max_model_len: longest context, in tokens.
        max_num_seqs: most requests that run at once.
        kv_bytes: bytes for the KV caches of all draft models together.
    """

    vocab_size: int
    fingerprint: str | None
    device: str
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    backend: str = "auto"


def build_proposers(
    configs: Sequence[SpeculativeConfig], target: TargetInfo, *, strict: bool
) -> list[Proposer]:
    """The proposers of an engine, in the order of their configurations.

    One that cannot be built is left out with a warning, so that decoding goes on without it.

    Raises:
        PacelineError: ``strict``, and one cannot be built.
    """
    num_drafts = sum(config.method == "draft_model" for config in configs)
    proposers = []
    for config in configs:
        try:
            proposers.append(BUILDERS[config.method](config, target, num_drafts))
        except PacelineError as error:
            if strict:
                raise
            of = f" with model {config.model}" if config.model else ""
            log.warning("no drafts by %s%s, decoding goes on without: %s", config.method, of, error)
    return proposers


def _prompt_lookup(config: SpeculativeConfig, target: TargetInfo, num_drafts: int) -> Proposer:
    from paceline.proposers.prompt_lookup import PromptLookupProposer

    return PromptLookupProposer(config)


def _draft_model(config: SpeculativeConfig, target: TargetInfo, num_drafts: int) -> Proposer:
    from paceline.proposers.draft_model import DraftModelProposer

    return DraftModelProposer(config, load_draft(config, target, target.kv_bytes // num_drafts))


def _suffix(config: SpeculativeConfig, target: TargetInfo, num_drafts: int) -> Proposer:
    from paceline.proposers.suffix import SuffixProposer

    return SuffixProposer(config)


def _ngram_model(config: SpeculativeConfig, target: TargetInfo, num_drafts: int) -> Proposer:
    from paceline.proposers.ngram_model import NgramModelProposer
    from paceline.proposers.ngram_model.file import read_tables

    assert config.model is not None
    tables = read_tables(config.model)
    tables.check_fits(config.model, target.vocab_size, target.fingerprint)
    return NgramModelProposer(config, tables)


def _grammar(config: SpeculativeConfig, target: TargetInfo, num_drafts: int) -> Proposer:
    from paceline.proposers.grammar import GrammarProposer

    return GrammarProposer(config)


Builder = Callable[[SpeculativeConfig, TargetInfo, int], Proposer]
BUILDERS: dict[str, Builder] = {
    "prompt_lookup": _prompt_lookup,
    "draft_model": _draft_model,
    "suffix": _suffix,
    "ngram_model": _ngram_model,
    "grammar": _grammar,
}


def load_draft(config: SpeculativeConfig, target: TargetInfo, kv_bytes: int) -> ModelRunner:
    """Load the model that a configuration names, with a KV cache within ``kv_bytes``.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: its vocabulary is not the target's, or there is no memory for its KV cache.
    """
    from paceline.models.checkpoint import load_checkpoint
    from paceline.models.decoder import Decoder
    from paceline.models.ops.resolve import resolve_dtype, resolve_ops
    from paceline.runtime.model_runner import ModelRunner

    assert config.model is not None
    checkpoint = load_checkpoint(config.model, with_tokenizer=target.fingerprint is not None)
    _check_vocabulary(checkpoint, target)
    shape = checkpoint.config
    groups = checkpoint.packed is not None and checkpoint.packed.scale_groups
    dtype = resolve_dtype(config.dtype, target.device, checkpoint, target.backend)
    ops = resolve_ops(dtype, target.device, config.deterministic, target.backend, groups)
    max_len = min(target.max_model_len, shape.max_position)
    kv = _draft_kv(shape, ops, config, target, kv_bytes)
    return ModelRunner(Decoder(shape, checkpoint.tensors, ops, max_len), kv)


def _check_vocabulary(checkpoint: Checkpoint, target: TargetInfo) -> None:
    name, size = checkpoint.name, checkpoint.config.vocab_size
    if size != target.vocab_size:
        raise ConfigError(
            f"{name} has {size} tokens and the target {target.vocab_size}; a draft model needs the "
            "target's vocabulary"
        )
    tokenizer = checkpoint.tokenizer
    if tokenizer is not None and tokenizer.fingerprint != target.fingerprint:
        raise ConfigError(
            f"{name} has as many tokens as the target but other ones; a draft model needs the "
            "target's vocabulary"
        )


def _draft_kv(
    shape: ModelConfig, ops: Ops, config: SpeculativeConfig, target: TargetInfo, kv_bytes: int
) -> KVCache:
    """As many blocks as all requests at their longest could use, or as the bytes allow."""
    from paceline.runtime.kv_cache import KVCache, blocks_for, bytes_per_block

    per_request = blocks_for(target.max_model_len + config.tree_nodes)
    num_blocks = min(
        kv_bytes // bytes_per_block(shape, ops.default_kv_dtype),
        1 + target.max_num_seqs * per_request,
    )
    memory = ops.kv_memory(shape, max(0, num_blocks), ops.default_kv_dtype)
    return KVCache(memory, prefix_caching=False)
