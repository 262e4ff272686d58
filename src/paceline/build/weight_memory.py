"""How much memory a target's weights get, and the tensors of a target whose weights do not fit.

Owns the rule; which weights stay by a limit is :mod:`paceline.tensors.placement`'s affair.

A target that is read from disk in every step drafts for itself where no draft was configured. A
step that reads its layers takes as long for many rows as for one, so a draft is worth far more
time than it is where all weights are in memory. A copy of the layers in fewer bits drafts about as
well as anything can, if there is memory for it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial

from paceline.backends.native.packing import FORMAT_OF, WEIGHT_BITS
from paceline.cache.memory_needs import DEFAULT_MEMORY_SHARE, LEAST_NODES
from paceline.config import EngineConfig
from paceline.config.speculative import SelfDraftConfig
from paceline.core.errors import ConfigError
from paceline.core.machine import memory
from paceline.disk.packed_cache import find_packed, packed_size, packed_tensors
from paceline.disk.streaming import StreamedTensors, placement_of
from paceline.loading.checkpoint import Checkpoint
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.tensors.arrays import Array
from paceline.tensors.placement import Placement, place_experts, place_layers
from paceline.tensors.quantised_blocks import FORMATS
from paceline.tensors.stored import StoredTensors

WEIGHTS_SHARE = 0.7
"""Of the available memory; keys and values, and whatever else there is, have the rest."""
ABOUT = 1.25
"""By how much what is expected of a model that is not packed yet may be too large."""


def can_stream(ops: Ops) -> bool:
    """Whether weights can be read from disk as they are needed."""
    return sys.platform == "linux" and ops.name.startswith("native")


def weight_limit(checkpoint: Checkpoint, config: EngineConfig, ops: Ops) -> int | None:
    """Bytes that the weights may take; None where all of them may stay in memory.

    Without a wish, a packed model has a share of what is available, because the pages of its
    files can go at any time; another one is left alone unless it cannot fit at all.

    Args:
        config: resolved for the checkpoint.

    Raises:
        ConfigError: weights cannot be read from disk here, and a wish asks for it.
    """
    asked, in_memory = config.weight_memory, config.load_format == "memory"
    if asked is not None and in_memory:
        raise ConfigError("--weight-memory reads layers from files: leave out --load-format memory")
    size = packed_size(checkpoint, config.dtype)
    if asked is not None and size > asked and not can_stream(ops):
        raise ConfigError(
            "--weight-memory is for the native kernels on Linux; this is "
            f"{ops.name} on {sys.platform}: leave it out, or choose a smaller model"
        )
    if asked is not None:
        return asked if size > asked else None
    _, available = memory()
    if available is None or in_memory or not can_stream(ops):
        return None
    share = int(available * WEIGHTS_SHARE)
    if size <= (share if checkpoint.packed is not None else available):
        return None
    return share


def placement_for(checkpoint: Checkpoint, config: EngineConfig, ops: Ops) -> Placement | None:
    """Which weights would stay in memory; None where all would.

    Opens nothing. Of a model that is not packed yet it is what is expected, by its shape alone.

    Raises:
        ConfigError: as :func:`tensors_within`.
    """
    limit = weight_limit(checkpoint, config, ops)
    if limit is None or not (checkpoint.packed or checkpoint.files):
        return None
    packed = checkpoint.tensors
    if checkpoint.packed is None:
        packed = find_packed(checkpoint, config.dtype) or {}
    place = _placing(checkpoint, packed) if packed else partial(_expected, checkpoint, config.dtype)
    found = place(_beside_copy(checkpoint, config, limit, place))
    return found if found.streamed or found.experts else None


def expected_placement(checkpoint: Checkpoint, dtype: str, limit: int) -> Placement:
    """Which weights would stay of a model that is to be packed, about: all are taken to be of as
    many bits.

    Raises:
        ConfigError: the limit is too small.
    """
    shape, size = checkpoint.config, packed_size(checkpoint, dtype)
    of_weight = size / shape.num_weights

    def num_bytes(weights: int) -> int:
        return round(weights * of_weight)

    mixtures = filter(None, map(shape.mlp.experts_of, range(shape.num_layers)))
    experts = [[num_bytes(shape.mlp_weights(e.width))] * e.number for e in mixtures]
    if experts:
        return place_experts(experts, size - sum(map(sum, experts)), limit)
    layers = [num_bytes(shape.layer_weights(layer)) for layer in range(shape.num_layers)]
    return place_layers(layers, size - sum(layers), limit)


def _expected(checkpoint: Checkpoint, dtype: str, limit: int) -> Placement:
    """As :func:`expected_placement`, where only a limit that is clearly too small is refused."""
    try:
        return expected_placement(checkpoint, dtype, limit)
    except ConfigError as error:
        try:
            return expected_placement(checkpoint, dtype, int(limit * ABOUT))
        except ConfigError:
            raise error from None


def tensors_within(checkpoint: Checkpoint, config: EngineConfig, ops: Ops) -> Mapping[str, Array]:
    """The checkpoint's tensors, some of which are read from disk where they do not all fit.

    Raises:
        ConfigError: the limit is too small, or weights cannot be read from disk here.
    """
    limit = weight_limit(checkpoint, config, ops)
    if limit is None:
        return checkpoint.tensors
    tensors = checkpoint.tensors
    if checkpoint.packed is None:
        if checkpoint.files:
            _expected(checkpoint, config.dtype, limit)  # packing takes minutes: refuse it before
        tensors = packed_tensors(checkpoint, config.dtype, config.packed_space)
    assert isinstance(tensors, StoredTensors)
    limit = _beside_copy(checkpoint, config, limit, _placing(checkpoint, tensors))
    found = StreamedTensors(tensors, checkpoint.config.num_layers, limit)
    return tensors if found.stream is None else found


def _placing(checkpoint: Checkpoint, tensors: Mapping[str, Array]) -> Callable[[int], Placement]:
    """The placement of packed tensors by a limit."""
    assert isinstance(tensors, StoredTensors)
    return partial(placement_of, tensors, checkpoint.config.num_layers)


def _beside_copy(
    checkpoint: Checkpoint, config: EngineConfig, limit: int, place: Callable[[int], Placement]
) -> int:
    """A limit that nobody asked for leaves room for a copy that drafts, where it is worth more."""
    drafts = config.self_drafts and config.speculative
    _, available = memory()
    if config.weight_memory is not None or available is None or not drafts:
        return limit
    return limit_beside_copy(checkpoint.config, available, limit, config.kv_cache_memory, place)


log = logging.getLogger(__name__)
COPIES = ("int4", "int3")
"""Precisions of a copy, the best first."""
WORTH = 0.7
"""A copy that takes more than this part of the layers would read about as much as they do."""
ROOM = 0.8
"""Part of the memory that is left which it may take."""
GAIN = 2.0
"""Tokens of a step that such a draft brings at least, so that this many times as much may be
read in each."""


def self_draft(decoder: Decoder, kv_bytes: int) -> SelfDraftConfig | None:
    """How a target drafts for itself; None where it is in memory, or a copy has no room."""
    placement, shape = decoder.placement, decoder.config
    if placement is None or not placement.streamed:
        return None
    _, available = memory()
    left = 0 if available is None else available - kv_bytes
    layers = placement.streamed_bytes * shape.num_layers / len(placement.streamed)
    for dtype in COPIES:
        copy, bits = copy_bytes(shape, dtype), dtype.removeprefix("int")
        if copy <= WORTH * layers and copy <= ROOM * left:
            log.warning("drafts with a copy of its layers in %s bits, %.2f GB", bits, copy / 1e9)
            if shape.recurrent:  # whose logs have room for a chain, and no more
                return SelfDraftConfig(dtype=dtype, num_speculative_tokens=LEAST_NODES)
            return SelfDraftConfig(
                dtype=dtype, num_speculative_tokens=32, max_branching=3, max_tree_nodes=128
            )
        small = copy > WORTH * layers
        why = "the layers take little more" if small else f"{left / 1e9:.2f} GB are left"
        log.info("no draft by a copy in %s bits, which takes %.2f GB: %s", bits, copy / 1e9, why)
    return None


def limit_beside_copy(
    shape: ModelConfig,
    available: int,
    limit: int,
    kv_bytes: int | None,
    place: Callable[[int], Placement],
) -> int:
    """What the weights may take so that a copy finds room, where that brings more than it costs.

    Args:
        available: bytes of memory.
        limit: bytes for the weights without a copy.
        kv_bytes: that keys and values may take; None is a share of what is left.
        place: the placement by a limit; raises :class:`ConfigError` where it is too small.
    """
    alone = place(limit)
    if not alone.streamed:
        return limit
    layers = alone.streamed_bytes * shape.num_layers / len(alone.streamed)
    for dtype in COPIES:
        copy = copy_bytes(shape, dtype)
        left = available - (limit - copy)
        left -= int(left * DEFAULT_MEMORY_SHARE) if kv_bytes is None else kv_bytes
        try:
            beside = place(limit - copy)
        except ConfigError:
            continue
        pays = beside.streamed_bytes < GAIN * alone.streamed_bytes
        if pays and copy <= WORTH * layers and copy <= ROOM * left:
            return limit - copy
    return limit


def copy_bytes(shape: ModelConfig, dtype: str) -> int:
    """What the copy of a dense model's layers takes; rows are filled up to whole blocks."""
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    unit = FORMATS[FORMAT_OF[dtype]].inputs
    filled = -(-shape.hidden_size // unit) * unit / shape.hidden_size
    return int((shape.num_weights - ends) * filled * WEIGHT_BITS[dtype] / 8)
