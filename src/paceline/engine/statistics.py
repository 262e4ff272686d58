"""The statistics of an engine: what it counts itself, and the counters of its parts.

Those of the parts never go back; the statistics count from the latest reset.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from paceline.cache.model_runner import ModelRunner
from paceline.engine.drafting import Drafting
from paceline.engine.scheduler import Scheduler
from paceline.planner.cost_table import StepShape
from paceline.request.engine_stats import EngineStats
from paceline.request.request import MAX_UNCOUNTED, FinishReason, Request
from paceline.request.span import DraftTree


class Totals(NamedTuple):
    """The counters of an engine's parts since they were made, named as in the statistics."""

    num_target_forwards: int
    num_draft_forwards: int
    num_cached_tokens: int
    num_queried_tokens: int
    num_weight_bytes_read: int
    weight_wait_seconds: float


class Statistics:
    """Counts for one engine.

    Args:
        counted: what the engine and its parts count as they go.
    """

    def __init__(
        self, counted: EngineStats, runner: ModelRunner, drafting: Drafting, scheduler: Scheduler
    ) -> None:
        self._counted = counted
        self._runner, self._drafting, self._scheduler = runner, drafting, scheduler
        self._before = self._totals()
        self._drafts: list[DraftTree] = []
        self._forwards: list[StepShape] = []

    def _totals(self) -> Totals:
        queue = self._scheduler
        return Totals(
            self._runner.num_forwards,
            self._drafting.num_forwards,
            queue.num_cached_tokens,
            queue.num_queried_tokens,
            *from_disk(self._runner),
        )

    def count_draft(self, draft: DraftTree) -> None:
        """Count a draft that is to be verified, with the next forward."""
        self._drafts.append(draft)

    def count_forward(self, shape: StepShape) -> None:
        """Count a forward of the target."""
        self._forwards.append(shape)
        if len(self._forwards) == MAX_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        """Take what was only kept into the counters."""
        counted = self._counted
        for draft in self._drafts:
            counted.expected_accepted_tokens += sum(draft.path_probs())
        for shape in self._forwards:
            counted.num_rows += shape.rows
            counted.num_experts_read += shape.experts
            counted.num_experts_fetched += shape.fetched
            if shape.rows == shape.samples:  # no prefill chunk, whose rows are not sampled
                by_rows = counted.decode_steps_by_rows
                by_rows[shape.rows] = by_rows.get(shape.rows, 0) + 1
        self._drafts.clear()
        self._forwards.clear()

    def count_end(self, request: Request, reason: FinishReason) -> None:
        """Count a request that ended."""
        counted = self._counted
        counted.speculation.add(request.counters)
        counted.num_finished += 1
        counted.num_failed_requests += reason is FinishReason.ERROR

    def snapshot(self) -> EngineStats:
        """A copy of the counters, those of requests that have not ended included."""
        self._count()
        queue, kv = self._scheduler, self._runner.kv
        copied = copy.deepcopy(self._counted)
        for request in (*queue.running, *queue.waiting):
            copied.speculation.add(request.counters)
        for name, total, before in zip(Totals._fields, self._totals(), self._before, strict=True):
            setattr(copied, name, total - before)
        copied.num_running = len(queue.running)
        copied.num_waiting = len(queue.waiting)
        copied.kv_blocks_total = kv.pool.num_blocks - 1
        copied.kv_blocks_used = kv.num_used
        return copied

    def reset(self) -> None:
        """Count from zero again."""
        self._count()
        self._counted.clear()
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            self._counted.speculation.add(request.counters, -1)
        self._before = self._totals()


def from_disk(runner: ModelRunner) -> tuple[int, float]:
    """Bytes of weights that were read from disk so far, and seconds that forwards waited."""
    stream = runner.decoder.stream
    return (0, 0.0) if stream is None else (stream.bytes_read, stream.seconds_waited)
