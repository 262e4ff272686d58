"""Mixtures of experts, row by row in torch. Imports torch.

A row's bits must not depend on what shares its forward. So a row's choice is a function of its own
router logits: the largest first, equal ones by the lowest id, a NaN before all others. The experts'
results are added in the order of that choice, each times its weight, the shared expert's last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from paceline.models.config import Experts
from paceline.models.mixture import FeedForward, Mixture
from paceline.models.ops.row_ops import RowOps, Tensor


class Routing(NamedTuple):
    """The experts of each row ``[rows, per_token]``, and the logits that they were chosen by."""

    ids: Tensor
    logits: Tensor


def choose(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, ``[rows, per_token]``, from logits ``[rows, number]``.

    The softmax of the chosen logits is that of all, renormalised.
    """
    ordered, ids = torch.sort(logits, dim=1, descending=True, stable=True)
    if experts.renormalise:
        weights = torch.softmax(ordered[:, : experts.per_token], dim=1)
    else:
        weights = torch.softmax(ordered, dim=1)[:, : experts.per_token]
    if experts.scale != 1.0:
        weights = weights * experts.scale
    return ids[:, : experts.per_token], weights


def mixed(
    mixture: Mixture, x: Tensor, experts: Experts, activation: str, ops: RowOps
) -> tuple[Tensor, Routing]:
    """The mixture of rows ``[rows, hidden]`` behind the layer's norm, and its routing."""
    logits = ops.row_linear(x, mixture.router)
    ids, weights = choose(logits[:, : experts.number], experts)
    found = x.new_zeros(len(x), experts.per_token, x.shape[1])
    for expert in ids.unique().tolist():
        rows, ranks = (ids == expert).nonzero(as_tuple=True)
        result = _fed_forward(mixture.experts[expert], x[rows], activation, ops)
        found[rows, ranks] = result.to(found.dtype)
    y = weights[:, :1] * found[:, 0]
    for rank in range(1, experts.per_token):
        y = y + weights[:, rank : rank + 1] * found[:, rank]
    if mixture.shared is None:
        return y, Routing(ids, logits[:, : experts.number])
    shared = _fed_forward(mixture.shared, x, activation, ops)
    if experts.shared_gate:
        shared = ops.sigmoid(logits[:, experts.number :]) * shared
    return y + shared, Routing(ids, logits[:, : experts.number])


def _fed_forward(layer: FeedForward, x: Tensor, activation: str, ops: RowOps) -> Tensor:
    rows = len(x)
    x = F.pad(x, (0, 0, 0, -rows % ops.row_multiple))
    inner = ops.gated_activation(ops.row_linear(x, layer.gate_up), activation)
    return ops.row_linear(inner, layer.down)[:rows]
