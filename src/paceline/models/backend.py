"""What a device backend must offer to the decoder. Owns the interface, no arithmetic.

Every backend packs weights once, owns the layout of keys and values, and runs whole forwards
(:class:`Forward`). What goes in and comes out are arrays in host memory: where a backend computes,
and with what library, is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.models.config import ModelConfig
from paceline.request.span import Span
from paceline.tensors.arrays import STORED_FLOATS, Array, Floats, as_bytes

Slots = npt.NDArray[np.int64]
ReadRows = Callable[[int, int], Any]
"""Rows of a matrix, from the first one up to the last."""

BLOCK_SIZE = 16
"""Tokens per KV block: slot ``s`` is lane ``s % 16`` of block ``s // 16``."""
KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes per element of keys and values."""
KV_GROUP = 32
"""Dimensions of a head that share a scale in an int8 KV cache."""


class Taps(NamedTuple):
    """Which residual streams a forward copies, and where to.

    Tap ``i`` is the residual stream that enters layer ``i``, before that layer's norm: 0 is the
    embedding after its multiplier, and ``num_layers`` is what leaves the last layer, before the
    final norm. ``num_layers + 1`` is what the head reads, after that norm. transformers counts its
    ``output_hidden_states`` like this up to the last layer's input (its last one is after the
    norm); the layer ids of EAGLE-3 checkpoints and of the speculators format
    (``eagle_aux_hidden_state_layer_ids``) do so up to ``num_layers``.

    Attributes:
        layers: the taps, in the order of their features.
        features: float32 ``[rows, taps, hidden_size]``, the batch's rows without padding.
    """

    layers: tuple[int, ...]
    features: Floats

    @staticmethod
    def of(layers: Sequence[int], rows: int, num_layers: int, hidden: int) -> Taps:
        """Make room for a forward's features; ``ValueError`` where the model has no such layer."""
        for layer in layers:
            if not 0 <= layer <= num_layers + 1:
                raise ValueError(f"a tap is {layer}; allowed: 0 to {num_layers + 1}")
        return Taps(tuple(layers), np.empty((rows, len(layers), hidden), np.float32))


NO_TAPS = Taps((), np.empty((0, 0, 0), np.float32))


class LowRank(NamedTuple):
    """An addition to some outputs of a linear (LoRA, arXiv 2106.09685):
    ``scale * up @ (down @ x)``.

    Attributes:
        first: of these outputs.
        down: ``[rank, inputs]``.
        up: ``[outputs, rank]``.
    """

    first: int
    down: Array
    up: Array
    scale: float


AdaptedLayers = Sequence[Mapping[str, Sequence[LowRank]]]
"""Of each layer: what is added to ``qkv``, ``o``, ``gate_up`` and ``down`` of
:class:`~paceline.models.weights.Layer`."""


def slots_of(blocks: Sequence[int]) -> Slots:
    """All slots of some blocks, in their order."""
    first = np.asarray(blocks, dtype=np.int64)[:, None] * BLOCK_SIZE
    return (first + np.arange(BLOCK_SIZE)).ravel()


def head_elements(head_dim: int, kv_dtype: str) -> int:
    """Elements that a head's key or value takes: in int8 two more for the scale of each group."""
    return head_dim + (2 * -(-head_dim // KV_GROUP) if kv_dtype == "int8" else 0)


class SlotMemory(Protocol):
    """What lies by the slots of a KV cache."""

    def move(self, source: Slots, target: Slots) -> None:
        """Copy slots ``source`` to ``target``, both ascending, no target after its source."""
        ...

    def fill(self, slots: Slots, value: float) -> None: ...


class KVMemory(SlotMemory, Protocol):
    """Keys and values of all layers, in the backend's layout. Block 0 belongs to nobody."""

    num_blocks: int

    def lent(self, layers: Sequence[int]) -> KVMemory:
        """Keys and values of some layers, for a model that reads them as those of its own."""
        ...


class StateSpan(NamedTuple):
    """Where the recurrent layers of a span begin, and what they keep of it.

    Attributes:
        read: slot of the committed state.
        write: slot of the state that the span's rows begin with, ``read`` unless leading rows are
            certain.
        lane: of the log.
        path: entries of the log that were accepted and are to be folded into the state first.
        certain: leading nodes of a chain that will be committed whatever is sampled: their rows go
            into ``write``, the others into the log as entries 0, 1, ...
    """

    read: int
    write: int
    lane: int
    path: Sequence[int] = ()
    certain: int = 0


class StateMemory(Protocol):
    """What recurrent layers keep, in the backend's layout.

    A slot holds the states of all layers after some text, and a lane the log of one running
    request: what its last forward read at the nodes of its tree. What of a log was accepted is due
    until it is folded into a slot, in each layer by itself when a forward first reads the state,
    or in all at once by :meth:`fold`: a forward that failed in between can be repeated.
    """

    num_slots: int
    num_lanes: int
    num_nodes: int
    """Entries of a lane."""

    def clear(self, slot: int) -> None:
        """Make a slot that of an empty text."""
        ...

    def copy(self, source: int, target: int) -> None: ...

    def set_due(self, lane: int, due: bool) -> None:
        """Say whether a log has entries that are to be folded."""
        ...

    def fold(self, slot: int, lane: int, path: Sequence[int]) -> None:
        """Bring the entries ``path`` of a log into a slot, in the layers where that is due."""
        ...

    def fill(self, slots: Sequence[int], entries: Sequence[tuple[int, int]], value: float) -> None:
        """Overwrite slots, and entries of logs by their lanes and nodes."""
        ...


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


class Forward(Protocol):
    """A decoder over its KV memory; ``grows_trees`` says whether :meth:`grow` can be called."""

    grows_trees: bool

    @property
    def experts_read(self) -> int:
        """Pairs of a layer and an expert whose weights the latest forward read, each counted once;
        0 where no layer is a mixture. Shared experts, which every row reads, do not count."""
        ...

    @property
    def experts_fetched(self) -> int:
        """Those of :attr:`experts_read` that were read from disk, each time that they were."""
        ...

    @property
    def chosen_experts(self) -> list[Array]:
        """Of each layer that is a mixture the experts of the latest forward's rows,
        ``[rows, per_token]``."""
        ...

    def pack(
        self,
        spans: Sequence[Span],
        block_tables: Sequence[Sequence[int]],
        states: Sequence[StateSpan] = (),
        adapters: Sequence[Any] = (),
    ) -> PackedBatch:
        """Pack spans whose KV slots are reserved; one block table per span.

        Args:
            states: one per span of a decoder that has recurrent layers.
            adapters: one per span, of :meth:`adapter`, or None where the span has none; or no
                entries where no span has one.
        """
        ...

    def adapter(self, layers: AdaptedLayers) -> Any:
        """Prepare an adapter of the decoder for batches of this forward."""
        ...

    def logits(self, batch: Any, taps: Taps, inputs: Floats | None) -> Floats:
        """Write the KV of every row; logits ``[samples, num_logits]`` of the sampled.

        Args:
            taps: their features are written.
            inputs: ``[rows, hidden_size]`` of a decoder that has an entry, otherwise None.
        """
        ...

    def greedy(self, batch: Any, taps: Taps, inputs: Floats | None) -> list[int]:
        """As :meth:`logits`, but only each sampled row's arg-max (the lowest id of equal ones), -1
        where a logit is not a finite number. The same tokens as from the logits."""
        ...

    def write_kv(self, batch: Any, inputs: Floats) -> None:
        """Write the KV of rows ``[rows, hidden_size]`` that every layer reads unchanged."""
        ...

    def grow(
        self, batch: Any, inputs: Floats | None, tap: int, growths: Sequence[Any], **options: Any
    ) -> tuple[int, int, Sequence[Any]]:
        """Grow trees below sampled rows (``csrc/bind/grow.cpp``); forwards, rows, trees."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some outputs of a linear, as they are stored.

    Attributes:
        num_outputs: rows of the weight.
        read: rows from the first one up to the last: floats ``[rows, k]``, or bytes as uint8
            ``[rows, bytes]``. Arrays; for training, tensors of torch.
        format: of the bytes, as :meth:`~paceline.tensors.stored.StoredTensors.as_stored` names it;
            None for floats that the backend may round.
        order: of inputs, as :class:`~paceline.tensors.stored.StoredRows` has it.
    """

    num_outputs: int
    read: ReadRows
    format: str | None = None
    order: Array | None = None

    @staticmethod
    def of(weight: Any) -> WeightPart:
        """Floats ``[n, k]`` that are in memory."""
        return WeightPart(len(weight), lambda first, last: weight[first:last])

    @staticmethod
    def stored(weight: Array) -> WeightPart:
        """Floats ``[n, k]`` that are in memory, to be computed with as they are."""
        form = next(name for name, kind in STORED_FLOATS.items() if kind == weight.dtype)
        rows = as_bytes(weight)
        return WeightPart(len(weight), lambda first, last: rows[first:last], form)


class WeightOps(Protocol):
    """How a backend takes its weights.

    Attributes:
        dtype: of its arithmetic. With ``file`` it takes the bytes of every format as they are;
            with any other weights are given as floats, but for those that must stay float32, whose
            bytes of ``F32`` it takes as they are.
    """

    dtype: str

    def join(self, arrays: Sequence[Any]) -> Any:
        """Arrays of a checkpoint, one after another along their first dimension."""
        ...

    def pack_linear(self, parts: Sequence[WeightPart], k: int, bias: Any) -> Any:
        """Prepare weights ``[sum of the parts' outputs, k]``; the bias ``[outputs]`` or None."""
        ...

    def pack_vector(self, weight: Any) -> Any:
        """Prepare a norm weight or any other floats, as float32. What is so already, and lies where
        the backend computes, is not copied."""
        ...

    def pack_embedding(self, part: WeightPart, k: int) -> Any: ...

    def pack_head(self, part: WeightPart, k: int, embedding: Any, bias: Any = None) -> Any:
        """Prepare the head's weights ``[vocab, k]``.

        Args:
            embedding: the packed embedding where both share their weights, otherwise None.
            bias: ``[vocab]`` or None.
        """
        ...

    def roundings(self) -> Sequence[Rounding]:
        """What was rounded to another format so far, where it was measured."""
        ...


class PackedPart(NamedTuple):
    """Outputs of a linear in tiles of one format, as ``csrc/kernels/kernels.h`` describes them.

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
    """A backend: packs weights, lays out keys and values, and computes on its device."""

    name: str
    device: str
    identity: bool
    """True when a row's bits never depend on what else is in the forward."""
    default_kv_dtype: str

    def linear(self, x: Floats, packed: Any) -> Floats:
        """``[rows, in]`` to ``[rows, out]``."""
        ...

    def embedded(self, token_ids: Sequence[int], packed: Any, multiplier: float) -> Floats:
        """Rows of a packed embedding times a number, ``[len(token_ids), k]``."""
        ...

    def kv_memory(self, config: ModelConfig, num_blocks: int, dtype: str) -> KVMemory: ...

    def state_memory(
        self, config: ModelConfig, num_slots: int, num_lanes: int, num_nodes: int
    ) -> StateMemory:
        """Of a model that has recurrent layers."""
        ...

    def forward(self, decoder: Any, memory: Any, states: Any = None) -> Forward:
        """A :class:`~paceline.models.decoder.Decoder` over its KV memory and, where it has
        recurrent layers, their states."""
        ...


class StateArrays:
    """A :class:`StateMemory` but for its making and folding, of arrays or of tensors.

    Both index alike: the first dimension is layers, the second slots, or lanes of the log.

    Attributes:
        held: what slots hold.
        logs: what lanes hold of each node.
        due: ``[layers, lanes]``, whether what was accepted of a log is still to be folded.
    """

    held: tuple[Any, ...]
    logs: tuple[Any, ...]
    due: Any

    def clear(self, slot: int) -> None:
        for each in self.held:
            each[:, slot] = 0

    def copy(self, source: int, target: int) -> None:
        for each in self.held:
            each[:, target] = each[:, source]

    def set_due(self, lane: int, due: bool) -> None:
        self.due[:, lane] = due

    def fill(self, slots: Sequence[int], entries: Sequence[tuple[int, int]], value: float) -> None:
        for each in self.held:
            each[:, list(slots)] = value
        lanes, nodes = [lane for lane, _ in entries], [node for _, node in entries]
        for log in self.logs:
            log[:, lanes, nodes] = value
