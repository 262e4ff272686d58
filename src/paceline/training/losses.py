"""Losses on dense windows, in slices that bound memory. Knows no optimiser and no files."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from paceline.backends.rows.rows import Rows
from paceline.training.ops import dense_hidden

Tensor = torch.Tensor
SLICE_ELEMENTS = 1 << 26  # logits that exist at once before rows are processed in slices


def cross_entropy(decoder: Rows, windows: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats of ``windows[:, 1:]`` given what precedes it."""
    hidden = dense_hidden(decoder, windows[:, :-1])
    targets = windows[:, 1:].reshape(-1)

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(decoder.logits(rows).float(), wanted, reduction="sum")

    return in_slices(part, decoder.config.vocab_size, hidden, targets) / targets.numel()


def in_slices(function: Callable[..., Tensor], vocab: int, *rows: Tensor) -> Tensor:
    """Sum of ``function`` over slices of rows; logits are recomputed when there are several."""
    count = rows[0].shape[0]
    step = max(16, SLICE_ELEMENTS // vocab)
    if count <= step:
        return function(*rows)
    slices = zip(*(r.split(step) for r in rows), strict=True)
    parts = [checkpoint(function, *part, use_reentrant=False) for part in slices]
    return torch.stack(parts).sum()


def distillation_loss(target: Rows) -> Callable[[Rows, Tensor], Tensor]:
    """KL(target || draft) of a draft on windows, a mean over positions, in nats.

    A draft with a pruned head is held against the target's distribution over the tokens of the
    head, so that it spends nothing on tokens that it cannot draft.

    Args:
        target: is run on the same windows, without gradients.
    """

    def loss(draft: Rows, windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        with torch.no_grad():
            taught = dense_hidden(target, inputs)
        hidden = dense_hidden(draft, inputs)

        def part(rows: Tensor, teacher: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = target.logits(teacher).float()
            if draft.head_tokens is not None:
                wanted = wanted[:, draft.head_tokens]
            return divergence(draft.logits(rows).float(), wanted)

        return in_slices(part, draft.config.vocab_size, hidden, taught) / inputs.numel()

    return loss


def divergence(draft: Tensor, target: Tensor) -> Tensor:
    """KL(target || draft) of two sets of logits, summed over their rows."""
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def imbalance(decoder: Rows) -> Tensor:
    """How unevenly the rows of the latest forward used the experts: 1 where all were used alike.

    The load-balancing loss of Switch Transformers (Fedus et al., 2021), a mean over the layers: the
    number of experts times the sum over experts of their share of the choices and their mean
    probability.
    """
    parts = []
    for ids, logits in decoder.routed:
        number = logits.shape[1]
        share = torch.bincount(ids.flatten(), minlength=number) / ids.numel()
        parts.append(number * (share * logits.float().softmax(1).mean(0)).sum())
    return torch.stack(parts).mean()
