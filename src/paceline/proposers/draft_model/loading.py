"""Loads draft models. Owns what a draft must share with its target, and its KV cache's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.backends.resolve import resolve_dtype, resolve_ops
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config.speculative import (
    DraftModelConfig,
    ForwardingConfig,
    SelfDraftConfig,
)
from paceline.core.errors import ConfigError
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.backend import PackedBatch
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.drafter import draft_kv
from paceline.request.span import Span
from paceline.tensors.arrays import Floats


def load_draft(config: ForwardingConfig, target: TargetInfo) -> ModelRunner:
    """Load the model that a configuration names, with a KV cache within ``target.kv_bytes``.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: its vocabulary is not the target's, or there is no memory for its KV cache.
    """
    checkpoint = open_draft(config, target)
    _check_vocabulary(checkpoint, config, target)
    return draft_runner(checkpoint, config, target)


def check_draft(config: ForwardingConfig, target: TargetInfo) -> None:
    """Raise what :func:`load_draft` would of a model that is no draft of the target."""
    _check_vocabulary(open_draft(config, target), config, target)


def open_draft(config: ForwardingConfig, target: TargetInfo) -> Checkpoint:
    """The model that a configuration names, whatever its vocabulary; for ``self`` the first layers
    of the target as a model of their own.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: the target has fewer layers, or is not there.
    """
    if isinstance(config, SelfDraftConfig):
        if target.checkpoint is None:
            raise ConfigError('method "self" drafts with the target, and none is loaded here')
        most = target.checkpoint.config.num_layers
        return target.checkpoint.first_layers(num_draft_layers(config, most))
    assert config.model is not None
    return load_checkpoint(config.model, with_tokenizer=target.fingerprint is not None)


def num_draft_layers(config: SelfDraftConfig, most: int) -> int:
    """How many of a target's ``most`` layers ``self`` runs; raises :class:`ConfigError`."""
    count = most if config.draft_layers is None else config.draft_layers
    if count > most:
        raise ConfigError(f"draft_layers is {count}; the target has {most} layers")
    return count


def check_goes_back(shape: ModelConfig, use: str) -> None:
    """Raise :class:`ConfigError` where a use of drafts needs to forget tokens that were read, which
    states of recurrent layers cannot."""
    if shape.recurrent is not None:
        raise ConfigError(
            f"{shape.architecture} has recurrent layers, and {use} needs a draft whose layers are "
            'all attention; as a draft of the target\'s vocabulary it runs by method "draft_model"'
        )


def draft_dtype(config: ForwardingConfig, checkpoint: Checkpoint, target: TargetInfo) -> str:
    """The precision in which a draft is run; raises :class:`ConfigError` where it cannot be."""
    as_target = isinstance(config, SelfDraftConfig) and config.dtype == "auto"
    dtype = target.dtype if as_target else config.dtype
    return resolve_dtype(dtype, target.device, checkpoint, target.backend)


def draft_runner(
    checkpoint: Checkpoint, config: ForwardingConfig, target: TargetInfo, expansion: int = 1
) -> ModelRunner:
    """A draft ready to run.

    Args:
        expansion: tokens of the draft per token of the target for which there has to be room.

    Raises:
        ConfigError: there is no memory for its KV cache.
    """
    shape = checkpoint.config
    dtype = draft_dtype(config, checkpoint, target)
    ops = resolve_ops(dtype, target.device, config.deterministic, target.backend)
    max_len = min(expansion * target.max_model_len, shape.max_position)
    kv = draft_kv(shape, ops, config, target, max_len)
    decoder = Decoder(shape, checkpoint.tensors, ops, max_len)
    if shape.vocab_size == target.vocab_size:
        return ModelRunner(decoder, kv)
    if decoder.pruned_head is not None:
        raise ConfigError(
            f"{checkpoint.name} has {shape.vocab_size} tokens, of which its head has some, and the "
            f"target {target.vocab_size}; prune the head of a draft that is as wide as the target"
        )
    return PaddedRunner(decoder, kv, target.vocab_size)


class PaddedRunner(ModelRunner):
    """A draft whose vocabulary is the target's, padded to another size.

    Args:
        vocab_size: of the target. The logits are as wide: tokens that it has not are cut off, and
            those that the draft has not are -inf.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, vocab_size: int) -> None:
        super().__init__(decoder, kv)
        self._vocab_size = vocab_size

    grows_trees = False  # what is cut off and read instead is done between forwards

    def pack(self, spans: Sequence[Span], adapters: Sequence[Any] = ()) -> PackedBatch:
        return super().pack([self._readable(span) for span in spans], adapters)

    def _readable(self, span: Span) -> Span:
        """The span without padding that only the target has; something else is read instead."""
        size = self.decoder.config.vocab_size
        if max(span.token_ids) < size:
            return span
        return span._replace(token_ids=[token if token < size else 0 for token in span.token_ids])

    def forward(
        self, batch: PackedBatch, greedy: bool = False, inputs: Floats | None = None
    ) -> ForwardResult:
        result = super().forward(batch, greedy, inputs)
        missing = self._vocab_size - result.logits.shape[1]
        logits = result.logits[:, : self._vocab_size]
        if missing > 0:
            logits = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return replace(result, logits=np.ascontiguousarray(logits))


def check_unread_vocabulary(draft: Checkpoint, vocab_size: int, has_tokenizer: bool) -> None:
    """What can be asked where the target, or else the draft, has no tokenizer.

    Args:
        vocab_size: of the target.
        has_tokenizer: whether the target has one.

    Raises:
        ConfigError: the target has a tokenizer, or another number of tokens.
    """
    if has_tokenizer:
        raise ConfigError(
            f"{draft.name} has no tokenizer, so that nothing says whether its tokens are the "
            "target's; if they are, copy the target's tokenizer.json into its folder"
        )
    if draft.config.vocab_size != vocab_size:
        raise ConfigError(
            f"{draft.name} has {draft.config.vocab_size} tokens and the target {vocab_size}; "
            "without tokenizers a draft model needs as many"
        )


def _check_vocabulary(checkpoint: Checkpoint, config: ForwardingConfig, target: TargetInfo) -> None:
    """Equal vocabularies may be padded to different sizes."""
    if isinstance(config, SelfDraftConfig):  # the target's own layers
        return
    name, size, tokenizer = checkpoint.name, checkpoint.config.vocab_size, checkpoint.tokenizer
    if tokenizer is None or target.fingerprint is None:
        has_tokenizer = target.fingerprint is not None
        check_unread_vocabulary(checkpoint, target.vocab_size, has_tokenizer)
    elif tokenizer.fingerprint != target.fingerprint:
        what_to_do = (
            "name it by --draft, which translates, or set use_heterogeneous_vocab in "
            "--speculative-config"
        )
        if config.may_translate:
            what_to_do = "drafting with another vocabulary works in an engine alone"
        elif not isinstance(config, DraftModelConfig):
            what_to_do = f"{config.method} needs a draft of the target's vocabulary"
        raise ConfigError(
            f"{name} has {size} tokens, and the target {target.vocab_size} other ones; {what_to_do}"
        )
