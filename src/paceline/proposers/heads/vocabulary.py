"""Whether a head's vocabulary is its target's, as it is or padded to another size.

A model's embedding often has more rows than its tokenizer has tokens, and two forms of one model,
such as its folder and a GGUF file, may have different numbers of them.
"""

from __future__ import annotations

from paceline.core.errors import ConfigError
from paceline.models.weights import EMBEDDING, HEAD, WeightReader
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads.checkpoint import HeadCheckpoint

MOST_PADDING = 1024
"""Rows by which forms of one model differ; more than that is another vocabulary."""


def check_vocabulary(head: HeadCheckpoint, target: TargetInfo) -> None:
    """Raise :class:`ConfigError` where the vocabularies differ in more than padding at the end."""
    size = head.decoder.config.vocab_size
    reason = "" if size == target.vocab_size else _difference(head, target)
    if reason:
        raise ConfigError(
            f"{head.name} was made for another target: it reads {size} tokens, and the target has "
            f"{target.vocab_size}. They may differ in padding at the end alone, but {reason}"
        )


def _difference(head: HeadCheckpoint, target: TargetInfo) -> str:
    """Why a vocabulary of another size is not the target's; empty where padding is all."""
    tensors, shape = head.decoder.tensors, head.decoder.config
    if abs(shape.vocab_size - target.vocab_size) > MOST_PADDING:
        return f"that is at most {MOST_PADDING} rows"
    used = target.vocab_size if target.tokenizer is None else target.tokenizer.vocab_size
    if shape.vocab_size < used:
        return f"{used} tokens of the target are in use"
    assert target.runner is not None
    pruned = WeightReader(tensors, shape, target.runner.decoder.ops).pruned_head()
    for name in (EMBEDDING, HEAD) if pruned is None else (EMBEDDING,):
        if f"{name}.weight" in tensors:
            return f"the head has {name} of its own"
    last = -1 if pruned is None else int(pruned.token_ids[-1])
    if last >= target.vocab_size:
        return f"the head drafts token {last}"
    if head.block is not None and head.block.mask_token >= target.vocab_size:
        return f"the head reads token {head.block.mask_token} for what it drafts"
    return ""
