"""Recurrent layers, row by row in torch. Imports torch.

A row's bits must not depend on what shares its forward, nor on how its text was cut into spans. So
prompts too go through the recurrence one row after another, and sums over keys are by halves, whose
additions are rounded the same however many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from paceline.backends.rows.row_ops import RowOps, Tensor
from paceline.backends.rows.tensor_memory import RecurrentBatch, after_row
from paceline.models.layer_sizes import DELTA, MAMBA2, Recurrent
from paceline.models.weights import RecurrentWeights

KEY_EPS = 1e-6  # of the delta rule's unit vectors, in every model


def recurrent(
    layer: int,
    weights: RecurrentWeights,
    read: Tensor,
    shape: Recurrent,
    batch: RecurrentBatch,
    ops: RowOps,
) -> Tensor:
    """A recurrent layer of rows ``[rows, hidden]`` behind their norm.

    Folds what is due, and writes states and log. ``layer`` counts recurrent layers.
    """
    first = ops.row_linear(read, weights.first)[: batch.num_rows]
    if weights.in_scale is not None:
        first = first * weights.in_scale
    parts = first.split(shape.in_widths, dim=1)
    for span in batch.spans:
        if span.write != span.read:
            batch.memory.conv[layer, span.write] = batch.memory.conv[layer, span.read]
            batch.memory.state[layer, span.write] = batch.memory.state[layer, span.read]
        batch.memory.fold_layer(layer, span.write, span.lane, span.path)
    if shape.kind == DELTA:
        out = _delta(layer, weights, parts, shape, batch, ops)
    elif shape.kind == MAMBA2:
        out = _mamba2(layer, weights, parts, shape, batch, ops)
    else:
        before, after, x = parts
        out = after * _convolved(layer, weights, before * x, batch)
    found = ops.row_linear(F.pad(out, (0, 0, 0, len(read) - len(out))), weights.last)
    return found if shape.out_scale == 1.0 else found * shape.out_scale


def _convolved(layer: int, weights: RecurrentWeights, x: Tensor, batch: RecurrentBatch) -> Tensor:
    """The convolution of rows ``[rows, channels]`` with those before them on their paths."""
    memory = batch.memory
    slots = [span.write for span in batch.spans]
    held = memory.conv[layer, slots].transpose(1, 2).flatten(0, 1)  # [spans * (kernel - 1), ...]
    columns = torch.cat((held, x))
    y = columns[batch.windows[:, 0]] * weights.conv[0]
    for tap in range(1, len(weights.conv)):
        y = y + columns[batch.windows[:, tap]] * weights.conv[tap]
    memory.conv[layer, batch.last_slots] = columns[batch.last_windows].transpose(1, 2)
    memory.log_conv[layer, batch.lanes, batch.nodes] = x[batch.logged]
    out: Tensor = y if weights.conv_bias is None else y + weights.conv_bias
    return out


def _delta(
    layer: int,
    weights: RecurrentWeights,
    parts: tuple[Tensor, ...],
    shape: Recurrent,
    batch: RecurrentBatch,
    ops: RowOps,
) -> Tensor:
    mixed, gate, rate, decay = parts
    mixed = ops.elementwise(F.silu, _convolved(layer, weights, mixed, batch))
    q, k, v = mixed.split((shape.keys, shape.keys, shape.inner), dim=1)
    q, k = (_unit(x.unflatten(1, (shape.groups, shape.key_dim))) for x in (q, k))
    q, each = _by_head(q * shape.key_dim**-0.5, shape), _by_head(k, shape)
    v = v.unflatten(1, (shape.heads, shape.value_dim))
    rate = (ops.sigmoid(rate) * shape.beta_scale)[..., None]
    softened = ops.elementwise(F.softplus, decay + weights.step_bias)
    decay = ops.elementwise(torch.exp, softened * weights.decay)

    def corrected(rows: Tensor, state: Tensor) -> Tensor:
        kept = state * decay[rows][..., None, None]
        found: Tensor = (v[rows] - sum_halves(kept * each[rows][..., None], 2)) * rate[rows]
        return found

    def result(rows: Tensor, state: Tensor) -> Tensor:
        return sum_halves(state * q[rows][..., None], 2)

    out = _walked(layer, batch, k, decay, corrected, result)
    gate = gate.unflatten(1, (shape.heads, shape.value_dim))
    return _gated(out, gate, weights, shape, ops)


def _mamba2(
    layer: int,
    weights: RecurrentWeights,
    parts: tuple[Tensor, ...],
    shape: Recurrent,
    batch: RecurrentBatch,
    ops: RowOps,
) -> Tensor:
    gate, mixed, step = parts
    mixed = ops.elementwise(F.silu, _convolved(layer, weights, mixed, batch))
    x, k, q = mixed.split((shape.inner, shape.keys, shape.keys), dim=1)
    k, q = (each.unflatten(1, (shape.groups, shape.key_dim)) for each in (k, q))
    q = _by_head(q, shape)
    x = x.unflatten(1, (shape.heads, shape.value_dim))
    step = ops.elementwise(F.softplus, step + weights.step_bias).clamp(min=shape.least_step)
    decay = ops.elementwise(torch.exp, step * weights.decay)
    values = x * step[..., None]

    def value(rows: Tensor, state: Tensor) -> Tensor:
        found: Tensor = values[rows]
        return found

    def result(rows: Tensor, state: Tensor) -> Tensor:
        return sum_halves(state * q[rows][..., None, :], 3)

    out: Tensor = _walked(layer, batch, k, decay, value, result) + x * weights.skip[:, None]
    return _gated(out.flatten(1), gate, weights, shape, ops)


def _walked(
    layer: int,
    batch: RecurrentBatch,
    key: Tensor,
    decay: Tensor,
    value: Callable[[Tensor, Tensor], Tensor],
    result: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Carry states through the trees; writes states and log.

    Args:
        key: ``[rows, groups, key_dim]``.
        decay: ``[rows, heads]``.
        value: from indices of rows, and the states before them, to what their keys are multiplied
            with, ``[n, heads, value_dim]``.
        result: from indices of rows, and the states after them, to what comes out.

    Returns:
        ``[rows, heads, value_dim]``.
    """
    memory, shape = batch.memory, batch.memory.shape
    state = memory.state[layer, [span.write for span in batch.spans]]
    out = key.new_empty(len(key), shape.heads, shape.value_dim)
    values = torch.empty_like(out)
    for level in batch.levels:
        rows, state = level.rows, state[level.before]
        values[rows] = value(rows, state)
        state = after_row(shape, state, key[rows], values[rows], decay[rows])
        out[rows] = result(rows, state)
        memory.state[layer, level.slots] = state[level.kept]
    for log, each in (
        (memory.log_key, key),
        (memory.log_value, values),
        (memory.log_decay, decay),
    ):
        log[layer, batch.lanes, batch.nodes] = each[batch.logged]
    return out


def _by_head(x: Tensor, shape: Recurrent) -> Tensor:
    """The key of each head, from that of each group."""
    return x.repeat_interleave(shape.heads // shape.groups, dim=1)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(sum_halves(x * x, x.ndim - 1)[..., None] + KEY_EPS)


def sum_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, whose halves are added until one entry is left."""
    while (count := x.shape[dim]) > 1:
        half = count // 2
        both = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = both if count % 2 == 0 else torch.cat((both, x.narrow(dim, count - 1, 1)), dim=dim)
    return x.squeeze(dim)


def _gated(
    x: Tensor, gate: Tensor, weights: RecurrentWeights, shape: Recurrent, ops: RowOps
) -> Tensor:
    """What comes out of a recurrence, normed and weighed by its gate, ``[rows, inner]``."""
    gate = ops.elementwise(F.silu, gate)
    if shape.norm == "none":
        return (x * gate).flatten(1)
    if shape.norm == "after_gate":
        x = x * gate
    x = x.unflatten(-1, (shape.norm_groups, -1))
    x = ops.rms_norm(x, weights.norm.view(shape.norm_groups, -1), shape.norm_eps).flatten(-2)
    return (x if shape.norm == "after_gate" else x * gate).flatten(1)
