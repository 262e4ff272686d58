"""Forwards that go through all stages. Owns what stages are told of a step, and when they are lost.

Knows no requests but by their numbers.
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
from paceline.models.backend import AdaptedLayers, Forward, StateSpan, Taps
from paceline.models.config import ModelConfig
from paceline.planner.micro_batches import MicroBatch, MicroBatching
from paceline.request.span import Span
from paceline.stages.journey import Journey
from paceline.stages.remote import RemoteStage
from paceline.tensors.arrays import Array, Floats

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
        lose: is told that a stage has forgotten everything, and returns the numbers of the requests
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
        own, told = list[Any](), list[Any]()
        for each in cut:
            tables = [list(block_tables[index]) for index, _, _ in each]
            pieces = [of_span(spans[i], states[i] if states else None, *at) for i, *at in each]
            inside = [span for span, _ in pieces]
            where = [state for _, state in pieces if state is not None]
            told.append([list(map(_plain, inside)), tables, list(map(_plain, where))])
            unsampled = [span._replace(sample_rows=()) for span in inside]
            own.append(self._own.pack(unsampled, tables, where if self._has_states else ()))
        for stage in self._stages:
            stage.tell("pack", more=told)
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
