"""What a device backend must offer to the decoder. Owns the interface, no arithmetic.

Every backend packs weights once and owns the layout of keys and values (:class:`Ops`). Then it
either runs whole forwards by itself (:class:`WholeForward`), or computes the decoder's steps one by
one on *rows* (:class:`RowOps`): tensors of ``[rows, features]``, one row per node of some span.
Which rows belong to which request is then known only to :class:`AttentionBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.config import ModelConfig
from paceline.models.taps import Taps
from paceline.span import Span

Tensor = torch.Tensor
Slots = npt.NDArray[np.int64]
ReadRows = Callable[[int, int], Tensor]
"""Rows of a matrix, from the first one up to the last."""

BLOCK_SIZE = 16
"""Tokens per KV block: slot ``s`` is lane ``s % 16`` of block ``s // 16``."""
KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes per element of keys and values."""
KV_GROUP = 32
"""Dimensions of a head that share a scale in an int8 KV cache."""


def head_elements(head_dim: int, kv_dtype: str) -> int:
    """Elements that a head's key or value takes: in int8 two more for the scale of each group."""
    return head_dim + (2 * -(-head_dim // KV_GROUP) if kv_dtype == "int8" else 0)


class KVMemory(Protocol):
    """Keys and values of all layers, in the backend's layout. Block 0 belongs to nobody."""

    num_blocks: int

    def move(self, source: Slots, target: Slots) -> None:
        """Copy slots ``source`` to ``target``, both ascending, no target after its source."""
        ...

    def fill(self, slots: Slots, value: float) -> None: ...


class PackedBatch(Protocol):
    """Spans packed for one forward.

    Attributes:
        num_rows: rows that are computed for a span.
        sample_offsets: where each span's logits begin; one more entry than spans.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def sample_offsets(self) -> Sequence[int]: ...


class WholeForward(Protocol):
    """A decoder and its KV memory as one call."""

    def pack(self, spans: Sequence[Span], block_tables: Sequence[Sequence[int]]) -> PackedBatch:
        """Pack spans whose KV slots are reserved; one block table per span."""
        ...

    def forward(self, batch: Any, taps: Taps, inputs: Tensor | None) -> Tensor:
        """Write the KV of every row; logits ``[samples, num_logits]`` float32 of the sampled.

        Args:
            taps: their features are written.
            inputs: float32 ``[rows, hidden_size]`` of a decoder that has an entry, otherwise None.
        """
        ...

    def write_kv(self, batch: Any, inputs: Tensor) -> None:
        """As :meth:`Decoder.write_kv <paceline.models.decoder.Decoder.write_kv>`."""
        ...

    def greedy(self, batch: Any, taps: Taps, inputs: Tensor | None) -> list[int]:
        """As :meth:`forward`, but only each sampled row's arg-max (the lowest id of equal ones), -1
        where a logit is not a finite number. The same tokens as from the logits."""
        ...

    def grow(
        self, batch: Any, inputs: Tensor | None, tap: int, growths: Sequence[Any], **options: Any
    ) -> tuple[int, int, Sequence[Any]]:
        """Read a batch and grow draft trees below its sampled rows: ``csrc/bind_grow.cpp``.

        Returns:
            Forwards, their rows, and the trees.
        """
        ...


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


@dataclass(slots=True)
class AttentionBatch:
    """Where the rows of one forward write their keys and values and what they look at.

    Attributes:
        cache: ``[layers, 2, slots, kv_heads, head]``, keys at index 0 and values at 1.
        write_slots: slot that each real row writes, ``[rows]``; padding rows come after them.
        groups: every real row is in exactly one of these.
    """

    cache: Tensor
    write_slots: Tensor
    groups: Sequence[AttentionGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some outputs of a linear, as they are stored.

    Attributes:
        num_outputs: rows of the weight.
        read: rows from the first one up to the last: floats ``[rows, k]``, or bytes as uint8
            ``[rows, bytes]``.
        format: of the bytes, as :meth:`~paceline.models.stored.StoredTensors.as_stored` names it;
            None for floats that the backend may round.
        order: of inputs, as :class:`~paceline.models.stored.StoredRows` has it.
    """

    num_outputs: int
    read: ReadRows
    format: str | None = None
    order: Tensor | None = None

    @staticmethod
    def of(weight: Tensor) -> WeightPart:
        """Floats ``[n, k]`` that are in memory."""
        return WeightPart(len(weight), lambda first, last: weight[first:last])


class WeightOps(Protocol):
    """How a backend takes its weights.

    Attributes:
        dtype: of its arithmetic. With ``file`` it takes the bytes of every format as they are;
            with any other weights are given as floats, but for those that must stay float32, whose
            bytes of ``F32`` it takes as they are.
    """

    dtype: str

    def pack_linear(self, parts: Sequence[WeightPart], k: int, bias: Tensor | None) -> Any:
        """Prepare weights ``[sum of the parts' outputs, k]`` for :meth:`Ops.linear`."""
        ...

    def pack_vector(self, weight: Tensor) -> Tensor:
        """Prepare a norm weight or any other float vector."""
        ...

    def pack_embedding(self, part: WeightPart, k: int) -> Any: ...

    def pack_head(self, part: WeightPart, k: int, embedding: Any) -> Any:
        """Prepare the head's weights ``[vocab, k]``.

        Args:
            embedding: the packed embedding where both share their weights, otherwise None.
        """
        ...

    def roundings(self) -> Sequence[Rounding]:
        """What was rounded to another format so far, where it was measured."""
        ...


class PackedPart(NamedTuple):
    """Outputs of a linear in tiles of one format, as ``csrc/kernels.h`` describes them.

    Attributes:
        order: int32 ``[k]``, which input each column is of; None where they are in their order.
    """

    format: str
    data: npt.NDArray[np.uint8]
    num_outputs: int
    order: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights ``[n, k]`` for the native kernels.

    Attributes:
        parts: one after another; several where stacked linears differ in their formats or in the
            orders of their inputs.
        bias: float32 ``[n]``, or None.
    """

    parts: Sequence[PackedPart]
    bias: npt.NDArray[np.float32] | None
    k: int

    @property
    def n(self) -> int:
        return sum(part.num_outputs for part in self.parts)


@dataclass(slots=True)
class Rounding:
    """What a format has cost: sums over all weights that were rounded to it."""

    format: str
    squared_error: float = 0.0
    squares: float = 0.0

    @property
    def relative(self) -> float:
        """Root mean square of the error over that of the weights."""
        return float((self.squared_error / self.squares) ** 0.5) if self.squares else 0.0


@runtime_checkable
class PackedOps(WeightOps, Protocol):
    """A backend whose weights can be kept in a file as it packs them."""

    def adopt(self, packed: PackedLinear) -> Any:
        """Prepare weights that are packed, without copying them.

        Raises:
            ValueError, TypeError: an array has another size or type than its linear needs.
        """
        ...


class Ops(WeightOps, Protocol):
    """A backend: packs weights and lays out keys and values for its device."""

    name: str
    device: torch.device
    identity: bool
    """True when a row's bits never depend on what else is in the forward."""
    default_kv_dtype: str

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``, float32."""
        ...

    def kv_memory(self, config: ModelConfig, num_blocks: int, dtype: str) -> KVMemory: ...

    def whole_forward(self, decoder: Any, memory: Any) -> WholeForward | None:
        """A :class:`~paceline.models.decoder.Decoder` over its KV memory as one call; None from a
        backend of :class:`RowOps`."""
        ...


class RowOps(Ops, Protocol):
    """A backend that computes the decoder's steps on rows."""

    row_multiple: int
    """The batch is padded to a multiple of this many rows."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension; ``weight`` broadcasts against ``x``."""
        ...

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """``[rows, 2 * width]`` to ``[rows, width]``: activation(first half) times second half."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)``."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor: ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``[rows, heads, head_dim]``; the tables are ``[rows, 1, rotary_dim]``, the first
        half of ``sin`` negated."""
        ...

    def write_kv(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> None:
        """Write ``k`` and ``v`` ``[rows, kv_heads, head_dim]`` of a layer."""
        ...

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, batch: Any
    ) -> Tensor:
        """Write ``k`` and ``v``, then attend.

        Returns ``[rows, heads * head_dim]``; rows of padding are zero.
        """
        ...
