"""Recurrent layers, row by row in torch. Imports torch.

A row's bits must not depend on what shares its forward, nor on how its text was cut into spans. So
prompts too go through the recurrence one row after another, and sums over keys are by halves, whose
additions are rounded the same however many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    out = _Layer(layer, weights, shape, batch, ops).run(*parts)
    found = ops.row_linear(F.pad(out, (0, 0, 0, len(read) - len(out))), weights.last)
    return found if shape.out_scale == 1.0 else found * shape.out_scale


@dataclass(frozen=True, slots=True)
class _Layer:
    """A recurrent layer between its two linears."""

    layer: int
    weights: RecurrentWeights
    shape: Recurrent
    batch: RecurrentBatch
    ops: RowOps

    def run(self, *parts: Tensor) -> Tensor:
        """What comes out of the parts of the first linear, ``[rows, inner]``."""
        if self.shape.kind == DELTA:
            return self._delta(*parts)
        if self.shape.kind == MAMBA2:
            return self._mamba2(*parts)
        before, after, x = parts
        return after * self._convolved(before * x)

    def _convolved(self, x: Tensor) -> Tensor:
        """The convolution of rows ``[rows, channels]`` with those before them on their paths."""
        layer, batch, weights = self.layer, self.batch, self.weights
        memory = batch.memory
        slots = [span.write for span in batch.spans]
        held = memory.conv[layer, slots].transpose(1, 2).flatten(0, 1)
        columns = torch.cat((held, x))
        y = columns[batch.windows[:, 0]] * weights.conv[0]
        for tap in range(1, len(weights.conv)):
            y = y + columns[batch.windows[:, tap]] * weights.conv[tap]
        memory.conv[layer, batch.last_slots] = columns[batch.last_windows].transpose(1, 2)
        memory.log_conv[layer, batch.lanes, batch.nodes] = x[batch.logged]
        out: Tensor = y if weights.conv_bias is None else y + weights.conv_bias
        return out

    def _delta(self, mixed: Tensor, gate: Tensor, rate: Tensor, decay: Tensor) -> Tensor:
        shape, ops, weights = self.shape, self.ops, self.weights
        mixed = ops.elementwise(F.silu, self._convolved(mixed))
        q, k, v = mixed.split((shape.keys, shape.keys, shape.inner), dim=1)
        q, k = (_unit(x.unflatten(1, (shape.groups, shape.key_dim))) for x in (q, k))
        q, head_keys = self._by_head(q * shape.key_dim**-0.5), self._by_head(k)
        v = v.unflatten(1, (shape.heads, shape.value_dim))
        rate = (ops.sigmoid(rate) * shape.beta_scale)[..., None]
        softened = ops.elementwise(F.softplus, decay + weights.step_bias)
        decay = ops.elementwise(torch.exp, softened * weights.decay)

        def corrected(rows: Tensor, state: Tensor) -> Tensor:
            kept = state * decay[rows][..., None, None]
            seen = sum_halves(kept * head_keys[rows][..., None], 2)
            change: Tensor = (v[rows] - seen) * rate[rows]
            return change

        def result(rows: Tensor, state: Tensor) -> Tensor:
            return sum_halves(state * q[rows][..., None], 2)

        out = self._walked(k, decay, corrected, result)
        return self._gated(out, gate.unflatten(1, (shape.heads, shape.value_dim)))

    def _mamba2(self, gate: Tensor, mixed: Tensor, step: Tensor) -> Tensor:
        shape, ops, weights = self.shape, self.ops, self.weights
        mixed = ops.elementwise(F.silu, self._convolved(mixed))
        x, k, q = mixed.split((shape.inner, shape.keys, shape.keys), dim=1)
        k, q = (keys.unflatten(1, (shape.groups, shape.key_dim)) for keys in (k, q))
        q = self._by_head(q)
        x = x.unflatten(1, (shape.heads, shape.value_dim))
        step = ops.elementwise(F.softplus, step + weights.step_bias).clamp(min=shape.least_step)
        decay = ops.elementwise(torch.exp, step * weights.decay)
        values = x * step[..., None]

        def result(rows: Tensor, state: Tensor) -> Tensor:
            return sum_halves(state * q[rows][..., None, :], 3)

        walked = self._walked(k, decay, lambda rows, state: values[rows], result)
        return self._gated((walked + x * weights.skip[:, None]).flatten(1), gate)

    def _walked(
        self,
        key: Tensor,
        decay: Tensor,
        value: Callable[[Tensor, Tensor], Tensor],
        result: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Carry states through the trees; writes states and log.

        Args:
            key: ``[rows, groups, key_dim]``.
            decay: ``[rows, heads]``.
            value: from indices of rows, and the states before them, to what their keys are
                multiplied with, ``[n, heads, value_dim]``.
            result: from indices of rows, and the states after them, to what comes out.

        Returns:
            ``[rows, heads, value_dim]``.
        """
        layer, batch, memory, shape = self.layer, self.batch, self.batch.memory, self.shape
        state = memory.state[layer, [span.write for span in batch.spans]]
        out = key.new_empty(len(key), shape.heads, shape.value_dim)
        values = torch.empty_like(out)
        for level in batch.levels:
            rows, state = level.rows, state[level.before]
            values[rows] = value(rows, state)
            state = after_row(shape, state, key[rows], values[rows], decay[rows])
            out[rows] = result(rows, state)
            memory.state[layer, level.slots] = state[level.kept]
        for log, rows in zip(memory.logs[1:], (key, values, decay), strict=True):
            log[layer, batch.lanes, batch.nodes] = rows[batch.logged]
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """The key of each head, from that of each group."""
        return x.repeat_interleave(self.shape.heads // self.shape.groups, dim=1)

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """What comes out of a recurrence, normed and weighed by its gate, ``[rows, inner]``."""
        shape, groups = self.shape, self.shape.norm_groups
        gate = self.ops.elementwise(F.silu, gate)
        if shape.norm == "none":
            return (x * gate).flatten(1)
        if shape.norm == "after_gate":
            x = x * gate
        norm = self.weights.norm.view(groups, -1)
        x = self.ops.rms_norm(x.unflatten(-1, (groups, -1)), norm, shape.norm_eps).flatten(-2)
        return (x if shape.norm == "after_gate" else x * gate).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(sum_halves(x * x, x.ndim - 1)[..., None] + KEY_EPS)


def sum_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, whose halves are added until one entry is left."""
    while (count := x.shape[dim]) > 1:
        half = count // 2
        both = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = both if count % 2 == 0 else torch.cat((both, x.narrow(dim, count - 1, 1)), dim=dim)
    return x.squeeze(dim)
