"""What an arithmetic costs in accuracy: perplexity, and divergence from the float32 logits.

Several sources of logits read the same windows of a text, one window after another, so that no more
than two windows' logits are in memory. Perplexity and KL divergence in nats, by their definitions,
in float64. Knows no tokenizer, no files of text, and not where logits come from.

Whether one arithmetic diverges more than another is said with a confidence bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.engine.engine import Engine
from paceline_lab.teacher_forcing import forced_logits

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
REFERENCE = "float32"
_BLOCK_NUMBERS = 1 << 19
"""Logits that are turned into probabilities at once: temporaries that stay in the caches."""
DRAWS = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of text that is read on its own; tokens from ``first`` (at least 1) on are scored."""

    token_ids: Sequence[int]
    first: int

    @property
    def targets(self) -> Sequence[int]:
        return self.token_ids[self.first :]


Arm = Callable[[Window, Logits], None]
"""Writes the logits that predict a window's targets into an array ``[len(targets), vocab]``."""


def windows(
    token_ids: Sequence[int], length: int, stride: int, bos_token_id: int | None = None
) -> list[Window]:
    """Windows in which every token of a text is scored exactly once.

    Args:
        token_ids: the text, without a BOS token.
        length: most tokens of a window, its BOS token included; at least 2.
        stride: tokens that each window after the first scores, below ``length``; the others are
            their context.
        bos_token_id: what every window begins with, for models that were trained so. It predicts
            the text's first token, which nothing predicts where it is None.
    """
    assert length >= 2
    assert 1 <= stride < length
    begun = [] if bos_token_id is None else [bos_token_id]
    room = length - len(begun)
    pieces = []
    if len(begun) + len(token_ids[:room]) > 1:
        pieces.append(Window([*begun, *token_ids[:room]], 1))
    for done in range(room, len(token_ids), stride):
        end = min(done + stride, len(token_ids))
        begin = end - room
        pieces.append(Window([*begun, *token_ids[begin:end]], len(begun) + done - begin))
    return pieces


def engine_arm(engine: Engine, piece: Window, out: Logits) -> None:
    """Logits of a window as the engine serves them; call it between two steps of the engine."""
    for begin, logits in forced_logits(engine, piece.token_ids, piece.first):
        at = begin - piece.first
        out[at : at + len(logits)] = logits


@dataclass(frozen=True, slots=True)
class WindowScore:
    """One arithmetic on one window: sums over its tokens, and each token's KL divergence."""

    nll: float
    reference_nll: float
    num_agreed: int
    kl: Floats

    def to_json(self) -> dict[str, float]:
        return {
            "num_tokens": len(self.kl),
            "nll": self.nll,
            "reference_nll": self.reference_nll,
            "kl": float(self.kl.sum()),
            "num_agreed": self.num_agreed,
        }


def log_softmax(logits: Logits, temperature: float = 1.0) -> Floats:
    """Log-probabilities at a temperature above 0, ``[rows, vocab]`` in float64."""
    shifted = logits.astype(np.float64) / temperature
    shifted -= shifted.max(axis=1, keepdims=True)
    log_probs: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probs


def score(targets: Sequence[int], logits: Logits, reference: Logits) -> WindowScore:
    """Compare logits with the reference's; both are ``[len(targets), vocab]``."""
    kl, nll, reference_nll, agreed = [], 0.0, 0.0, 0
    rows = max(1, _BLOCK_NUMBERS // logits.shape[1])
    for start in range(0, len(targets), rows):
        wanted = np.array(targets[start : start + rows])[:, None]
        own, theirs = (log_softmax(each[start : start + rows]) for each in (logits, reference))
        kl.append((np.exp(theirs) * (theirs - own)).sum(1))
        nll -= float(np.take_along_axis(own, wanted, 1).sum())
        reference_nll -= float(np.take_along_axis(theirs, wanted, 1).sum())
        agreed += int((own.argmax(1) == theirs.argmax(1)).sum())
    return WindowScore(nll, reference_nll, agreed, np.concatenate(kl))


@dataclass(slots=True)
class Quality:
    """The scores of one arithmetic, window by window."""

    windows: list[WindowScore] = field(default_factory=list)

    @property
    def kl(self) -> Floats:
        """Of every scored token, in order."""
        return np.concatenate([each.kl for each in self.windows])

    @property
    def num_tokens(self) -> int:
        return sum(len(each.kl) for each in self.windows)

    @property
    def perplexity(self) -> float:
        return math.exp(sum(each.nll for each in self.windows) / self.num_tokens)

    @property
    def ratio(self) -> float:
        """Perplexity over the reference's."""
        excess = sum(each.nll - each.reference_nll for each in self.windows)
        return math.exp(excess / self.num_tokens)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def kl_99(self) -> float:
        """The KL divergence that 99 % of the tokens do not exceed."""
        return float(np.quantile(self.kl, 0.99))

    @property
    def top1_agreement(self) -> float:
        """Share of the tokens at which both have the same likeliest token."""
        return sum(each.num_agreed for each in self.windows) / self.num_tokens

    def to_json(self) -> dict[str, object]:
        return {
            "num_tokens": self.num_tokens,
            "perplexity": self.perplexity,
            "ratio": self.ratio,
            "mean_kl": self.mean_kl,
            "kl_99": self.kl_99,
            "top1_agreement": self.top1_agreement,
            "windows": [each.to_json() for each in self.windows],
        }


def measure(
    pieces: Iterable[Window], vocab_size: int, reference: Arm, arms: Mapping[str, Arm]
) -> dict[str, Quality]:
    """Let every arm read every window, and compare it with the reference there and then.

    Returns:
        The reference's own row under :data:`REFERENCE`, and one row per arm.
    """
    rows = {name: Quality() for name in (REFERENCE, *arms)}
    room: list[Logits] = []
    for piece in pieces:
        shape = len(piece.targets), vocab_size
        if not room or len(room[0]) < shape[0]:
            room = [np.empty(shape, np.float32) for _ in range(2)]
        base, own = (each[: shape[0]] for each in room)
        reference(piece, base)
        rows[REFERENCE].windows.append(score(piece.targets, base, base))
        for name, arm in arms.items():
            arm(piece, own)
            rows[name].windows.append(score(piece.targets, own, base))
    return rows


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much the mean KL divergence of one row exceeds that of another.

    Attributes:
        difference: in nats per token; negative where the first row diverges less.
        upper: what it does not exceed with 95 % confidence.
        relative, relative_upper: both over the other row's mean KL divergence; None where that
            is zero.
    """

    difference: float
    upper: float
    relative: float | None
    relative_upper: float | None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


def excess(own: Quality, other: Quality) -> Excess:
    """Compare two rows that scored the same windows.

    A token's divergence depends on the text around it, so windows and not tokens are the units that
    chance draws: a block bootstrap. Each draw takes as many windows as there are, with replacement,
    the same ones for both rows, and divides the sum of the differences by the number of tokens. The
    bound is the 95th percentile of the draws: one-sided, and the pairing takes out that some
    windows are harder for every arithmetic. With few windows it is too narrow; text of a kind that
    no window has is not covered.
    """
    assert len(own.windows) == len(other.windows)
    pairs = list(zip(own.windows, other.windows, strict=True))
    gaps = np.array([float((a.kl - b.kl).sum()) for a, b in pairs])
    tokens = np.array([len(a.kl) for a, _ in pairs])
    drawn = np.random.default_rng(0).integers(0, len(pairs), (DRAWS, len(pairs)))
    means = gaps[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)
    difference, upper = float(gaps.sum() / tokens.sum()), float(np.quantile(means, CONFIDENCE))
    base = other.mean_kl
    if base <= 0.0:
        return Excess(difference, upper, None, None)
    return Excess(difference, upper, difference / base, upper / base)
