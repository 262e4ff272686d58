"""What torch keeps between forwards: keys and values, and the states and logs of recurrent layers.

What a KV cache holds of a number is said here (:func:`encode`, :func:`decode`); the native kernels
do the same. Of recurrent layers, :class:`~paceline.models.backend.StateMemory` says when what is
where. A span's rows are a tree below the state of its request, and they are walked level by level
(:class:`RecurrentBatch`): all rows of one depth, of all spans, after those of the depth before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from paceline.models.backend import (
    BLOCK_SIZE,
    KV_GROUP,
    Slots,
    StateArrays,
    StateSpan,
    head_elements,
)
from paceline.models.config import ModelConfig
from paceline.models.layer_sizes import DELTA, Recurrent
from paceline.request.span import Span

Tensor = torch.Tensor
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
LARGEST_HALF = 65504.0
LEAST_SCALE = 1e-30


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that hold heads ``[..., head_dim]`` of float32, ``[..., head_elements]``.

    ``float16`` holds what is beyond its largest number as that one. ``int8`` is codes and, after
    them, the bytes of a bfloat16 scale for each :data:`KV_GROUP` dimensions: a 127th of the
    largest size, rounded up, so that every code is in -127..127. A NaN or inf makes the scale NaN.
    """
    if dtype == torch.float16:
        bounded = x.clamp(-LARGEST_HALF, LARGEST_HALF)
        return torch.where(x.isinf(), x, bounded).to(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    head_dim = x.shape[-1]
    groups = F.pad(x, (0, -head_dim % KV_GROUP)).unflatten(-1, (-1, KV_GROUP))
    scale = groups.abs().amax(dim=-1).div_(127.0).clamp_min_(LEAST_SCALE)
    bits = (scale.view(torch.int32) + 0xFFFF) >> 16
    bits = torch.where(scale.isfinite(), bits, 0x7FC0).to(torch.int16)
    codes = torch.round(groups / bits.view(torch.bfloat16).float()[..., None]).nan_to_num_(0.0)
    codes = codes.to(torch.int8).flatten(-2)[..., :head_dim]
    return torch.cat((codes, bits.view(torch.int8)), dim=-1)


def decode(elements: Tensor, head_dim: int) -> Tensor:
    """The numbers that elements hold: float32 ``[..., head_dim]``."""
    if elements.dtype != torch.int8:
        return elements.float()
    codes = F.pad(elements[..., :head_dim].float(), (0, -head_dim % KV_GROUP))
    scale = elements[..., head_dim:].contiguous().view(torch.bfloat16).float()
    numbers: Tensor = codes.unflatten(-1, (-1, KV_GROUP)) * scale[..., None]
    return numbers.flatten(-2)[..., :head_dim].contiguous()


class TensorKV:
    """``layers`` has, per layer, ``[2, slots, kv_heads, head]``, keys at index 0, values at 1.

    It is ``[1, ...]`` where the keys are the values; a layer that reads those of another has them,
    and one without attention has an empty tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        slots = num_blocks * BLOCK_SIZE
        self._own: list[tuple[int, Tensor]] = []  # size of a head, and its layer's tensor
        self.layers: list[Tensor] = []
        for layer in range(config.num_layers):
            if config.owns_kv(layer):
                dim, kv_heads, _ = config.heads_of(layer)
                shape = (config.kv_arrays, slots, kv_heads, head_elements(dim, dtype))
                held = torch.empty(shape, dtype=DTYPES[dtype], device=device)
                held[:, :BLOCK_SIZE] = 0  # absent lanes read its first slot
                self._own.append((dim, held))
                self.layers.append(held)
            elif config.has_attention(layer):
                self.layers.append(self.layers[config.attention.kv_layer(layer)])
            else:
                self.layers.append(torch.empty(0, device=device))

    def move(self, source: Slots, target: Slots) -> None:
        to, at = torch.from_numpy(target), torch.from_numpy(source)
        for _, held in self._own:
            held[:, to.to(held.device)] = held[:, at.to(held.device)]

    def fill(self, slots: Slots, value: float) -> None:
        at = torch.from_numpy(slots)
        for dim, held in self._own:
            head = encode(torch.full((dim,), value), held.dtype)
            held[:, at.to(held.device)] = head.to(held.device)

    def lent(self, layers: Sequence[int]) -> TensorKV:
        other = copy.copy(self)
        other.layers = [self.layers[layer] for layer in layers]
        return other


class TensorStates(StateArrays):
    """Arrays of float32; the first dimension is a model's recurrent layers, in their order.

    Attributes:
        conv: ``[layers, slots, channels, kernel - 1]``, the oldest row first.
        state: ``[layers, slots, ...]``, as ``Recurrent.state_shape`` says.
        log_conv: ``[layers, lanes, nodes, channels]``, what the convolution read.
        log_key: ``[layers, lanes, nodes, groups, key_dim]``, normed keys, or Mamba-2's B.
        log_value: ``[layers, lanes, nodes, heads, value_dim]``, what a key is multiplied with:
            corrected values, or Mamba-2's x times its time step.
        log_decay: ``[layers, lanes, nodes, heads]``, factors of the state before that is added.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        num_lanes: int,
        num_nodes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        assert config.recurrent is not None
        self.shape: Recurrent = config.recurrent
        self.num_slots, self.num_lanes, self.num_nodes = num_slots, num_lanes, num_nodes
        r, layers = self.shape, sum(self.shape.layers)
        held, logged = (layers, num_slots), (layers, num_lanes, num_nodes)
        self.conv = torch.zeros(*held, r.channels, r.kernel - 1, device=device)
        self.state = torch.zeros(*held, *r.state_shape, device=device)
        self.log_conv = torch.zeros(*logged, r.channels, device=device)
        self.log_key = torch.zeros(*logged, r.groups, r.key_dim, device=device)
        values = r.value_dim if r.key_dim else 0
        self.log_value = torch.zeros(*logged, r.heads, values, device=device)
        self.log_decay = torch.zeros(*logged, r.heads, device=device)
        self.held = self.conv, self.state
        self.logs = self.log_conv, self.log_key, self.log_value, self.log_decay
        self.due = torch.zeros((layers, num_lanes), dtype=torch.bool)

    @torch.inference_mode()
    def fold(self, slot: int, lane: int, path: Sequence[int]) -> None:
        for layer in range(len(self.state)):
            self.fold_layer(layer, slot, lane, path)

    def fold_layer(self, layer: int, slot: int, lane: int, path: Sequence[int]) -> None:
        """:meth:`fold` of one layer."""
        if not self.due[layer, lane]:
            return
        self.due[layer, lane] = False
        read = self.log_conv[layer, lane, list(path)].t()  # [channels, path]
        window = torch.cat((self.conv[layer, slot], read), dim=1)
        self.conv[layer, slot] = window[:, len(path) :]
        if not self.shape.key_dim:
            return
        state = self.state[layer, slot][None]
        for entry in path:
            key, value, decay = (log[layer, lane, entry][None] for log in self.logs[1:])
            state = after_row(self.shape, state, key, value, decay)
        self.state[layer, slot] = state[0]


def after_row(shape: Recurrent, state: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """States ``[n, heads, ...]`` after one more row each, from what a log keeps of it.

    A walk makes its states by this too, so that what is folded later has the same bits.
    """
    each = key.repeat_interleave(shape.heads // shape.groups, dim=1)
    left, right = (each, value) if shape.kind == DELTA else (value, each)
    return state * decay[..., None, None] + left[..., None] * right[..., None, :]


@dataclass(frozen=True, slots=True)
class Level:
    """The rows of one depth.

    Attributes:
        rows: ``[n]``, indices into the batch.
        before: ``[n]``, which row of the level before each follows; of the first level, which span
            it is of.
        kept: ``[k]``, which of these rows are the last ones that are certain, and ``slots``
            ``[k]``, where their states go.
    """

    rows: Tensor
    before: Tensor
    kept: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """
    Attributes:
        memory: states and logs.
        spans: where each span's state is.
        num_rows: real rows of the batch.
        levels: by their depths.
        windows: ``[rows, kernel]``, what the convolution of each row sees, the oldest first:
            columns of the spans' states (``kernel - 1`` each, spans in order), then rows.
        last_windows: ``[k, kernel - 1]``, the same of what is kept after the last certain row of
            the spans that have one, and ``last_slots`` ``[k]``, where it goes.
        logged: ``[l]`` rows that are logged, in ``lanes`` and ``nodes`` ``[l]``.
    """

    memory: TensorStates
    spans: Sequence[StateSpan]
    num_rows: int
    levels: Sequence[Level]
    windows: Tensor
    last_windows: Tensor
    last_slots: Tensor
    logged: Tensor
    lanes: Tensor
    nodes: Tensor


@dataclass(slots=True)
class _Walk:
    """Rows of a batch, gathered span by span. Lists of levels are by depth."""

    kernel: int
    rows: list[list[int]] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    kept: list[list[tuple[int, int]]] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    last: list[tuple[list[int], int]] = field(default_factory=list)
    logged: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, index: int, count: int, span: Span, where: StateSpan) -> None:
        """
        Args:
            index: of the span, out of ``count``.
        """
        assert span.num_cached == 0, "no forward leaves a state in the middle of a span"
        first, states = len(self.windows), count * (self.kernel - 1)
        columns = list(range(index * (self.kernel - 1), (index + 1) * (self.kernel - 1)))
        places: list[tuple[int, int]] = []  # depth, and index in that level
        for node, parent in enumerate(span.parents):
            seen = columns if parent < 0 else self.windows[first + parent][1:]
            window = [*seen, states + first + node]
            self.windows.append(window)
            depth = 0 if parent < 0 else places[parent][0] + 1
            place = self._place(depth, first + node, index if parent < 0 else places[parent][1])
            places.append((depth, place))
            if node == where.certain - 1:
                self.kept[depth].append((place, where.write))
                self.last.append((window[1:], where.write))
            elif node >= where.certain:
                self.logged.append((first + node, where.lane, node - where.certain))

    def _place(self, depth: int, row: int, before: int) -> int:
        if depth == len(self.rows):
            for lists in (self.rows, self.before, self.kept):
                lists.append([])
        self.rows[depth].append(row)
        self.before[depth].append(before)
        return len(self.rows[depth]) - 1


def recurrent_batch(
    spans: Sequence[Span], states: Sequence[StateSpan], memory: TensorStates
) -> RecurrentBatch:
    """Pack spans whose states are reserved, one :class:`StateSpan` for each."""
    device, walk = memory.state.device, _Walk(memory.shape.kernel)
    for index, (span, where) in enumerate(zip(spans, states, strict=True)):
        walk.add(index, len(spans), span, where)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def table(rows: Sequence[Sequence[int]], width: int) -> Tensor:
        return column([at for row in rows for at in row]).view(-1, width)

    kernel = memory.shape.kernel
    levels = [
        Level(
            column(rows), column(before), column([k for k, _ in kept]), column([s for _, s in kept])
        )
        for rows, before, kept in zip(walk.rows, walk.before, walk.kept, strict=True)
    ]
    return RecurrentBatch(
        memory=memory,
        spans=states,
        num_rows=len(walk.windows),
        levels=levels,
        windows=table(walk.windows, kernel),
        last_windows=table([window for window, _ in walk.last], kernel - 1),
        last_slots=column([slot for _, slot in walk.last]),
        logged=column([row for row, _, _ in walk.logged]),
        lanes=column([lane for _, lane, _ in walk.logged]),
        nodes=column([node for _, _, node in walk.logged]),
    )
