"""The statistics of an engine: its own counters, and those of its parts and requests."""

from __future__ import annotations

import copy
from typing import NamedTuple

from paceline.engine.drafting import Drafting
from paceline.engine.scheduler import Scheduler
from paceline.metrics import EngineStats
from paceline.runtime.model_runner import ModelRunner


class Totals(NamedTuple):
    """The counters of an engine's parts since they were made, named as in the statistics."""

    num_target_forwards: int
    num_draft_forwards: int
    num_cached_tokens: int
    num_queried_tokens: int


def totals(runner: ModelRunner, drafting: Drafting, queue: Scheduler) -> Totals:
    drafts = drafting.num_forwards
    return Totals(runner.num_forwards, drafts, queue.num_cached_tokens, queue.num_queried_tokens)


def snapshot(
    stats: EngineStats, since: Totals, runner: ModelRunner, drafting: Drafting, queue: Scheduler
) -> EngineStats:
    """A copy of the counters; those of the parts count from the last reset, ``since``.

    Args:
        stats: with what is to be added to the speculation of the requests that did not end yet.
    """
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
    copied.kv_blocks_used = runner.kv.pool.num_used
    return copied
