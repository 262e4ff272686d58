"""A backend whose layers lie in stages: its memory and its forwards, which go through all of them.

Owns what the stages are told and when they are lost. Knows no requests but by their numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np

from paceline.errors import ConfigError, StageError
from paceline.models.adapter import AdaptedLayers
from paceline.models.arrays import Array, Floats
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.ops.base import Forward, KVMemory, Ops, Slots, StateSpan
from paceline.models.taps import Taps
from paceline.runtime.stages.link import Message
from paceline.runtime.stages.remote import RemoteStage
from paceline.span import Span

log = logging.getLogger(__name__)


def split(config: ModelConfig, count: int) -> list[range]:
    """Which layers each of some stages has, the engine's own first.

    Raises:
        ConfigError: the model has too few, or layers that read more than the residual stream.
    """
    layers = config.num_layers
    if not 1 <= count <= layers:
        raise ConfigError(
            f"pipeline_parallel_size is {count}; allowed are 1 to {layers}, the model's layers"
        )
    ends = [layers * index // count for index in range(count + 1)]
    parts = [range(a, b) for a, b in pairwise(ends)]
    apart = any(config.kv_layer(i) < part.start for part in parts for i in part)
    if count > 1 and (config.layer_inputs or config.altup or config.entry or apart):
        raise ConfigError(
            f"layers of {config.architecture} read more than the residual stream, which is all "
            "that stages hand on: leave pipeline_parallel_size away"
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


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch of the engine's own layers, and where each span's logits begin."""

    own: Any
    num_rows: int
    sample_offsets: Sequence[int]


class StagedForward:
    """See :class:`~paceline.models.ops.base.Forward`.

    Args:
        own: over the engine's own layers.
        lose: is told that a stage has forgotten everything, and returns the numbers of the requests
            that had something there.
    """

    grows_trees = False

    def __init__(
        self,
        own: Forward,
        layers: range,
        config: ModelConfig,
        stages: Sequence[RemoteStage],
        lose: Callable[[], set[int]],
    ) -> None:
        self._own, self._layers, self._config, self._stages = own, layers, config, stages
        self._lose, self._broken = lose, set[int]()
        self._has_states = config.stage(0, layers.stop).recurrent is not None
        self.experts_read = self.experts_fetched = 0

    @property
    def chosen_experts(self) -> NoReturn:
        raise ConfigError("which experts were chosen is not known where layers are in stages")

    def pack(
        self,
        spans: Sequence[Span],
        block_tables: Sequence[Sequence[int]],
        states: Sequence[StateSpan] = (),
        adapters: Sequence[Any] = (),
    ) -> StagedBatch:
        assert not any(adapters), "no adapter can be prepared"
        self._mend()
        self._broken -= {span.request_id for span in spans if not span.start}  # they begin anew
        if self._broken.intersection(span.request_id for span in spans):
            raise StageError("a stage was lost that had read a part of this request")
        described = [[list(x) if isinstance(x, Sequence) else x for x in span] for span in spans]
        where = [(*s[:3], list(s.path), s.certain) for s in states]
        more = [described, [list(table) for table in block_tables], where]
        for stage in self._stages:
            stage.tell("pack", more=more)
        unsampled = [span._replace(sample_rows=()) for span in spans]
        own = self._own.pack(unsampled, block_tables, states if self._has_states else ())
        offsets = [0, *accumulate(len(span.sample_rows) for span in spans)]
        return StagedBatch(own, own.num_rows, offsets)

    def adapter(self, layers: AdaptedLayers) -> NoReturn:
        raise ConfigError("adapters (--lora) are not divided among stages: leave one of them away")

    def _mend(self) -> None:
        """Find lost stages again, which then know nothing of what there was."""
        lost = [stage for stage in self._stages if stage.is_lost]
        for stage in lost:
            stage.connect()
            log.warning("%s is back; what it knew is lost", stage)
        if lost:
            self._broken = self._lose()

    def logits(self, batch: StagedBatch, taps: Taps, inputs: Floats | None) -> Floats:
        logits: Floats = self._run(batch, taps, greedy=False)
        return logits

    def greedy(self, batch: StagedBatch, taps: Taps, inputs: Floats | None) -> list[int]:
        tokens: list[int] = self._run(batch, taps, greedy=True).tolist()
        return tokens

    def _run(self, batch: StagedBatch, taps: Taps, greedy: bool) -> Array:
        c, stop = self._config, self._layers.stop
        own = tuple(tap for tap in taps.layers if tap < stop)
        made = Taps.of((*own, stop), batch.num_rows, stop, c.hidden_size)
        self._own.logits(batch.own, made, None)
        found = dict(zip(own, made.features.swapaxes(0, 1), strict=False))
        x, said = made.features[:, -1], np.empty(0)
        self.experts_read = self._own.experts_read
        self.experts_fetched = self._own.experts_fetched
        for stage in self._stages:
            layers, is_last = stage.layers, stage is self._stages[-1]
            end = c.num_layers + 2 if is_last else layers.stop
            asked = [tap for tap in taps.layers if layers.start <= tap < end]
            local = [tap - layers.start for tap in asked]
            if not is_last:
                local.append(len(layers))
            stage.start(x, local, greedy)
            reply, (said, features) = stage.result()
            found |= zip(asked, features.swapaxes(0, 1), strict=False)
            x = features[:, -1] if not is_last else x
            self.experts_read += reply["experts"][0]
            self.experts_fetched += reply["experts"][1]
        for index, tap in enumerate(taps.layers):
            taps.features[:, index] = found[tap]
        return said

    def write_kv(self, batch: Any, inputs: Floats) -> NoReturn:
        raise NotImplementedError("blocks are no models in stages")

    def grow(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("trees do not grow in stages")


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
        """Connect to the stages.

        Raises:
            ConfigError: one is not there, or cannot serve this model.
        """
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
        return StagedForward(own, self._parts[0], self._config, self._stages, lambda: self.lose())
