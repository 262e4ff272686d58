"""Mixtures of experts, row by row in torch. Imports torch.

A row's bits must not depend on what shares its forward. So a row's choice is a function of its own
router logits: the largest first, equal ones by the lowest id, a NaN before all others, and of
groups of experts likewise. The experts' results are added in the order of that choice, each times
its weight, the shared expert's last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from paceline.backends.rows.row_ops import RowOps, Tensor
from paceline.models.config import ModelConfig
from paceline.models.shapes import Experts
from paceline.models.weights import FeedForward, Mixture


class Routing(NamedTuple):
    """The experts of each row ``[rows, per_token]``, and the logits that they were chosen by."""

    ids: Tensor
    logits: Tensor


def choose(
    logits: Tensor,
    experts: Experts,
    bias: Tensor | None = None,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, ``[rows, per_token]``, from logits ``[rows, number]``.

    Args:
        bias: of the scores, for the choice.
        sigmoid: the function of that name, which must not depend on how many rows there are.
    """
    if experts.by_score:
        scores = sigmoid(logits) if experts.sigmoid else torch.softmax(logits, dim=1)
        # Scores may be equal where logits are not.
        wanted = logits if bias is None and experts.groups == 1 else scores
        ids = _best(wanted if bias is None else wanted + bias, experts)
        weights = scores.gather(1, ids)
        if experts.renormalise:
            weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(experts.least_sum)
    elif experts.jitter:
        ids = _best(logits, experts)
        weights = _one_by_one(logits, ids, experts.jitter)
    else:
        ids = _best(logits, experts)
        # The softmax of the chosen logits is that of all, renormalised.
        read = logits.gather(1, ids) if experts.renormalise else logits
        weights = torch.softmax(read, dim=1)
        weights = weights if experts.renormalise else weights.gather(1, ids)
    return ids, weights if experts.scale == 1.0 else weights * experts.scale


def _one_by_one(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """The weights of each row's experts by SparseMixer, ``[rows, per_token]``."""
    left, weights = logits, []
    for chosen in ids.split(1, dim=1):
        best = logits.gather(1, chosen)
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        scores = torch.softmax(left.masked_fill(far, -torch.inf), dim=1)
        weights.append(scores.gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=1)


def _best(values: Tensor, experts: Experts) -> Tensor:
    """The ids of each row's largest values ``[rows, per_token]``, out of its best groups alone."""
    if experts.groups > 1:
        grouped = values.unflatten(1, (experts.groups, -1))
        best = torch.sort(grouped, dim=2, descending=True, stable=True)[0]
        worth = best[..., : experts.group_best].sum(dim=2)
        allowed = _ordered(worth)[:, : experts.groups_per_token]
        closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, allowed, value=False)
        values = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
        # Of values that are -inf themselves, those of closed groups come last.
        first = closed.repeat_interleave(grouped.shape[2], dim=1).sort(dim=1, stable=True)[1]
        return first.gather(1, _ordered(values.gather(1, first))[:, : experts.per_token])
    return _ordered(values)[:, : experts.per_token]


def _ordered(values: Tensor) -> Tensor:
    return torch.sort(values, dim=1, descending=True, stable=True)[1]


def mixed(
    mixture: Mixture, x: Tensor, stream: Tensor, config: ModelConfig, ops: RowOps
) -> tuple[Tensor, Routing]:
    """The mixture of rows ``[rows, hidden]`` behind the layer's norm, and its routing."""
    experts = config.mlp.experts
    assert experts is not None

    def normed(rows: Tensor, norm: str, otherwise: Tensor) -> Tensor:
        weight = getattr(mixture.norms, norm, None)
        return otherwise if weight is None else ops.rms_norm(rows, weight, config.norms.eps)

    logits = ops.row_linear(normed(stream, "router", x), mixture.router)
    ids, weights = choose(logits[:, : experts.number], experts, mixture.choice_bias, ops.sigmoid)
    if mixture.scales is not None:
        weights = weights * mixture.scales[ids]
    read = normed(stream, "experts", x)
    found = x.new_zeros(len(x), experts.per_token, x.shape[1])
    for expert in ids.unique().tolist():
        rows, ranks = (ids == expert).nonzero(as_tuple=True)
        rows_read = read[rows]
        if experts.weighs_inputs:
            rows_read = rows_read * weights[rows, ranks, None]
        result = _fed_forward(mixture.experts[expert], rows_read, config, ops)
        found[rows, ranks] = result.to(found.dtype)
    if experts.weighs_inputs:
        weights = torch.ones_like(weights)
    y = weights[:, :1] * found[:, 0]
    for rank in range(1, experts.per_token):
        y = y + weights[:, rank : rank + 1] * found[:, rank]
    y = normed(y, "routed", y)
    if mixture.shared is None:
        return y, Routing(ids, logits[:, : experts.number])
    shared = _fed_forward(mixture.shared, x, config, ops)
    shared = normed(shared, "shared", shared)
    if experts.shared_gate:
        shared = ops.sigmoid(logits[:, experts.number :]) * shared
    return y + shared, Routing(ids, logits[:, : experts.number])


def _fed_forward(layer: FeedForward, x: Tensor, config: ModelConfig, ops: RowOps) -> Tensor:
    rows = len(x)
    x = F.pad(x, (0, 0, 0, -rows % ops.row_multiple))
    inner = ops.row_linear(x, layer.gate_up)
    if config.mlp.gated:
        inner = ops.gated_activation(inner, config.mlp.activation)
    else:
        inner = ops.activation(inner, config.mlp.activation, None)
    return ops.row_linear(inner, layer.down)[:rows]
