"""The statistics of an engine: its own counters, and those of its parts and requests."""

from __future__ import annotations

import copy
from typing import NamedTuple

from paceline.cache.model_runner import ModelRunner
from paceline.engine.drafting import Drafting
from paceline.engine.scheduler import Scheduler
from paceline.request.metrics import EngineStats


class Totals(NamedTuple):
    """The counters of an engine's parts since they were made, named as in the statistics."""

    num_target_forwards: int
    num_draft_forwards: int
    num_cached_tokens: int
    num_queried_tokens: int
    num_weight_bytes_read: int
    weight_wait_seconds: float


def from_disk(runner: ModelRunner) -> tuple[int, float]:
    """Bytes of weights that were read from disk so far, and seconds that forwards waited."""
    stream = runner.decoder.stream
    return (0, 0.0) if stream is None else (stream.bytes_read, stream.seconds_waited)


def totals(runner: ModelRunner, drafting: Drafting, queue: Scheduler) -> Totals:
    return Totals(
        runner.num_forwards,
        drafting.num_forwards,
        queue.num_cached_tokens,
        queue.num_queried_tokens,
        *from_disk(runner),
    )


def snapshot(
    stats: EngineStats, since: Totals, runner: ModelRunner, drafting: Drafting, queue: Scheduler
) -> EngineStats:
    """A copy of the counters; those of the parts count from the last reset, ``since``."""
    copied = copy.deepcopy(stats)
    for request in (*queue.running, *queue.waiting):
        copied.speculation.add(request.counters)
    for name, total, before in zip(
        Totals._fields, totals(runner, drafting, queue), since, strict=True
    ):
        setattr(copied, name, total - before)
    copied.num_running = len(queue.running)
    copied.num_waiting = len(queue.waiting)
    copied.kv_blocks_total = runner.kv.pool.num_blocks - 1
    copied.kv_blocks_used = runner.kv.num_used
    return copied
