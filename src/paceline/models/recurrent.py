"""Recurrent layers, whose memory of a text has a fixed size: shapes, and what their weights are.

A layer of any kind reads its rows through one linear, then a short causal convolution over a few
rows before each, then (but for ``short_conv``) a recurrence whose state is a matrix per head, and
writes through another linear. Knows no arithmetic and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

DELTA, MAMBA2, SHORT_CONV = "delta", "mamba2", "short_conv"
"""The gated delta rule (arXiv 2412.06464), Mamba-2 (arXiv 2405.21060), and convolutions alone."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent layers of a model, which are alike.

    Attributes:
        kind: :data:`DELTA`, :data:`MAMBA2` or :data:`SHORT_CONV`.
        layers: per layer, whether it is recurrent.
        kernel: rows that a convolution sees, the row itself among them.
        heads: of the recurrence; of a short convolution 1.
        groups: of heads that share a key (Mamba-2's B and C).
        key_dim: of a key (Mamba-2's B and C); 0: there is no state but the convolution's.
        value_dim: of a head's values; of a short convolution the width of the stream.
        beta_scale: what the delta rule's learning rates, between 0 and 1, are multiplied with.
        least_step: what Mamba-2's time steps are at least.
        conv_bias, in_bias, out_bias: whether the convolution and the linears have biases.
        norm: of what comes out of the recurrence: ``before_gate`` or ``after_gate``, or ``none``
            where the gate alone acts on it.
        norm_groups: parts of a row that are normed by themselves.
        norm_eps: of that norm.
        beside: whether these layers have attention too, which reads the same rows.
        in_scales: of Mamba-2, factors of what comes out of the first linear: gates, values, B, C
            and time steps; empty: none.
        out_scale: of what comes out of the last linear.
    """

    kind: str
    layers: tuple[bool, ...]
    kernel: int
    value_dim: int
    heads: int = 1
    groups: int = 1
    key_dim: int = 0
    beta_scale: float = 1.0
    least_step: float = 0.0
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    norm: str = "none"
    norm_groups: int = 1
    norm_eps: float = 1e-6
    beside: bool = False
    in_scales: tuple[float, ...] = ()
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Width of the values of a row, and of what the last linear reads."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Width of the keys of a row."""
        return self.groups * self.key_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.keys

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Of the parts of what comes out of the first linear.

        Delta rule: queries, keys and values; gate; learning rates; decays. Mamba-2: gate; values,
        keys (B) and queries (C); time steps. Short convolution: two gates, and what is convolved.
        """
        if self.kind == DELTA:
            return self.channels, self.inner, self.heads, self.heads
        if self.kind == MAMBA2:
            return self.inner, self.channels, self.heads
        return self.inner, self.inner, self.inner

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of a layer's state: the delta rule's ``[heads, key_dim, value_dim]``, and Mamba-2's
        ``[heads, value_dim, key_dim]``."""
        if self.kind == MAMBA2:
            return self.heads, self.value_dim, self.key_dim
        return self.heads, self.key_dim, self.value_dim

    def num_weights(self, hidden_size: int) -> int:
        """Of a layer's matrices."""
        return (sum(self.in_widths) + self.inner) * hidden_size + self.channels * self.kernel

    def part(self, start: int, stop: int) -> Recurrent | None:
        """Those of some of a model's layers by themselves."""
        kept = self.layers[start:stop]
        return replace(self, layers=kept) if any(kept) else None


class RecurrentWeights(NamedTuple):
    """Packed weights of a recurrent layer; those are None that its kind does not have.

    Attributes:
        first, last: the linears.
        conv: ``[kernel, channels]``, the oldest row's factors first.
        conv_bias: ``[channels]``.
        decay: ``[heads]``, below 0: the rate at which a head forgets.
        step_bias: ``[heads]``.
        skip: ``[heads]``, Mamba-2's D.
        in_scale: ``[sum of in_widths]``, factors of what comes out of the first linear.
        norm: ``[value_dim]`` of the delta rule, ``[inner]`` of Mamba-2.
    """

    first: Any
    last: Any
    conv: Any
    conv_bias: Any = None
    decay: Any = None
    step_bias: Any = None
    skip: Any = None
    norm: Any = None
    in_scale: Any = None
