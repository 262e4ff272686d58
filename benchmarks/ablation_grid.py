"""What ablations are measured on: replays, and machines that exist in numbers only.

The replays are a fixed part of the grid of ``never_slower_replayed.py``, with the tables of saved
results and published curves of a GPU and of an M1 Ultra: 12 prompts each, so that 12 is the largest
batch. They are deterministic, so a difference is one; what chance there is lies in the choice of
prompts. In the simulated machines of ``tests/planner/machine.py`` the cost model learns, from times
that are noisy, that change, or that its table has wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

from harness import ROOT
from never_slower_replayed import Costs, answers, ours_of, saved
from prompt_sets import DESCRIPTIONS, data_folder, load_prompts
from trace_sets import FOLDER, MAX_MODEL_LEN

from paceline.api.llm import embedded_model
from paceline.config import EngineConfig, Objective
from paceline.planner.cost_table import CostTable
from paceline.planner.planner import PLANNERS
from paceline.planner.value import DraftTime
from paceline.profiling.profile_store import import_tables
from paceline_lab.simulate.replay import ReplayResult
from paceline_lab.simulate.setup import open_simulator
from paceline_lab.simulate.simulator import Simulator

sys.path.insert(0, str(ROOT))
from tests.planner.machine import DRAFT, Machine, cost_table, request

NUM_PROMPTS = 12
BATCHES = {0.0: (1, 4, 12), 0.8: (4,), 1.3: (1, 12)}
"""By temperature: requests at a time."""
RESULTS = ROOT / "benchmarks" / "results"
SAVED = {
    "Xeon AMX": "intel-xeon-processor-with-amx-2-cores",
    "EPYC": "amd-epyc-zen-3-2-cores",
}
CURVES = {"RTX 5000": "RTX 5000 Ada, batched", "M1 Ultra": "M1 Ultra"}
"""Names of machines, and what the names of their curves hold."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What a machine's steps cost. Without ``draft`` nothing is known of a draft model there."""

    name: str
    target: CostTable
    draft: CostTable | None


def published(path: Path) -> list[Curve]:
    """The curves of a file, each with its draft model's."""
    tables = {found.name: found for found in import_tables(path)}
    drafts = {name: tables.pop(f"{name}: draft", None) for name in list(tables)}
    return [Curve(name, found, drafts[name]) for name, found in tables.items()]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cell came to.

    Attributes:
        speed: tokens per millisecond.
        slowest: the same of the request that got fewest, over the whole steps that it was in.
    """

    speed: float
    slowest: float


# --- replays --------------------------------------------------------------------------------------


@cache
def machines() -> dict[str, Costs]:
    found = {}
    for name, folder in SAVED.items():
        file = RESULTS / folder / "never_slower_replayed.json"
        found |= {f"{name}, {pair}": saved(pair, file) for pair in ("embedded", "inflated")}
    for curve in published(data_folder() / "cost_curves.json"):
        for name, part in CURVES.items():
            if part in curve.name and curve.draft is not None:
                found[name] = Costs(curve.target, curve.draft, ours_of("inflated"))
    return found


def replays() -> Iterator[tuple[str, Simulator, Costs]]:
    """Every cell: its name, its simulator and who drafts."""
    source = load_prompts("public")
    config = EngineConfig(max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    draft = embedded_model("draft")
    wanted = [each for costs in machines().values() for each in costs.ours if each.needs_forwards]
    for workload in DESCRIPTIONS:
        for temperature, batches in BATCHES.items():
            if (workload == "hostile") != (temperature > 1.0):
                continue
            folder = answers(source, workload, temperature, NUM_PROMPTS, FOLDER)
            base = open_simulator(folder, embedded_model("target"), config, wanted).simulator
            for name, costs in machines().items():
                for batch in batches:
                    if (workload == "mixture" and batch == 1) or (name in CURVES and batch > 4):
                        continue
                    yield (
                        f"{name}: {workload}, {batch}, {temperature:g}",
                        replace(
                            base,
                            table=costs.target,
                            draft_tables={draft: costs.draft},
                            config=replace(base.config, max_num_seqs=batch),
                        ),
                        costs,
                    )


def replayed(result: ReplayResult) -> Figures:
    slowest = min(sum(each.emitted) / each.wall_ms for each in result.traces)
    return Figures(result.total("num_emitted_tokens") / result.ms, slowest)


def run_replays(plain: bool) -> dict[str, Figures]:
    """By cell; what plain decoding makes of it, or our planner."""
    return {
        name: replayed(each.plain() if plain else each.run(costs.ours, PLANNERS["auto"]))
        for name, each, costs in replays()
    }


# --- simulated machines ---------------------------------------------------------------------------

WIDE = [10.0 + 0.1 * width for width in range(600)]
"""Milliseconds of steps of 1, 2, 3, ... rows: where width is cheap, dear, and has a cliff."""
STEEP = [10.0 + 3.0 * width for width in range(600)]
CLIFF = [10.0 + 0.2 * width + 20.0 * (width >= 8) for width in range(600)]
NOISE = 0.06
STEPS = 1200
SEEDS = range(3)
Times = Callable[[int, int], float]
Right = Callable[[int, int], float]


class Clock(Sequence[float]):
    """What steps take: a curve that changes with the steps that pass, and noise."""

    def __init__(self, times: Times, seed: int) -> None:
        self._times, self._random, self.step = times, random.Random(seed + 99), 0

    def __len__(self) -> int:
        return 600

    def __getitem__(self, at: Any) -> Any:
        return self._times(self.step, at + 1) * exp(self._random.gauss(0.0, NOISE))


@dataclass(frozen=True, slots=True)
class Scene:
    """A machine and a text.

    Attributes:
        believed: the table that was measured; None where there is none.
        times: by steps that have passed and rows, what a step takes.
        right: by request and steps that have passed, how likely a drafted token is right.
    """

    believed: Sequence[float] | None
    times: Times
    right: Right
    requests: int = 1
    draft_ms: float = 0.5
    objective: Objective | None = None


def scenes() -> dict[str, Scene]:
    def good(index: int, step: int) -> float:
        return 0.85

    def fair(index: int, step: int) -> float:
        return 0.6

    def turning(index: int, step: int) -> float:
        return 0.9 if step // 300 % 2 else 0.05

    def uneven(index: int, step: int) -> float:
        return 0.9 if index % 2 else 0.1

    def of(curve: Sequence[float]) -> Times:
        return lambda step, rows: curve[rows - 1]

    def slowed(curve: Sequence[float]) -> Times:
        return lambda step, rows: curve[rows - 1] * (2.0 if step // 300 % 2 else 1.0)

    def narrowed(curve: Sequence[float]) -> Times:
        return lambda step, rows: (
            curve[rows - 1] * (1.0 + min(rows - 1, 15) / 7.5 if step // 300 % 2 else 1.0)
        )

    return {
        "true table, cheap": Scene(WIDE, of(WIDE), good),
        "true table, dear": Scene(STEEP, of(STEEP), good),
        "true table, cliff": Scene(CLIFF, of(CLIFF), good),
        "true table, poor drafts": Scene(WIDE, of(WIDE), lambda *_: 0.05),
        "text that turns": Scene(WIDE, of(WIDE), turning),
        "text that turns, 4": Scene(WIDE, of(WIDE), turning, 4),
        "uneven requests, 4": Scene(STEEP, of(STEEP), uneven, 4),
        "uneven requests, cheap, 4": Scene(WIDE, of(WIDE), uneven, 4),
        "no profile, cheap": Scene(None, of(WIDE), good),
        "no profile, dear": Scene(None, of(STEEP), good),
        "no profile, fair, 4": Scene(None, of(STEEP), fair, 4),
        "believed dear": Scene(STEEP, of(WIDE), good),
        "believed dear, 4": Scene(STEEP, of(WIDE), good, 4),
        "believed cheap": Scene(WIDE, of(STEEP), fair),
        "believed cheap, 4": Scene(WIDE, of(STEEP), fair, 4),
        "all slower at times": Scene(WIDE, slowed(WIDE), good),
        "width dearer at times": Scene(WIDE, narrowed(WIDE), fair),
        "width dearer at times, 4": Scene(WIDE, narrowed(WIDE), fair, 4),
        "cliff unknown": Scene(WIDE, of(CLIFF), good),
        "time per token, 4": Scene(STEEP, of(STEEP), uneven, 4, objective=Objective("tpot", 20.0)),
        "latency, 4": Scene(STEEP, of(STEEP), uneven, 4, objective=Objective("latency")),
    }


def run_scene(scene: Scene, seed: int) -> Figures:
    table = cost_table(scene.believed) if scene.believed else None
    clock = Clock(scene.times, seed)
    machine = Machine(
        clock,
        (DRAFT,),
        DraftTime(scene.draft_ms, scene.draft_ms / 2),
        seed=seed,
        learns=True,
        table=table or cost_table(WIDE),
        has_profile=table is not None,
        objective=scene.objective,
    )
    requests = [request(i) for i in range(scene.requests)]
    emitted = [0] * scene.requests
    for clock.step in range(STEPS):
        found = machine.run(requests, lambda each: scene.right(each.request_id, clock.step), 1)
        for index, count in found.items():
            emitted[index] += count
    return Figures(sum(emitted) / machine.milliseconds, min(emitted) / machine.milliseconds)


def plain_scene(scene: Scene) -> Figures:
    """Plain decoding of as many steps."""
    milliseconds = sum(scene.times(step, scene.requests) for step in range(STEPS))
    milliseconds *= exp(NOISE * NOISE / 2)
    return Figures(scene.requests * STEPS / milliseconds, STEPS / milliseconds)


def run_scenes(plain: bool) -> dict[str, Figures]:
    """By scene and seed; of plain decoding, or of our planner."""
    return {
        f"simulated: {name}, seed {seed}": plain_scene(each) if plain else run_scene(each, seed)
        for name, each in scenes().items()
        for seed in SEEDS
    }
