"""The native CPU kernels as a backend. Owns how they are called; the arithmetic is in ``csrc/``.

A forward is one call (:class:`NativeForward`). Rows are bitwise independent of everything that
shares the forward, as in the reference: integers are exact in any order, and every other kernel
computes a row by one fixed program. Knows no requests and no sampling.

A recurrent layer's states and logs lie as ``csrc/kernels/recurrent.h`` says; when what is where,
:class:`~paceline.models.backend.StateMemory` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.backends.native.native import native_module
from paceline.backends.native.packing import AdapterPacker, Packer
from paceline.core.errors import UnsupportedModelError
from paceline.models.backend import (
    BLOCK_SIZE,
    AdaptedLayers,
    PackedLinear,
    Slots,
    StateArrays,
    StateSpan,
    Taps,
    head_elements,
)
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.threads import num_threads
from paceline.request.span import Span
from paceline.tensors.arrays import Array, Floats, sparse_zeros

MAX_HEAD_DIM = 576  # kernels.h
MAX_KERNEL = 8  # recurrent.h: rows that a recurrent layer's convolution sees
ELEMENTS = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # their bits: numpy knows none
    "int8": np.int8,
}


class CpuOps(Packer):
    """Backend over ``paceline._native``.

    Args:
        dtype: see :class:`~paceline.backends.native.packing.Packer`. Activations are 8-bit with a
            scale per 32 inputs where weights are not floats, otherwise float32.
    """

    identity = True
    device = "cpu"

    def __init__(self, dtype: str = "int8") -> None:
        super().__init__(dtype)
        self.default_kv_dtype = "float32" if dtype == "float32" else "float16"
        self.name = f"native {self._native.isa()}"

    def adopt(self, packed: PackedLinear) -> Any:
        return self._native.Linear(packed.parts, packed.bias, packed.k)

    def linear(self, x: Floats, packed: Any) -> Floats:
        y: Floats = packed.linear(np.ascontiguousarray(x))
        return y

    def embedded(self, token_ids: Sequence[int], packed: Any, multiplier: float) -> Floats:
        rows: Floats = packed.rows(np.asarray(token_ids, np.int32), multiplier)
        return rows

    # --- the forward ---------------------------------------------------------------------------

    def kv_memory(self, config: ModelConfig, num_blocks: int, dtype: str) -> NativeKV:
        return NativeKV(config, num_blocks, dtype)

    def state_memory(
        self, config: ModelConfig, num_slots: int, num_lanes: int, num_nodes: int
    ) -> NativeStates:
        return NativeStates(config, num_slots, num_lanes, num_nodes)

    def forward(
        self, decoder: Decoder, memory: NativeKV, states: NativeStates | None = None
    ) -> NativeForward:
        return NativeForward(decoder, memory, states)


class NativeKV:
    """Keys ``[layers, blocks, kv_heads, head, 16]``, so that the lanes of a vector run over tokens,
    and values ``[layers, blocks, kv_heads, 16, head]``. A key's head is ``head_dim`` elements, a
    value's as many rounded up to 16, or none where keys are the values; in ``int8`` the bytes of
    their scales follow. Blocks that were never used take no memory.

    Layers whose heads are alike share one pair of these arrays; a layer that reads the keys and
    values of another has that one's.

    Attributes:
        keys, values: per layer, its part; None where it has no attention.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: str = "float16") -> None:
        self.num_blocks = num_blocks
        self._native = native_module()
        owners = dict[tuple[int, int], list[int]]()
        for layer in filter(config.owns_kv, range(config.num_layers)):
            dim, kv_heads, _ = config.heads_of(layer)
            owners.setdefault((dim, kv_heads), []).append(layer)
        self._arrays: list[tuple[Array, Array]] = []
        found: dict[int, tuple[Array, Array]] = {}
        for (dim, kv_heads), layers in owners.items():
            key, value = _head_sizes(config, dim, dtype)
            outer = (len(layers), num_blocks, kv_heads)
            keys = sparse_zeros((*outer, key, BLOCK_SIZE), ELEMENTS[dtype])
            values = sparse_zeros((*outer, BLOCK_SIZE, value), ELEMENTS[dtype])
            self._arrays.append((keys, values))
            found |= dict(zip(layers, zip(keys, values, strict=True), strict=True))
        readers = map(config.attention.kv_layer, range(config.num_layers))
        read = [found.get(layer, (None, None)) for layer in readers]
        self.keys, self.values = [k for k, _ in read], [v for _, v in read]

    def move(self, source: Slots, target: Slots) -> None:
        for keys, values in self._arrays:
            self._native.move_kv(keys, values, source, target)

    def fill(self, slots: Slots, value: float) -> None:
        for keys, values in self._arrays:
            self._native.fill_kv(keys, values, slots, value)

    def lent(self, layers: Sequence[int]) -> NativeKV:
        other = copy.copy(self)
        other.keys = [self.keys[layer] for layer in layers]
        other.values = [self.values[layer] for layer in layers]
        return other


def _head_sizes(config: ModelConfig, dim: int, dtype: str) -> tuple[int, int]:
    """Elements of a key and of a value whose head has ``dim`` dimensions."""
    if dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"keys of {dim} dimensions are more than the {MAX_HEAD_DIM} of the native kernels; use "
            "--backend reference"
        )
    value = head_elements(-(-dim // BLOCK_SIZE) * BLOCK_SIZE, dtype)
    return head_elements(dim, dtype), 0 if config.kv_arrays == 1 else value


class NativeForward:
    """A decoder whose weights :class:`CpuOps` packed, over the KV memory of as many layers."""

    def __init__(
        self, decoder: Decoder, memory: NativeKV, states: NativeStates | None = None
    ) -> None:
        self._native = native_module()
        self._reach, self._reached, self._layers = decoder.reach, 0, decoder.layers
        self._per_token = decoder.config.mlp.experts.per_token if decoder.config.mlp.experts else 0
        self._decoder = self._native.Decoder(decoder)
        if decoder.stream is not None:
            self._decoder.set_stream(decoder.stream)
        count = len(decoder.layers)  # of a draft, fewer than those whose KV there is
        keys, values = memory.keys[:count], memory.values[:count]
        attends = any(each is not None for each in keys)
        blocks = {} if attends else {"num_blocks": memory.num_blocks}  # which arrays tell otherwise
        self._decoder.set_cache(keys, values, **blocks)
        self.grows_trees = decoder.config.recurrent is None
        if decoder.config.recurrent is not None:
            assert states is not None
            layers = sum(decoder.config.recurrent.layers)
            self._decoder.set_states(*(each[:layers] for each in states.arrays))

    @property
    def experts_read(self) -> int:
        return int(self._decoder.experts_read)

    @property
    def experts_fetched(self) -> int:
        return int(self._decoder.experts_fetched)

    @property
    def chosen_experts(self) -> list[Array]:
        layers = [np.array(ids, np.int32) for ids in self._decoder.chosen_experts if ids]
        return [ids.reshape(-1, self._per_token) for ids in layers]

    def pack(
        self,
        spans: Sequence[Span],
        block_tables: Sequence[Sequence[int]],
        states: Sequence[StateSpan] = (),
        adapters: Sequence[Any] = (),
    ) -> Any:
        length = max(map(len, block_tables), default=0) * BLOCK_SIZE
        if length > self._reached:
            self._reach(length)
            self._reached = length
        batch = self._decoder.pack(spans, block_tables, states)
        if adapters:
            self._decoder.adapt(batch, adapters)
        return batch

    def adapter(self, layers: AdaptedLayers) -> Any:
        packer = AdapterPacker(CpuOps())
        return self._native.Adapter(self._decoder, packer.layers(self._layers, layers))

    def logits(self, batch: Any, taps: Taps, inputs: Floats | None) -> Floats:
        logits: Floats = self._run(self._decoder.forward, batch, taps, inputs)
        return logits

    def write_kv(self, batch: Any, inputs: Floats) -> None:
        self._native.set_threads(num_threads())
        self._decoder.write_kv(batch, inputs)

    def grow(
        self, batch: Any, inputs: Floats | None, tap: int, growths: Sequence[Any], **options: Any
    ) -> tuple[int, int, list[Any]]:
        """See ``csrc/bind/grow.cpp``; ``growths`` have their slots and most depth as it says."""
        self._native.set_threads(num_threads())
        self._reach(max(start + depth for _, _, _, depth, _, start, _ in growths) + 1)
        found: tuple[int, int, list[Any]] = self._native.grow(
            self._decoder, batch, inputs, tap, growths=growths, **options
        )
        return found

    def greedy(self, batch: Any, taps: Taps, inputs: Floats | None) -> list[int]:
        tokens: list[int] = self._run(self._decoder.forward_greedy, batch, taps, inputs).tolist()
        return tokens

    def _run(
        self, forward: Callable[..., Any], batch: Any, taps: Taps, inputs: Floats | None
    ) -> Any:
        self._native.set_threads(num_threads())
        return forward(batch, inputs, taps.layers, taps.features)


class NativeStates(StateArrays):
    """Arrays of float32; the first dimension is a model's recurrent layers, in their order.

    Held are the convolution's inputs ``[layers, slots, kernel - 1, channels]``, the oldest row
    first, and the states ``[layers, slots, heads, tiles * key_dim * 16]``: for every 16 columns of
    a head's values a tile, a row per key; columns beyond ``value_dim`` are never read. Logs are
    ``[layers, lanes, nodes, ...]`` of what the convolution read, keys, what they are multiplied
    with, and decays.
    """

    def __init__(self, config: ModelConfig, num_slots: int, num_lanes: int, num_nodes: int) -> None:
        r = config.recurrent
        assert r is not None
        self.num_slots, self.num_lanes, self.num_nodes = num_slots, num_lanes, num_nodes
        self._native, self._groups, self._key_dim = native_module(), r.groups, r.key_dim
        layers = sum(r.layers)
        tiles = -(-r.value_dim // BLOCK_SIZE)
        held, logged = (layers, num_slots), (layers, num_lanes, num_nodes)
        shapes = (r.kernel - 1, r.channels), (r.heads, tiles * r.key_dim * BLOCK_SIZE)
        widths = r.channels, r.keys, r.inner, r.heads
        self.held = tuple(sparse_zeros((*held, *shape), np.float32) for shape in shapes)
        self.logs = tuple(sparse_zeros((*logged, width), np.float32) for width in widths)
        self.due = np.zeros((layers, num_lanes), np.uint8)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which the kernels take them."""
        return *self.held, *self.logs, self.due

    def fold(self, slot: int, lane: int, path: Sequence[int]) -> None:
        self._native.set_threads(num_threads())
        self._native.fold_states(*self.arrays, self._groups, self._key_dim, slot, lane, list(path))
