"""A backend whose layers lie in stages: how they are divided, and its memory, which lies in all.

Owns what the stages are told of memory. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from paceline.core.errors import ConfigError, StageError
from paceline.models.backend import KVMemory, Ops, Slots
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.planner.micro_batches import MicroBatching
from paceline.stages.forward import StagedForward
from paceline.stages.link import Message
from paceline.stages.remote import RemoteStage


def split(config: ModelConfig, count: int) -> list[range]:
    """Which layers each of some stages has, the engine's own first.

    Raises:
        ConfigError: the model has too few, or layers that read more than the residual stream.
    """
    layers = config.num_layers
    if not 1 <= count <= layers:
        raise ConfigError(
            f"pipeline_parallel_size is {count}; allowed: 1 to {layers}, the model's layers"
        )
    ends = [layers * index // count for index in range(count + 1)]
    parts = [range(a, b) for a, b in pairwise(ends)]
    apart = any(config.attention.kv_layer(i) < part.start for part in parts for i in part)
    if count > 1 and (config.layer_inputs or config.altup or config.entry.kind or apart):
        raise ConfigError(
            f"layers of {config.architecture} read more than the residual stream, which is all "
            "that stages hand on: leave pipeline_parallel_size out"
        )
    return parts


class StagedKV:
    """The same slots in all stages."""

    def __init__(self, own: KVMemory, stages: list[RemoteStage], dtype: str) -> None:
        self.own, self.dtype, self._stages = own, dtype, stages
        self.num_blocks = own.num_blocks

    def move(self, source: Slots, target: Slots) -> None:
        self.own.move(source, target)
        for stage in self._stages:
            stage.tell("move", source, target)

    def fill(self, slots: Slots, value: float) -> None:
        self.own.fill(slots, value)
        for stage in self._stages:
            stage.tell("fill", slots, more=[value])


class StagedStates:
    """The same slots and lanes in all stages; a stage without recurrent layers has none."""

    def __init__(self, own: Any, stages: list[RemoteStage], sizes: tuple[int, int, int]) -> None:
        self.own, self._stages = own, stages
        self.num_slots, self.num_lanes, self.num_nodes = sizes

    def _all(self, name: str, *arguments: Any) -> None:
        if self.own is not None:
            getattr(self.own, name)(*arguments)
        for stage in self._stages:
            stage.tell(f"state_{name}", more=arguments)

    def clear(self, slot: int) -> None:
        self._all("clear", slot)

    def copy(self, source: int, target: int) -> None:
        self._all("copy", source, target)

    def set_due(self, lane: int, due: bool) -> None:
        self._all("set_due", lane, due)

    def fold(self, slot: int, lane: int, path: Sequence[int]) -> None:
        self._all("fold", slot, lane, list(path))

    def fill(self, slots: Sequence[int], entries: Sequence[tuple[int, int]], value: float) -> None:
        self._all("fill", list(slots), [list(each) for each in entries], value)


class StagedOps:
    """A backend for one model whose first layers are here and whose others are in stages.

    Args:
        base: computes here, and of the same name in every stage.
        own: the first layers.
        config: the model's shape.
        addresses: of the stages; an empty one starts a process here.
        parts: the layers of this process and of each stage.
        greeting: what stages are told of the model and of the arithmetic.
    """

    def __init__(
        self,
        base: Ops,
        own: Decoder,
        config: ModelConfig,
        addresses: Sequence[str],
        parts: Sequence[range],
        greeting: Message,
    ) -> None:
        self._base, self._own, self._config = base, own, config
        self._addresses, self._parts, self._greeting = addresses, parts, greeting
        self._stages: list[RemoteStage] = []
        self.lose: Callable[[], set[int]] = set
        """Set by who owns the sequences."""
        self.micro_batching = MicroBatching(len(parts), base.name)
        if config.mlp.experts is not None:
            self.micro_batching.counts = ()  # each would read experts anew, which steps count once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def kv_memory(self, config: ModelConfig, num_blocks: int, dtype: str) -> StagedKV:
        own = self._base.kv_memory(self._own.config, num_blocks, dtype)
        return StagedKV(own, self._stages, dtype)

    def state_memory(
        self, config: ModelConfig, num_slots: int, num_lanes: int, num_nodes: int
    ) -> StagedStates:
        sizes, own = (num_slots, num_lanes, num_nodes), None
        if self._own.config.recurrent is not None:
            own = self._base.state_memory(self._own.config, *sizes)
        return StagedStates(own, self._stages, sizes)

    def close(self) -> None:
        """Let the stages go."""
        for stage in self._stages:
            stage.close()

    def forward(self, decoder: Decoder, memory: StagedKV, states: Any = None) -> StagedForward:
        """Connect to the stages; ``ConfigError`` where one cannot serve this model."""
        greeting = {
            **self._greeting,
            "num_blocks": memory.num_blocks,
            "kv_cache_dtype": memory.dtype,
        }
        if states is not None:
            greeting["states"] = [states.num_slots, states.num_lanes, states.num_nodes]
        try:
            for address, layers in zip(self._addresses, self._parts[1:], strict=True):
                self._stages.append(RemoteStage(address, layers, greeting))
        except (StageError, ConfigError) as error:
            self.close()
            raise ConfigError(str(error)) from error
        own = self._base.forward(self._own, memory.own, states and states.own)
        shape, lose = (self._parts[0], self._config), lambda: self.lose()
        return StagedForward(own, *shape, self._stages, lose, self.micro_batching)
