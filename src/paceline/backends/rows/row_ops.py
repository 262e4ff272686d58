"""What a backend offers that computes a decoder row by row in torch. Imports torch.

A row is one node of some span: tensors are ``[rows, features]``. Which rows belong to which request
is known only to :class:`AttentionBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from paceline.backends.rows.tensor_memory import RecurrentBatch
from paceline.models.backend import WeightOps
from paceline.models.config import ModelConfig

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that look at the same number of key lanes.

    Attributes:
        rows: indices into the batch, ``[r]``.
        slots: the KV slot of every logical position, ``[r, lanes]``; slot 0 (always zero) where
            the row sees nothing.
        mask: 0 for a lane that the row sees and -inf otherwise, ``[r, 1, 1, lanes]``.
        sliding_mask: the same of layers with a sliding window, where the model has one.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor
    sliding_mask: Tensor | None = None

    def to(self, device: torch.device) -> AttentionGroup:
        sliding = self.sliding_mask
        return AttentionGroup(
            self.rows.to(device),
            self.slots.to(device),
            self.mask.to(device),
            None if sliding is None else sliding.to(device),
        )


class AddedPart(NamedTuple):
    """What an adapter adds to some outputs of a linear: ``scale * up(down(x))``."""

    outputs: slice
    down: Any
    up: Any
    scale: float


AddedLayers = Sequence[Mapping[str, Sequence[AddedPart]]]
"""Of each layer, by the names of its linears."""


@dataclass(slots=True)
class AttentionBatch:
    """Where the rows of one forward write their keys and values and what they look at.

    Attributes:
        cache: per layer ``[2, slots, kv_heads, head]``, keys at index 0 and values at 1; or
            ``[1, ...]``, keys that are the values; not read of a layer without attention.
        write_slots: slot that each real row writes, ``[rows]``; padding rows come after them.
        groups: every real row is in exactly one of these.
        recurrent: the same of recurrent layers; None where the model has none.
        block_rows: how many rows of its block come before each row, padding included, ``[rows]``;
            None where spans are no blocks.
    """

    cache: Sequence[Tensor]
    write_slots: Tensor
    groups: Sequence[AttentionGroup] = field(default_factory=list)
    recurrent: RecurrentBatch | None = None
    block_rows: Tensor | None = None


class RowOps(WeightOps, Protocol):
    """A backend that computes a decoder's steps on rows."""

    row_multiple: int
    """The batch is padded to a multiple of this many rows."""

    def row_linear(self, x: Tensor, packed: Any) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``, float32."""
        ...

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension; ``weight`` broadcasts against ``x``."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """As :meth:`rms_norm`, of the deviations from the mean, plus a bias."""
        ...

    def activation(self, x: Tensor, activation: str, learnt: Tensor | None) -> Tensor:
        """``learnt`` is what ``xielu`` has beyond its input: alpha above and below zero, beta."""
        ...

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """``[rows, 2 * width]`` to ``[rows, width]``: activation(first half) times second half.

        The clamped SwiGLU limits both halves, and adds 1 to the second one.
        """
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)``."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor: ...

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of each element, whose bits do not depend on how many there are."""
        ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``[rows, heads, head_dim]``; the tables are ``[rows, 1, rotary_dim]``, the first
        half of ``sin`` negated."""
        ...

    def write_kv(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> None:
        """Write ``k`` and ``v`` ``[rows, kv_heads, head_dim]`` of a layer."""
        ...

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        config: ModelConfig,
        batch: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write ``k`` and ``v``, then attend.

        Args:
            k, v: None where the layer reads the keys and values of another one.
            sinks: ``[heads]``, a score of each head that has no value and takes part in every
                softmax; None where the model has none.

        Returns ``[rows, heads * head_dim]``; rows of padding are zero.
        """
        ...
