"""Measuring many things on a machine with moods: shuffled rounds, medians, a time budget.

Every round measures everything once, in an order of its own, so that a slow minute hits all of them
alike. Owns the order and the statistics; knows nothing of what is measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

ENOUGH_ROUNDS = 9
"""Made even where the budget is spent sooner, unless it is spent many times over."""
LEAST_ROUNDS = 3
PATIENCE = 10
"""So many budgets may be spent on enough rounds."""

WARM_SECONDS = 0.005
"""In which a task has found its pace: repeated for so long, its next time counts."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure.

    Attributes:
        run: does it once and returns the seconds that count.
        every: takes part in one of so many rounds; more than 1 for what takes long.
    """

    run: Callable[[], float]
    every: int = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one task: median, range of the middle half, and number of measurements."""

    ms: float
    spread: float
    count: int


def measure(
    tasks: Mapping[Key, Task],
    budget_seconds: float,
    advance: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> dict[Key, Timing]:
    """Measure tasks in shuffled rounds after one round of warm-up, which does not count.

    Args:
        budget_seconds: above 0; rounds go on for so long, and see :data:`ENOUGH_ROUNDS`.
        advance: told the share that is done, from 0 to 1.
        clock: seconds.
        seed: of the order.
    """
    order = list(tasks)
    shuffle = random.Random(seed).shuffle
    samples: dict[Key, list[float]] = {key: [] for key in tasks}
    began = clock()
    for key in order:
        tasks[key].run()
    rounds, spent = 0, 0.0
    while spent < 1.0 or rounds < (ENOUGH_ROUNDS if spent < PATIENCE else LEAST_ROUNDS):
        shuffle(order)
        for key in order:
            if rounds % tasks[key].every == 0:
                samples[key].append(_warm(tasks[key]) * 1e3)
        rounds += 1
        spent = (clock() - began) / budget_seconds
        advance(min(1.0, rounds / ENOUGH_ROUNDS, spent))
    return {key: _timing(values) for key, values in samples.items()}


def _warm(task: Task) -> float:
    """Seconds of a task that follows on itself, as the steps of a decoding engine do.

    After another task a small model's weights are no longer in the caches, and threads may sleep.
    The time that completes the warm-up is none to take: it is more likely to be a long one.
    """
    seconds = spent = task.run()
    if spent >= WARM_SECONDS:
        return seconds
    while spent < WARM_SECONDS:
        spent += task.run()
    return task.run()


def _timing(values: list[float]) -> Timing:
    if len(values) < 2:
        return Timing(values[0], 0.0, len(values))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(middle, high - low, len(values))
