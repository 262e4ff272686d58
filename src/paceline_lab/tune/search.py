"""The search among the settings that ``paceline tune`` tries.

Settings are grouped by who drafts, node budget and planner. Within each group the better half goes
on from every round to the next, in which twice as many traces are replayed (successive halving:
Karnin, Koren and Somekh, 2013), so every node budget ends with its best shape, replayed in full.
Knows no files and no tables.

Owns the grid of settings and their names.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from paceline.config import SpeculativeConfig
from paceline.config.speculative import SuffixConfig, without_memory
from paceline.planner.planner import PLANNERS
from paceline_lab.simulate.replay import ReplayResult
from paceline_lab.simulate.simulator import Simulator

SUFFIX = "suffix"
"""What is tried alone and beside every draft."""
SUFFIX_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
SUFFIX_BRANCHING = 4
"""Of these, and of whatever drafts without forwards."""
DRAFT_NODES = (1, 2, 3, 4, 6, 8, 12, 16)
DEPTHS = (1, 2, 4, 8)
BRANCHINGS = (2, 4)
"""Of a draft model's trees; each takes a recording of its own."""
JOINED = 3
"""The best of each proposer that are tried together, whatever their budgets."""
Scores = Mapping["Setting", float]
STRIDES = (8, 4, 2, 1)
"""Each round replays one in so many traces."""
LEAST_TRACES = 4
"""Of a round; with fewer, the first rounds are left out."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to speculate.

    Attributes:
        who: the proposers' names.
        nodes: draft nodes that a step may verify for a request.
        configs: the proposers.
        planner: a key of :data:`~paceline.planner.planner.PLANNERS`.
    """

    who: tuple[str, ...]
    nodes: int
    configs: tuple[SpeculativeConfig, ...]
    planner: str

    @property
    def family(self) -> str:
        return " + ".join(self.who)

    @property
    def group(self) -> tuple[str, int, str]:
        return self.family, self.nodes, self.planner

    @property
    def size(self) -> tuple[int, ...]:
        """By which the smallest of equally good candidates is found: nodes, depth and branching."""
        nodes, depths, widths = (
            sum(getattr(config, field) for config in self.configs)
            for field in ("tree_nodes", "num_speculative_tokens", "max_branching")
        )
        return self.nodes, nodes, depths, widths

    @property
    def name(self) -> str:
        pairs = zip(self.who, self.configs, strict=True)
        return " + ".join(f"{name} {_shape(config)}" for name, config in pairs)


def _shape(config: SpeculativeConfig) -> str:
    depth, nodes = config.num_speculative_tokens, config.max_tree_nodes
    return f"tree of {nodes}, {depth} deep, {config.max_branching} wide" if nodes else str(depth)


def configured_candidate(
    configs: Sequence[SpeculativeConfig], drafts: Mapping[str, SpeculativeConfig], planner: str
) -> Setting:
    """Proposers as they are configured, which are called as those of ``drafts`` are.

    Each request is by itself, as in :func:`suffix_candidates`.
    """
    names = {(draft.method, draft.model): name for name, draft in drafts.items()}
    return Setting(
        tuple(names.get((each.method, each.model), each.method) for each in configs),
        max(config.tree_nodes for config in configs),
        without_memory(configs),
        planner,
    )


def suffix_candidates(planners: Sequence[str]) -> list[Setting]:
    """``suffix``: chains and trees of every budget.

    Each request is by itself: the search replays a part of the answers, and those again and again.
    """
    usual = SuffixConfig(suffix_decoding_max_cached_requests=0)
    return draft_candidates(SUFFIX, usual, planners)


def draft_candidates(name: str, draft: SpeculativeConfig, planners: Sequence[str]) -> list[Setting]:
    """A draft: chains of every budget, and trees, of models by depth and branching."""
    is_model = draft.needs_forwards
    budgets: Sequence[int] = DRAFT_NODES if is_model else SUFFIX_NODES
    shapes = _model_shapes if is_model else _free_shapes
    plain = replace(draft, max_tree_nodes=0, max_branching=1)
    return [
        Setting((name,), nodes, (config,), planner)
        for nodes, planner in product(budgets, planners)
        for config in shapes(plain, nodes)
    ]


def _free_shapes(draft: SpeculativeConfig, nodes: int) -> list[SpeculativeConfig]:
    chain = replace(draft, num_speculative_tokens=nodes)
    if nodes < SUFFIX_BRANCHING:
        return [chain]
    return [chain, replace(chain, max_tree_nodes=nodes, max_branching=SUFFIX_BRANCHING)]


def _model_shapes(draft: SpeculativeConfig, nodes: int) -> list[SpeculativeConfig]:
    chain = replace(draft, num_speculative_tokens=min(nodes, DEPTHS[-1]))
    trees = [
        replace(chain, num_speculative_tokens=depth, max_tree_nodes=nodes, max_branching=width)
        for depth, width in product(DEPTHS, BRANCHINGS)
        if depth < nodes <= depth * width
    ]
    return trees if nodes > DEPTHS[-1] else [chain, *trees]


def joint_candidates(scores: Scores, name: str, planners: Sequence[str]) -> list[Setting]:
    """``suffix`` and another draft together: the best of both at each budget, and the best.

    Args:
        scores: speed-ups of both by themselves.
    """
    free, drafts = (_best_by_nodes(scores, family) for family in (SUFFIX, name))
    pairs = {(free[nodes], drafts[nodes]): None for nodes in sorted(free.keys() & drafts)}
    best = [list(by_nodes.values())[:JOINED] for by_nodes in (free, drafts)]
    pairs |= dict.fromkeys((one, draft) for one in best[0] for draft in best[1])
    return [
        Setting((SUFFIX, name), max(c.tree_nodes for c in pair), pair, planner)
        for pair, planner in product(pairs, planners)
    ]


def _best_by_nodes(scores: Scores, family: str) -> dict[int, SpeculativeConfig]:
    """The best configuration of each budget, the best of all first."""
    best: dict[int, SpeculativeConfig] = {}
    ours = [candidate for candidate in scores if candidate.family == family]
    for candidate in sorted(ours, key=lambda each: -scores[each]):
        best.setdefault(candidate.nodes, candidate.configs[0])
    return best


def all_configs(candidates: Iterable[Setting]) -> list[SpeculativeConfig]:
    """The configurations of all candidates, each once."""
    return list(dict.fromkeys(config for each in candidates for config in each.configs))


@dataclass(slots=True)
class Found:
    """What a search ended with.

    Attributes:
        results: of those that were replayed in full.
        num_left_out: that there was no time for, in one round or another.
    """

    results: dict[Setting, ReplayResult]
    num_left_out: int = 0


def search(
    simulator: Simulator,
    candidates: Sequence[Setting],
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
    least = max(LEAST_TRACES, simulator.config.max_num_seqs)
    strides = [s for s in STRIDES if s == 1 or len(simulator.traces) // s >= least]
    outcome = Found({})
    for index, stride in enumerate(strides):
        now, rounds = clock(), len(strides) - index
        part = simulator.every(stride)
        outcome.results = _replayed(part, alive, now + (until - now) / rounds, clock)
        outcome.num_left_out += len(alive) - len(outcome.results)
        alive = _survivors(outcome.results, to_one=rounds == 2)
    return outcome


def _replayed(
    simulator: Simulator, candidates: Sequence[Setting], until: float, clock: Clock
) -> dict[Setting, ReplayResult]:
    results: dict[Setting, ReplayResult] = {}
    for candidate in candidates:
        if results and clock() > until:
            break
        results[candidate] = simulator.run(candidate.configs, PLANNERS[candidate.planner])
    return results


def _survivors(results: Mapping[Setting, ReplayResult], to_one: bool) -> list[Setting]:
    """The better half of each group, or its best one; the best of all first."""
    groups: dict[tuple[str, int, str], list[Setting]] = {}
    ranked = sorted(results, key=lambda candidate: (results[candidate].ms, candidate.size))
    for candidate in ranked:
        groups.setdefault(candidate.group, []).append(candidate)
    kept = {
        candidate
        for group in groups.values()
        for candidate in group[: 1 if to_one else ceil(len(group) / 2)]
    }
    return [candidate for candidate in ranked if candidate in kept]
