"""What an arithmetic costs in accuracy: perplexity, and divergence from the float32 logits.

Two sources of logits are compared token by token over one text. The reference's logits are kept in
a file, so only one model is in memory at a time. Perplexity and KL divergence in nats, by their
definitions, in float64. Knows no tokenizer and no files of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.engine.engine import Engine
from paceline.workbench.teacher_forcing import forced_logits

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of text that is read on its own; tokens from ``first`` (at least 1) on are scored."""

    token_ids: Sequence[int]
    first: int

    @property
    def targets(self) -> Sequence[int]:
        return self.token_ids[self.first :]


def windows(token_ids: Sequence[int], length: int, stride: int) -> list[Window]:
    """Overlapping windows in which every token but the text's first is scored exactly once.

    Args:
        length: most tokens of a window, at least 2.
        stride: tokens that each window after the first scores, below ``length``; the others are
            their context.
    """
    assert length >= 2
    assert 1 <= stride < length
    found = [Window(token_ids[:length], 1)] if len(token_ids) > 1 else []
    for done in range(length, len(token_ids), stride):
        end = min(done + stride, len(token_ids))
        begin = end - length
        found.append(Window(token_ids[begin:end], done - begin))
    return found


def engine_logits(engine: Engine, pieces: Iterable[Window]) -> Iterator[Logits]:
    """Logits of all scored tokens in order, as the engine serves them; blocks ``[n, vocab]``.

    Use it up where the engine is stepped, between two steps.
    """
    for piece in pieces:
        for _, logits in forced_logits(engine, piece.token_ids, piece.first):
            yield logits.float().numpy(force=True)


def record(blocks: Iterable[Logits], num_tokens: int, vocab_size: int, path: Path) -> Logits:
    """Write logits to a file and return them, mapped into memory: ``[num_tokens, vocab]``."""
    stored = np.memmap(path, np.float32, "w+", shape=(num_tokens, vocab_size))
    done = 0
    for block in blocks:
        stored[done : done + len(block)] = block
        done += len(block)
    assert done == num_tokens
    return stored


@dataclass(slots=True)
class Quality:
    """Sums over the scored tokens of one arithmetic, next to the reference's."""

    num_tokens: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    kl: float = 0.0
    max_kl: float = 0.0
    num_agreed: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    @property
    def ratio(self) -> float:
        """Perplexity over the reference's."""
        return math.exp((self.nll - self.reference_nll) / self.num_tokens)

    @property
    def mean_kl(self) -> float:
        return self.kl / self.num_tokens

    @property
    def top1_agreement(self) -> float:
        """Share of the tokens at which both have the same likeliest token."""
        return self.num_agreed / self.num_tokens

    def add(self, targets: Sequence[int], logits: Logits, reference: Logits) -> None:
        """Count tokens; ``logits`` and ``reference`` are ``[n, vocab]``."""
        own, theirs = _log_softmax(logits), _log_softmax(reference)
        at = np.arange(len(targets)), np.asarray(targets)
        kl = (np.exp(theirs) * (theirs - own)).sum(axis=1)
        self.num_tokens += len(targets)
        self.nll -= float(own[at].sum())
        self.reference_nll -= float(theirs[at].sum())
        self.kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))
        self.num_agreed += int((own.argmax(axis=1) == theirs.argmax(axis=1)).sum())


def _log_softmax(logits: Logits) -> Floats:
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    found: Floats = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return found


def measure(targets: Sequence[int], blocks: Iterable[Logits], reference: Logits) -> Quality:
    """Compare logits, in blocks, with the reference's.

    Args:
        targets: the scored tokens.
        blocks: rows in the order of the targets.
        reference: ``[len(targets), vocab]``.
    """
    quality, done = Quality(), 0
    for block in blocks:
        end = done + len(block)
        quality.add(targets[done:end], block, reference[done:end])
        done = end
    assert done == len(targets)
    return quality
