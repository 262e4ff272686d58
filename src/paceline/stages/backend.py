"""A backend whose layers lie in stages: how they are divided, their memory, and whole forwards.

Owns what is sent to stages about memory and a step, and when they are lost. Knows requests by
their numbers alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NoReturn

import numpy as np

from paceline.core.errors import ConfigError, StageError
from paceline.models.backend import AdaptedLayers, Forward, KVMemory, Ops, Slots, StateSpan, Taps
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.request.span import Span
from paceline.stages.link import Journey, Message, RemoteStage
from paceline.stages.micro_batches import MicroBatch, MicroBatching
from paceline.tensors.arrays import Array, Floats


def split(config: ModelConfig, count: int) -> list[range]:
    """Which layers each of some stages has, the engine's own first.

    Raises:
        ConfigError: the model has too few, or layers that read more than the residual stream.
    """
    layers = config.num_layers
    if not 1 <= count <= layers:
        raise ConfigError.of(
            "pipeline_parallel_size", f"is {count}; allowed: 1 to {layers}, the model's layers"
        )
    ends = [layers * index // count for index in range(count + 1)]
    parts = [range(a, b) for a, b in pairwise(ends)]
    apart = any(config.attention.kv_layer(i) < part.start for part in parts for i in part)
    if count > 1 and (config.layer_inputs or config.altup or config.entry.kind or apart):
        raise ConfigError(
            f"layers of {config.architecture} read more than the residual stream, which is all "
            "that stages hand on: leave pipeline_parallel_size out",
            "pipeline_parallel_size",
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

    def lent(self, layers: Sequence[int]) -> NoReturn:
        raise ConfigError(
            "a draft that reads the target's keys and values needs them in one process: leave "
            "pipeline_parallel_size out, or draft otherwise"
        )


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
        greeting: the model and the arithmetic, for the stages.
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
            raise ConfigError(str(error), error.param) from error
        own = self._base.forward(self._own, memory.own, states and states.own)
        shape, lose = (self._parts[0], self._config), lambda: self.lose()
        return StagedForward(own, *shape, self._stages, lose, self.micro_batching)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A step in micro-batches.

    Attributes:
        began: when it was packed, in seconds.
        cut: the spans' rows that each micro-batch has.
        own: of each, the batch of the engine's own layers.
        sample_offsets: where each span's logits begin.
    """

    began: float
    cut: Sequence[MicroBatch]
    own: Sequence[Any]
    num_rows: int
    sample_offsets: Sequence[int]


def of_span(
    span: Span, where: StateSpan | None, first: int, last: int
) -> tuple[Span, StateSpan | None]:
    """Some rows of a span, as a span behind those before them; a tree only where it has no states.

    What is certain goes on in the state in which the rows before have left it.
    """
    if last - first == len(span.token_ids):
        return span, where
    if not span.is_chain:
        assert where is None, "no forward leaves a state in the middle of a tree"
        sampled = [node for node in span.sample_rows if first <= node < last]
        tokens, parents = span.token_ids[:last], span.parents[:last]
        return span._replace(
            token_ids=tokens, parents=parents, sample_rows=sampled, num_cached=first
        ), None
    sampled = [node - first for node in span.sample_rows if first <= node < last]
    tokens, start = span.token_ids[first:last], span.start + first
    rows = Span(span.request_id, start, tokens, range(-1, last - first - 1), sampled)
    if where is not None and first:
        where = where._replace(read=where.write, path=())
    if where is not None:
        where = where._replace(certain=min(where.certain, last) - first)
    return rows, where


class StagedForward:
    """See :class:`~paceline.models.backend.Forward`.

    Args:
        own: over the engine's own layers.
        lose: called when a stage has forgotten everything; returns the numbers of the requests
            that had something there.
        micro_batching: into what steps are cut.
    """

    grows_trees = False

    def __init__(
        self,
        own: Forward,
        layers: range,
        config: ModelConfig,
        stages: Sequence[RemoteStage],
        lose: Callable[[], set[int]],
        micro_batching: MicroBatching,
    ) -> None:
        self._own, self._layers, self._config, self._stages = own, layers, config, stages
        self._lose, self._broken, self._micro_batching = lose, set[int](), micro_batching
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
        began, rows = time.perf_counter(), [len(span.token_ids) for span in spans]
        limits = [where.certain for where in states] if states else rows
        cut = self._micro_batching.choose(rows, limits)
        own, packed = list[Any](), list[Any]()
        for each in cut:
            tables = [list(block_tables[index]) for index, _, _ in each]
            pieces = [of_span(spans[i], states[i] if states else None, *at) for i, *at in each]
            inside = [span for span, _ in pieces]
            where = [state for _, state in pieces if state is not None]
            packed.append([list(map(_plain, inside)), tables, list(map(_plain, where))])
            unsampled = [span._replace(sample_rows=()) for span in inside]
            own.append(self._own.pack(unsampled, tables, where if self._has_states else ()))
        for stage in self._stages:
            stage.tell("pack", more=packed)
        offsets = [0, *accumulate(len(span.sample_rows) for span in spans)]
        return StagedBatch(began, cut, own, sum(rows), offsets)

    def adapter(self, layers: AdaptedLayers) -> NoReturn:
        raise ConfigError("adapters (--lora) are not divided among stages: leave one of them out")

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
        asked, own = self._asked(taps.layers), list[Floats]()
        layers = [self._layers, *(stage.layers for stage in self._stages)]
        local = [
            [tap - each.start for tap in wanted] for each, wanted in zip(layers, asked, strict=True)
        ]
        for each, wanted in zip(layers[:-1], local, strict=False):
            wanted.append(len(each))  # what the next stage reads
        self.experts_read = self.experts_fetched = 0
        journey = Journey(self._stages, local[1:], greedy)
        journey.run(self._first_rows(batch, local[0], own), overlaps=len(batch.cut) > 1)
        features = [own, *([arrays[1] for _, arrays in each] for each in journey.answers)]
        found = {
            tap: [x[:, column] for x in made]
            for wanted, made in zip(asked, features, strict=True)
            for column, tap in enumerate(wanted)
        }
        for index, tap in enumerate(taps.layers):
            taps.features[:, index] = _joined(found[tap])
        for reply, _ in chain.from_iterable(journey.answers):
            self._count(*reply["experts"])
        said = _joined([arrays[0] for _, arrays in journey.answers[-1]])
        took_ms = (time.perf_counter() - batch.began) * 1e3
        self._micro_batching.observe(batch.cut, took_ms)
        return said

    def _asked(self, taps: Sequence[int]) -> list[list[int]]:
        """Which of the taps every stage has, the engine's own layers first."""
        ends = [self._layers.stop, *(stage.layers.stop for stage in self._stages)]
        ends[-1] += 2  # behind the last layer, and behind the norm
        return [[tap for tap in taps if a <= tap < b] for a, b in pairwise([0, *ends])]

    def _first_rows(
        self, batch: StagedBatch, taps: Sequence[int], features: list[Floats]
    ) -> Iterator[Floats]:
        """What leaves the engine's own layers, by micro-batch; ``features`` gets what they tap."""
        for own in batch.own:
            count = self._layers.stop
            made = Taps.of(taps, own.num_rows, count, self._config.hidden_size)
            self._own.logits(own, made, None)
            features.append(made.features)
            self._count(self._own.experts_read, self._own.experts_fetched)
            yield made.features[:, -1]

    def _count(self, read: int, fetched: int) -> None:
        self.experts_read += read
        self.experts_fetched += fetched

    def write_kv(self, batch: Any, inputs: Floats) -> NoReturn:
        raise NotImplementedError("blocks are no models in stages")

    def grow(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("trees do not grow in stages")


def _plain(named: Sequence[Any]) -> list[Any]:
    """A span, or where its states are, as a message has it."""
    return [list(each) if isinstance(each, Sequence) else each for each in named]


def _joined(rows: Sequence[Array]) -> Array:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)
