"""The search among the settings that ``paceline tune`` tries.

Settings are grouped by who drafts, node budget and planner. Within each group the better half goes
on from every round to the next, in which twice as many traces are replayed (successive halving:
Karnin, Koren and Somekh, 2013), so every node budget ends with its best shape, replayed in full.
Knows no files and no tables.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from paceline.config import SpeculativeConfig
from paceline.engine.planners import PLANNERS
from paceline.workbench.drafts_store import DraftsKey, RecordedDrafts
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import Simulator
from paceline.workbench.tune_candidates import Candidate

STRIDES = (8, 4, 2, 1)
"""Each round replays one in so many traces."""
LEAST_TRACES = 4
"""Of a round; with fewer, the first rounds are left out."""

Clock = Callable[[], float]


@dataclass(slots=True)
class Found:
    """What a search ended with.

    Attributes:
        results: of those that were replayed in full.
        num_left_out: that there was no time for, in one round or another.
    """

    results: dict[Candidate, ReplayResult]
    num_left_out: int = 0


def search(
    simulator: Simulator,
    candidates: Sequence[Candidate],
    until: float,
    clock: Clock = time.perf_counter,
) -> Found:
    """The best candidate of every group, replayed on all traces.

    Args:
        until: by ``clock``. Each round gets an equal share of what is left, and replays at least
            one candidate.
    """
    alive = list(candidates)
    random.Random(0).shuffle(alive)  # what there is no time for is then not of one kind
    strides = [s for s in STRIDES if s == 1 or _fits(simulator, s)]
    found = Found({})
    for index, stride in enumerate(strides):
        now, rounds = clock(), len(strides) - index
        part = every(simulator, stride)
        found.results = _replayed(part, alive, now + (until - now) / rounds, clock)
        found.num_left_out += len(alive) - len(found.results)
        alive = _survivors(found.results, to_one=rounds == 2)
    return found


def _fits(simulator: Simulator, stride: int) -> bool:
    least = max(LEAST_TRACES, simulator.config.max_num_seqs)
    return len(simulator.traces) // stride >= least


def _replayed(
    simulator: Simulator, candidates: Sequence[Candidate], until: float, clock: Clock
) -> dict[Candidate, ReplayResult]:
    results: dict[Candidate, ReplayResult] = {}
    for candidate in candidates:
        if results and clock() > until:
            break
        results[candidate] = simulator.run(candidate.configs, PLANNERS[candidate.planner])
    return results


def _survivors(results: Mapping[Candidate, ReplayResult], to_one: bool) -> list[Candidate]:
    """The better half of each group, or its best one; the best of all first."""
    groups: dict[tuple[str, int, str], list[Candidate]] = {}
    ranked = sorted(results, key=lambda candidate: (results[candidate].ms, candidate.size))
    for candidate in ranked:
        groups.setdefault(candidate.group, []).append(candidate)
    kept = {
        candidate
        for group in groups.values()
        for candidate in group[: 1 if to_one else ceil(len(group) / 2)]
    }
    return [candidate for candidate in ranked if candidate in kept]


# --- a part of the traces ------------------------------------------------------------------------


def every(simulator: Simulator, stride: int) -> Simulator:
    """The simulator of one in so many of the traces."""
    if stride == 1:
        return simulator
    chosen = range(0, len(simulator.traces), stride)
    known: dict[DraftsKey, RecordedDrafts] = {}

    def drafts(config: SpeculativeConfig) -> RecordedDrafts:
        recorded = simulator.drafts(config)
        if recorded.key not in known:
            known[recorded.key] = _taken(recorded, chosen)
        return known[recorded.key]

    traces = [simulator.traces[index] for index in chosen]
    return replace(simulator, traces=traces, drafts=drafts)


def _taken(drafts: RecordedDrafts, chosen: Sequence[int]) -> RecordedDrafts:
    """What was recorded of some traces, named in ascending order."""
    positions, counts = drafts.positions, np.diff(drafts.offsets)
    kept = np.zeros(len(counts), bool)
    for index in chosen:
        kept[positions[index] : positions[index + 1]] = True
    nodes = np.repeat(kept, counts)
    return replace(
        drafts,
        positions=np.cumsum([0, *np.diff(positions)[list(chosen)]], dtype=np.int64),
        offsets=np.cumsum([0, *counts[kept]], dtype=np.int64),
        token_ids=drafts.token_ids[nodes],
        parents=drafts.parents[nodes],
        accept_probs=drafts.accept_probs[nodes],
    )
