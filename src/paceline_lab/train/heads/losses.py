"""What a head's predictions cost, and how often they would be accepted. Knows no files.

The target's distribution is that of its likeliest tokens at each position. What lies
beyond them, or has no row in the head, is left out, and the rest is not scaled up: positions where
the head can say little count little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline_lab.train.acceptance import DepthAcceptance
from paceline_lab.train.heads.features import HeadBatch

Tensor = torch.Tensor
SLICE = 1 << 20  # logits that exist at once: they should stay in a core's cache
SLICE_ON_GPU = 1 << 28  # there they should occupy all cores


class TrainableHead(Protocol):
    """A head of any kind, for one forward and backward."""

    def steps(
        self, batch: HeadBatch, num_steps: int, chosen: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What the head drafts after wanted rows of a batch, depth by depth.

        A draft that begins at wanted row ``i`` knows the features up to that row and the token that
        it reads. Its depth ``k``, from 0, predicts what wanted row ``i + k`` has as its target.
        Drafts end with their text; what they would say beyond is not there.

        Args:
            num_steps: most depths.
            chosen: int64, ascending: the wanted rows after which the head drafts to the end. It may
                also draft the first depth after others.

        Yields:
            Of each depth, whose target each row predicts, int64 ``[rows]``, and what the output
            matrix reads, ``[rows, hidden_size]``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What rows of a head should say.

    Attributes:
        columns: int64 ``[rows, k]``, of the head's matrix.
        probs: ``[rows, k]``; 0 where a token has no column.
        emitted: int64 ``[rows]``, the column of the token that came, -1 for none.
    """

    columns: Tensor
    probs: Tensor
    emitted: Tensor

    @staticmethod
    def of(batch: HeadBatch, column_of: Tensor) -> Wanted:
        """``column_of`` ``[vocab_size]``: each token's column, -1 for none."""
        columns = column_of[batch.top_ids]
        probs = batch.top_probs * (columns >= 0)
        return Wanted(columns.clamp_min(0), probs, column_of[batch.emitted])

    def rows(self, chosen: Tensor) -> Wanted:
        return Wanted(self.columns[chosen], self.probs[chosen], self.emitted[chosen])

    def scaled(self, factors: Tensor) -> Wanted:
        """With each row's probabilities times a factor, as its part in a loss."""
        return Wanted(self.columns, self.probs * factors[:, None], self.emitted)


class _CrossEntropy(torch.autograd.Function):
    """Sum over rows of -sum(p log q), in slices of rows, with the gradients made on the way.

    The logits of a slice are used for both, so that they are computed once and never written out.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, columns: Tensor, probs: Tensor, size: int
    ) -> Tensor:
        into_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        into_head = torch.zeros_like(head) if head.requires_grad else None
        total = hidden.new_zeros(())
        step = max(16, size // len(head))
        for at in range(0, len(hidden), step):
            part = slice(at, at + step)
            logits = hidden[part] @ head.T
            top = logits.amax(-1, keepdim=True)
            picked = logits.gather(1, columns[part])
            scores = logits.sub_(top).exp_()
            norm = scores.sum(-1, keepdim=True)
            mass = probs[part].sum(-1, keepdim=True)
            total += (mass * (norm.log() + top)).sum() - (probs[part] * picked).sum()
            scores *= mass / norm
            scores.scatter_add_(1, columns[part], -probs[part])
            if into_hidden is not None:
                torch.mm(scores, head, out=into_hidden[part])
            if into_head is not None:
                into_head.addmm_(scores.T, hidden[part])
        ctx.save_for_backward(*(g for g in (into_hidden, into_head) if g is not None))
        ctx.needed = (into_hidden is not None, into_head is not None)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        gradients = [next(saved).mul_(grads[0]) if needed else None for needed in ctx.needed]
        return (*gradients, None, None, None)


def cross_entropy(hidden: Tensor, head: Tensor, wanted: Wanted, size: int = SLICE) -> Tensor:
    """Sum over rows of the cross-entropy in nats.

    Args:
        hidden: ``[rows, hidden_size]``, normed.
        head: ``[columns, hidden_size]``.
        size: logits that exist at once.
    """
    total: Tensor = _CrossEntropy.apply(hidden, head, wanted.columns, wanted.probs, size)  # type: ignore[no-untyped-call]
    return total


def head_loss(
    head: TrainableHead,
    matrix: Tensor,
    batch: HeadBatch,
    column_of: Tensor,
    num_steps: int,
    decay: float,
    chosen: Tensor,
    size: int = SLICE,
) -> Tensor:
    """Mean cross-entropy of each depth, each depth weighted ``decay`` times the one before it.

    Args:
        matrix: the head's output, ``[columns, hidden_size]``.
        column_of: each token's column, ``[vocab_size]``.
        num_steps, chosen: as :meth:`TrainableHead.steps` takes them.
        size: logits that exist at once.
    """
    wanted = Wanted.of(batch, column_of)
    steps = [(rows, x) for rows, x in head.steps(batch, num_steps, chosen) if len(rows)]
    total = sum(decay**step for step in range(len(steps)))
    shares = [
        torch.full((len(rows),), decay**step / total / len(rows))
        for step, (rows, _) in enumerate(steps)
    ]
    # One product with the head's large matrix, and one gradient of it, for all depths.
    said = wanted.rows(torch.cat([rows for rows, _ in steps])).scaled(torch.cat(shares))
    return cross_entropy(torch.cat([x for _, x in steps]), matrix, said, size)


class AcceptanceCount:
    """Adds up :class:`DepthAcceptance` and the mean loss over batches, without gradients."""

    def __init__(self, num_steps: int) -> None:
        self._alive, self._right, self._rows = ([0] * num_steps for _ in range(3))
        self._overlap, self._loss = ([0.0] * num_steps for _ in range(2))

    @torch.no_grad()
    def add(self, head: TrainableHead, matrix: Tensor, batch: HeadBatch, column_of: Tensor) -> None:
        wanted = Wanted.of(batch, column_of)
        every = torch.arange(len(batch.wanted))
        alive = torch.ones(len(every), dtype=torch.bool)  # by the row where the chain begins
        for step, (rows, x) in enumerate(head.steps(batch, len(self._rows), every)):
            here = wanted.rows(rows)
            logits = x @ matrix.T
            best, log_norm = logits.argmax(-1), logits.logsumexp(-1, keepdim=True)
            logs = logits.gather(1, here.columns) - log_norm
            self._rows[step] += len(rows)
            self._overlap[step] += torch.minimum(here.probs, logs.exp()).sum().item()
            self._loss[step] -= (here.probs * logs).sum().item()
            begins = rows - step
            living = alive[begins]
            first = torch.where(here.probs[:, 0] > 0, here.columns[:, 0], -1)
            self._alive[step] += int(living.sum())
            self._right[step] += int((living & (best == first)).sum())
            alive[begins] = living & (best == here.emitted)

    def loss(self, decay: float) -> float:
        weights = [decay**step for step in range(len(self._rows))]
        means = [x / max(1, n) for x, n in zip(self._loss, self._rows, strict=True)]
        return sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)

    @property
    def shares(self) -> DepthAcceptance:
        greedy = [r / max(1, n) for r, n in zip(self._right, self._alive, strict=True)]
        overlap = [o / max(1, n) for o, n in zip(self._overlap, self._rows, strict=True)]
        return DepthAcceptance(self._rows[0], tuple(greedy), tuple(overlap))
