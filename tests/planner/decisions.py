"""What the planner decides while saved answers are replayed, as digests that can be compared.

The answers are a real model's. Machines, draft model and times are made up, from seeds: each cell
is a machine, a number of requests and what they wish for.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from paceline.config import Objective, SpeculativeConfig
from paceline.planner.cost import CostModel, prior_table
from paceline.planner.cost_table import (
    NO_HOST_TIME,
    CostPoint,
    CostTable,
    ExpertCost,
    HostTime,
    StepShape,
)
from paceline.planner.drafts import DraftLimits, Drafts
from paceline.planner.planner import CostAwarePlanner, FixedPlanner, Planner, new_drafts
from paceline.planner.value import DraftingCost, DraftTime, Source
from paceline.proposers import build_proposers
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.request import Adapter, Request
from paceline.request.sampling_params import SpeculativeParams
from paceline.request.span import DraftTree
from paceline.request.traces import UNION_ROWS, Trace
from paceline_lab.simulate.replay import replay
from paceline_lab.simulate.simulator import ANY_TARGET
from paceline_lab.trace.experts import ExpertUnions
from tests.lab.toy_traces import make_meta, make_trace

ANSWERS = Path(__file__).parents[2] / "benchmarks" / "data" / "smollm2-answers-2.jsonl.gz"
KNOWN = Path(__file__).with_name("decisions.json")
FEW, MANY = 4, 60
"""Answers that every cell replays, quickly or thoroughly."""
MOST_TOKENS = 160
TIMES = {
    "prompt_lookup + suffix": DraftTime(0.03),
    "prompt_lookup": DraftTime(0.02),
    "suffix": DraftTime(0.02),
    "draft_model": DraftTime(0.5, 0.4, 0.01),
}


def answers(count: int) -> list[Trace]:
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in itertools.islice(file, count)]
    return [
        make_trace(i, line["prompt_ids"], line["token_ids"][:MOST_TOKENS])
        for i, line in enumerate(lines)
    ]


class Guesser(Proposer):
    """A draft model that knows the answers, and is wrong as often as it says, or more often."""

    name = "draft_model"
    costs_forwards = True

    def __init__(self, logs: Sequence[Sequence[int]], error: float) -> None:
        self.config = SpeculativeConfig(
            method="draft_model", model="none", num_speculative_tokens=8
        )
        self._logs, self._error = logs, error
        self._held: dict[int, int] = {}
        self._forwards = 0

    @property
    def num_forwards(self) -> int:
        return self._forwards

    def lag(self, request: Request) -> int | None:
        return len(request.token_ids) - self._held.get(request.request_id, 0)

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        paths: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
        growing = [i for i, depth in enumerate(budget.max_depth) if depth and budget.max_nodes[i]]
        while growing:
            self._forwards += 1
            for i in growing:
                self._extend(requests[i], *paths[i])
            growing = [
                i
                for i in growing
                if len(paths[i][0]) < min(budget.max_nodes[i], budget.max_depth[i])
            ]
            met = budget.prices.are_met([(i, paths[i][1]) for i in growing])
            growing = [i for i, pays in zip(growing, met, strict=True) if pays]
        for request in requests:
            self._held[request.request_id] = len(request.token_ids) - 1
        return [DraftTree.chain(*path, self.name) for path in paths]

    def _extend(self, request: Request, tokens: list[int], probs: list[float]) -> None:
        at, log = len(request.token_ids) + len(tokens), self._logs[request.request_id]
        chance = random.Random(at * 1009 + request.request_id)
        prob = chance.random() ** 0.5
        is_right = chance.random() > self._error * (1.0 - prob)
        tokens.append(log[at] if is_right and at < len(log) else 0)
        probs.append(prob)

    def finish(self, request: Request) -> None:
        self._held.pop(request.request_id, None)


class Noisy(CostModel):
    """Steps that take now less and now more, at times much more, and from a step on all more."""

    def __init__(self, table: CostTable, noise: float, seed: int = 1) -> None:
        super().__init__(table, learns=False)
        self._noise, self._random, self._count = noise, random.Random(seed), 0

    def predict(self, shape: StepShape) -> float:
        self._count += 1
        hiccup = 4.0 if self._random.random() < 0.01 else 1.0
        slower = 1.3 if self._count // 300 % 2 else 1.0
        return (
            super().predict(shape) * hiccup * slower * math.exp(self._random.gauss(0, self._noise))
        )


class Recorded:
    """A planner whose decisions are taken down.

    Args:
        wish: changes a request when it is first seen.
    """

    def __init__(self, planner: Planner, wish: Callable[[Request], None]) -> None:
        self._planner, self._wish, self._seen = planner, wish, set[int]()
        self.asks_together = planner.asks_together
        self._hash = hashlib.sha256()
        self.asked = self.nodes = self.skipped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def _write(self, *facts: object) -> None:
        self._hash.update(repr(facts).encode())

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        for request in requests:
            if request.request_id not in self._seen:
                self._seen.add(request.request_id)
                self._wish(request)
        steps = self._planner.begin(step, requests)
        self.skipped += steps
        self._write(step.rows, steps)
        return steps

    def sleeps(self, requests: Sequence[Request]) -> int:
        steps = self._planner.sleeps(requests)
        if not steps:
            self._write("wakes")
        return steps

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        asked = self._planner.ask(source, candidates)
        self.asked += len(asked)
        self._write(source.name, asked)
        return asked

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        trees = self._planner.choose(limits, node_budget)
        self.nodes += sum(map(len, trees))
        self._write([(tree.token_ids, tree.parents, tree.origins) for tree in trees])
        return trees

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:16]


def table(
    curve: Mapping[int, float], ms: float, host: HostTime = NO_HOST_TIME, experts: bool = False
) -> CostTable:
    """Steps of one request and of eight, with two contexts; the latter read more."""
    cost = ExpertCost(8, 32, 4, ms / 100) if experts else None
    points = [
        CostPoint(
            requests,
            context,
            width,
            samples,
            ms * ratio * (1 + context / 4000) * requests**0.4,
            experts=round(8 * 32 * (1 - 0.875 ** (width * requests))) if experts else 0,
        )
        for width, ratio in curve.items()
        for requests in (1, 8)
        for context in (0, 512)
        for samples in sorted({0, 1, width})
        if requests == 1 or samples == width
    ]
    return CostTable("made up", points, host=host, experts=cost)


CLIFFS = {1: 1.0, 2: 1.05, 4: 1.2, 5: 1.9, 8: 1.6, 16: 2.4, 32: 4.4, 64: 8.5}
FLAT = {1: 1.0, 8: 1.01, 64: 1.05, 128: 1.1, 256: 1.6}
STEEP = {1: 1.0, 2: 1.7, 4: 3.1, 8: 6.0, 64: 44.0}
HOST = HostTime(step=0.2, request=0.02, draft=0.05, further_draft=0.01, ask=0.04, node=0.005)


def no_wish(request: Request) -> None: ...


def mixed_wishes(request: Request) -> None:
    """Some ask for so many tokens or for none, some have an adapter."""
    number = request.request_id
    wish = request.params.speculative
    if number % 5 == 1:
        wish = SpeculativeParams(num_speculative_tokens=1 + number % 4)
    elif number % 5 == 3:
        wish = SpeculativeParams(enabled=number % 2 == 0, methods=("suffix",))
    request.params = replace(request.params, speculative=wish)
    if number % 4 == 2:
        request.adapter = Adapter(f"adapter {number % 3}", None)
    request.__post_init__()


@dataclass(frozen=True)
class Cell:
    """Answers on a machine.

    Attributes:
        times: what steps take.
        believed: what the planner takes them to at first; None is ``times``, and it learns nothing.
        error: of the draft model; None is without it.
        is_native: whether the native drafts take part, where they were built.
    """

    times: CostTable
    believed: CostModel | None = None
    concurrency: int = 1
    noise: float = 0.0
    error: float | None = 0.5
    draft_times: Mapping[str, DraftTime] = field(default_factory=lambda: TIMES)
    objective: Objective | None = None
    wish: Callable[[Request], None] = no_wish
    is_native: bool = True
    is_fixed: bool = False

    def run(self, traces: Sequence[Trace]) -> dict[str, Any]:
        cost = CostModel(self.times, learns=False)
        truth = Noisy(self.times, self.noise) if self.noise else cost
        believed = self.believed or cost
        drafts = new_drafts(not self.is_fixed) if self.is_native else Drafts(not self.is_fixed)
        planner: Planner = CostAwarePlanner(believed, self.objective, drafts)
        if self.is_fixed:
            planner = FixedPlanner(drafts)
        recorded = Recorded(planner, self.wish)
        result = replay(
            traces, make_meta(MOST_TOKENS) | {"params": META}, self._proposers(traces),
            cast(Planner, recorded),
            truth, drafting=DraftingCost(self.draft_times), concurrency=self.concurrency,
            unions=_unions(traces, self.times.experts), believed=believed,
        )  # fmt: skip
        found = {"steps": len(result.rows), "asked": recorded.asked, "nodes": recorded.nodes}
        return found | {"skipped": recorded.skipped, "digest": recorded.digest}

    def _proposers(self, traces: Sequence[Trace]) -> list[Proposer]:
        configs = [
            SpeculativeConfig(method="prompt_lookup", num_speculative_tokens=6, max_branching=2),
            SpeculativeConfig(
                method="suffix", num_speculative_tokens=12, max_tree_nodes=0, max_branching=1
            ),
        ]
        proposers = list(build_proposers(configs, ANY_TARGET, strict=True))
        if self.error is not None:
            proposers.append(Guesser([t.token_ids.tolist() for t in traces], self.error))
        return proposers


META = {"max_tokens": MOST_TOKENS, "temperature": 0.0, "seed": 7, "max_model_len": 2048}


def _unions(traces: Sequence[Trace], experts: ExpertCost | None) -> ExpertUnions | None:
    """Rows of one answer that choose less alike from one answer to the next."""
    if experts is None:
        return None
    sizes = [
        [round(256 * (1 - (0.9 - 0.02 * (i % 4)) ** rows)) for rows in UNION_ROWS]
        for i in range(len(traces))
    ]
    known = [
        replace(t, experts_read=np.array([of_trace] * len(t.logprobs), np.int32))
        for t, of_trace in zip(traces, sizes, strict=True)
    ]
    return ExpertUnions(known, experts)


def cells() -> dict[str, Cell]:
    """Fresh ones, for what they believe is learnt from."""
    cliffs, flat, steep = table(CLIFFS, 5.0, HOST), table(FLAT, 200.0), table(STEEP, 3.0, HOST)
    mixture = table(CLIFFS, 20.0, HOST, experts=True)
    slow_draft = TIMES | {"draft_model": DraftTime(8.0, 8.0, 0.2)}
    relative = prior_table("native avx2")
    seconds = table({p.width: p.ms for p in relative.points}, 4.0, HOST)
    return {
        "known": Cell(cliffs),
        "known, four": Cell(cliffs, concurrency=4, is_native=False),
        "learnt": Cell(cliffs, CostModel(steep), noise=0.05),
        "learnt, eight": Cell(steep, CostModel(cliffs), concurrency=8, noise=0.1),
        "assumed": Cell(seconds, CostModel(ops="native amx"), noise=0.03, is_native=False),
        "assumed, four": Cell(seconds, CostModel(), concurrency=4, noise=0.2),
        "from disk": Cell(flat, CostModel(streamed=0.9), noise=0.02),
        "flat, slow draft": Cell(flat, CostModel(flat), draft_times=slow_draft, noise=0.02),
        "slow draft": Cell(cliffs, CostModel(cliffs), draft_times=slow_draft, noise=0.05),
        "poor draft": Cell(cliffs, CostModel(cliffs), concurrency=2, error=1.8, noise=0.05),
        "texts alone": Cell(steep, CostModel(steep), error=None, noise=0.05),
        "mixture": Cell(mixture, CostModel(mixture), noise=0.05, concurrency=2),
        "mixture, assumed": Cell(
            mixture, CostModel(experts=mixture.experts, from_disk=0.3), noise=0.05
        ),
        "latency": Cell(
            cliffs, CostModel(cliffs), concurrency=4, noise=0.05, objective=Objective("latency")
        ),
        "tpot": Cell(
            cliffs, CostModel(cliffs), concurrency=6, noise=0.05, objective=Objective("tpot", 14.0)
        ),
        "wishes": Cell(
            cliffs, CostModel(cliffs), concurrency=6, noise=0.05, wish=mixed_wishes,
            is_native=False,
        ),
        "wishes, alone": Cell(steep, CostModel(cliffs), noise=0.05, wish=mixed_wishes),
        "crowd": Cell(cliffs, CostModel(flat), concurrency=24, noise=0.05),
        "fixed": Cell(cliffs, concurrency=3, is_fixed=True),
    }  # fmt: skip


def rounding() -> str:
    """How the C library rounds, and Python sums: elsewhere decisions may differ by that."""
    values = [sum([0.1] * 10)]
    values += [f(x / 97) for x in range(1, 2000) for f in (math.exp, math.log, math.log2)]
    return hashlib.sha256(np.array(values).tobytes()).hexdigest()[:16]


def decisions(count: int) -> dict[str, Any]:
    """Of every cell, with so many answers."""
    traces = answers(count)
    return {name: cell.run(traces) for name, cell in cells().items()}


if __name__ == "__main__":
    document = {"rounding": rounding(), "few": decisions(FEW), "many": decisions(MANY)}
    KNOWN.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
