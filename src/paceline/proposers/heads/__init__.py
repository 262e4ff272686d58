"""From a head's checkpoint to its proposer. Owns what a head must share with its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paceline.backends.resolve import resolve_dtype, resolve_ops
from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import HeadConfig
from paceline.core.errors import ConfigError
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import MTP, PEAGLE
from paceline.models.tensor_reader import TensorReader
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.drafter import draft_kv
from paceline.proposers.heads.assistant import build_assistant, layers_to_read
from paceline.proposers.heads.blocks import DFlashProposer, DSparkProposer, PEagleProposer
from paceline.proposers.heads.checkpoint import (
    MASK_HIDDEN,
    Block,
    HeadCheckpoint,
    check_vocabulary,
    load_head,
    load_mtp,
)
from paceline.proposers.heads.known_keys import DOMINO
from paceline.proposers.heads.markov import MARKOV_HEADS, Confidence, Correction, Domino
from paceline.proposers.heads.proposer import (
    Features,
    Fuse,
    Fusion,
    HeadDrafter,
    HeadProposer,
    first_tap,
)
from paceline.tensors.arrays import Floats, floats


def build(config: HeadConfig, target: TargetInfo) -> HeadDrafter:
    """A proposer by the head that a configuration names.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: it does not fit to the target, no target is loaded, or there is no memory for
            its KV cache and the target's hidden states.
    """
    return build_head(open_head(config, target), config, target)


def open_head(config: HeadConfig, target: TargetInfo) -> HeadCheckpoint:
    """The head that a configuration names; raises as :func:`build`."""
    if config.method == MTP:
        return load_mtp(config, target)
    assert config.model is not None
    return load_head(config.model)


def build_head(head: HeadCheckpoint, config: HeadConfig, target: TargetInfo) -> HeadDrafter:
    """:func:`build` of a head that is opened already."""
    if target.runner is None:
        raise ConfigError(
            f'method "{config.method}" drafts from hidden states of the target, and none is loaded '
            "here"
        )
    if head.kind == config.method and head.assistant is not None:
        return build_assistant(head, head.assistant, config, target, target.runner)
    taps = _fitting_taps(head, config, target)
    dtype = resolve_dtype(config.dtype, target.device, head.decoder, target.backend)
    ops = resolve_ops(dtype, target.device, config.deterministic, target.backend)
    runner = target.runner
    shape = replace(head.decoder.config, vocab_size=target.vocab_size)  # without other padding
    decoder = Decoder(
        shape, head.decoder.tensors, ops, target.max_model_len, lent=runner.decoder.ends
    )
    inputs = len(taps), runner.decoder.config.hidden_size
    fusion = _fusion(head, ops, *inputs)
    kept = Features.num_bytes(runner.kv, shape.hidden_size)
    rest = replace(target, kv_bytes=max(0, target.kv_bytes - kept))
    own = ModelRunner(decoder, draft_kv(shape, ops, config, rest, target.max_model_len))
    features = Features(runner.kv, fusion, inputs, shape.hidden_size)
    known = config, own, taps, features, runner.kv
    if head.kind == PEAGLE:
        return PEagleProposer(*known, mask_input=_mask_input(head, fusion, ops, *inputs))
    if head.block is None:
        own.taps = (shape.num_layers + head.norm_output,)
        return HeadProposer(*known)
    return _block_proposer(head, head.block, known, ops)


def _block_proposer(
    head: HeadCheckpoint, block: Block, known: tuple[Any, ...], ops: Ops
) -> DFlashProposer:
    """Of a DFlash, DSpark or Domino head; raises :class:`ModelLoadError`."""
    assert head.further is not None
    reader = TensorReader(head.further, known[1].decoder.config, ops)
    markov = _correction(reader, ops, block, known[1].decoder) if block.markov_rank else None
    confidence = Confidence(reader, ops, block) if block.has_confidence else None
    if markov is None:
        return DFlashProposer(*known, block=block, confidence=confidence)
    return DSparkProposer(*known, block=block, markov=markov, confidence=confidence)


def _correction(reader: TensorReader, ops: Ops, block: Block, decoder: Decoder) -> Correction:
    if block.markov_type != DOMINO:
        return MARKOV_HEADS[block.markov_type](reader, ops, block)
    scale = decoder.config.multipliers.embedding
    return Domino(reader, ops, block, lambda ids: ops.embedded(ids, decoder.embedding, scale))


def check_head(config: HeadConfig, target: TargetInfo) -> None:
    """Open a head, and compare it with a target of which the checkpoint is enough.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: it was made for another target.
    """
    head = open_head(config, target)
    if head.kind == config.method and head.assistant is not None:
        layers_to_read(head, head.assistant, target, _target_config(target))
    else:
        _fitting_taps(head, config, target)


def _fitting_taps(head: HeadCheckpoint, config: HeadConfig, target: TargetInfo) -> tuple[int, ...]:
    """The layers of the target that a head reads; ConfigError where it is another target's head."""
    if head.kind != config.method:
        raise ConfigError(f'{head.name} is a head of another kind: method "{head.kind}" is for it')
    shape = _target_config(target)
    taps = _taps(head, shape.num_layers)
    check_vocabulary(head, target)
    _check_made_for(head, shape)
    _check_width(head, len(taps), shape.hidden_size)
    return taps


def _target_config(target: TargetInfo) -> ModelConfig:
    known = target.runner.decoder if target.runner is not None else target.checkpoint
    assert known is not None
    return known.config


def _taps(head: HeadCheckpoint, num_layers: int) -> tuple[int, ...]:
    """The layers of the target that a head reads; raises :class:`ConfigError`.

    EAGLE-3 heads that do not name them were trained on the input of the third layer, of the middle
    one and of the third last.
    """
    if head.fusion is None:
        return (num_layers + 1,)
    ids = head.layer_ids or (2, num_layers // 2, num_layers - 3)
    if len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) <= num_layers:
        said = "says" if head.layer_ids else "says nothing, which stands for"
        raise ConfigError(
            f"{head.name} was made for another target: of the layers that it reads, counted from "
            f"the embedding on, its configuration {said} {list(ids)}; they must be "
            f"different numbers from 0 to {num_layers}, the target's layers"
        )
    return ids


def _check_width(head: HeadCheckpoint, num_taps: int, width: int) -> None:
    """Raise :class:`ConfigError` where the target's hidden states have another width."""
    if head.fusion is None:
        if head.decoder.config.hidden_size != width:
            raise ConfigError(
                f"{head.name} was made for another target: it reads hidden states of "
                f"{head.decoder.config.hidden_size} numbers, and the target's have {width}"
            )
        return
    if "fc.weight" not in head.fusion:
        raise ConfigError(f"{head.name} has no fc.weight: it is incomplete")
    shape = head.fusion.shape_of("fc.weight")
    if shape[1:] != (num_taps * width,):
        raise ConfigError(
            f"{head.name} was made for another target: its fc reads {shape[-1]} numbers, and "
            f"{num_taps} layers of this target's width {width} give {num_taps * width}"
        )


def _check_made_for(head: HeadCheckpoint, target: ModelConfig) -> None:
    """Raise :class:`ConfigError` where a head says of its target what this one is not.

    Rotary embeddings are compared for MTP layers, which continue the target's own; those of other
    heads are trained with any base.
    """
    theta = head.decoder.config.positions.rope.theta
    pairs = [
        ("layers", head.target_layers, target.num_layers),
        ("numbers per hidden state", head.target_width, target.hidden_size),
        ("as rope_theta", theta if head.kind == MTP else None, target.positions.rope.theta),
    ]
    for what, said, has in pairs:
        if said is not None and said != has:
            raise ConfigError(
                f"{head.name} was made for another target: one with {said:g} {what}, and the "
                f"target here has {has:g}"
            )


def _mask_input(head: HeadCheckpoint, fuse: Fuse, ops: Ops, num_taps: int, width: int) -> Floats:
    """What a P-EAGLE head reads with a mask, ``[1, hidden_size]``: made as of the target's states.

    It is stored with one or two dimensions of size 1 before its numbers.
    """
    assert head.further is not None
    ones = [1] * (len(head.further.shape_of(MASK_HIDDEN)) - 1)
    reader = TensorReader(head.further, head.decoder.config, ops)
    stored = reader.floats(MASK_HIDDEN, *ones, num_taps * width)
    return fuse(floats(stored).reshape(1, num_taps, width))


def _fusion(head: HeadCheckpoint, ops: Ops, num_taps: int, width: int) -> Fuse:
    if head.fusion is None:
        return first_tap
    shape, inputs = head.decoder.config, num_taps * width
    reader = TensorReader(head.fusion, shape, ops)
    bias = "fc.bias" in head.fusion
    fc: Any = reader.linear(["fc"], "fc", [shape.hidden_size], inputs, bias)
    norm, groups = None, 1
    if head.norm_before_fc:
        norm = reader.host_norm("input_norm.weight", inputs)
    elif head.fc_norm:
        names = [f"fc_norm.{tap}.weight" for tap in range(num_taps)]
        norm, groups = np.concatenate([reader.host_norm(name, width) for name in names]), num_taps
    last = reader.host_norm("hidden_norm.weight", shape.hidden_size) if head.block else None
    reader.check_all_used()
    return Fusion(ops, fc, norm, groups, shape.norms.eps, last)
