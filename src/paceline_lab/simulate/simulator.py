"""The same traces replayed with several planners and configurations, and with hindsight.

Owns which fixed configurations hindsight may choose from. Knows no files: drafts of draft models
and cost tables are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.speculative import ForwardingConfig, SelfDraftConfig
from paceline.core.errors import ProfileError
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import CostTable
from paceline.planner.planner import PLANNERS, MakePlanner
from paceline.planner.value import DraftingCost, DraftTime
from paceline.proposers import build_proposers
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.draft_model.heterogeneous import SPARE
from paceline.request.traces import Trace
from paceline_lab.simulate.oracle import best_steps
from paceline_lab.simulate.recorded_drafts import LEVELS, RecordedDrafts, cached_proposer
from paceline_lab.simulate.replay import ANY_TOKEN, ReplayResult, replay
from paceline_lab.trace.experts import ExpertUnions

LENGTHS = range(1, 9)
"""Draft lengths that hindsight may choose from."""
TREES = ((8, 2), (16, 4))
"""Nodes and branching of trees of the longest length that it may choose from, too."""
CATCH_UP_ROWS = 128
"""Rows of a step from which the time of reading one more token is taken."""

ANY_TARGET = TargetInfo(
    vocab_size=ANY_TOKEN,
    fingerprint=None,
    device="cpu",
    max_model_len=ANY_TOKEN,
    max_num_seqs=ANY_TOKEN,
    kv_bytes=0,
)
Configs = Sequence[SpeculativeConfig]


@dataclass(slots=True)
class Simulator:
    """Replays one set of traces in as many ways as are wanted.

    Attributes:
        traces, meta: what the target answered.
        table: what the target's steps cost.
        draft_tables: what the steps of each draft model cost, by its :func:`draft_name`.
        drafts: finds the recorded drafts of a draft model's configuration.
        config: limits of the engine; its ``max_num_seqs`` is how many requests run at a time.
        target: what proposers have to fit to.
        learnt: numbers of the traces, from 0, whose prompts an n-gram model was trained on, by its
            file.
        places: of the traces among those that drafts were recorded along; None is all in order.
        unions: what steps along the traces read of a mixture; None where traces or table do not
            tell of experts, and steps read what the table's read.
    """

    traces: Sequence[Trace]
    meta: Mapping[str, Any]
    table: CostTable
    draft_tables: Mapping[str, CostTable]
    drafts: Callable[[ForwardingConfig], RecordedDrafts]
    config: EngineConfig
    target: TargetInfo = ANY_TARGET
    learnt: Mapping[str, frozenset[int]] = field(default_factory=dict)
    places: Sequence[int] | None = None
    unions: ExpertUnions | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        experts = self.table.experts
        if experts and all(trace.experts_read is not None for trace in self.traces):
            self.unions = ExpertUnions(self.traces, experts)
        for name, table in self.draft_tables.items():
            if table.is_relative != self.table.is_relative:
                raise ProfileError(
                    f"the costs of {name} ({table.name}) and of the target ({self.table.name}) are "
                    "in different units: milliseconds and multiples of a plain step"
                )

    def run(
        self, configs: Configs, make_planner: MakePlanner, is_priced: bool = True
    ) -> ReplayResult:
        """A replay with the proposers of ``configs``; none at all is plain decoding.

        Of a mixture whose :attr:`unions` are known the planner learns, as in an engine, what its
        steps read and take; if not ``is_priced``, only what they take.
        """
        cost, drafting, believed = self._cost(), self._drafting(configs), None
        if self.unions is not None:
            believed = CostModel(self.table if is_priced else self.table.without_experts())
        planner = make_planner(believed or cost, self.config.objective)
        return replay(
            self.traces,
            self.meta,
            self._proposers(configs),
            planner,
            cost,
            drafting=drafting,
            concurrency=self.config.max_num_seqs,
            config=self.config,
            unions=self.unions,
            believed=believed,
        )

    def plain(self) -> ReplayResult:
        return self.run((), PLANNERS["fixed"])

    def best_steps(self, configs: Configs) -> ReplayResult:
        """The per-step oracle over the proposers of ``configs``."""
        return best_steps(
            self.traces,
            self.meta,
            lambda: self._proposers(configs),
            self._cost(),
            drafting=self._drafting(configs),
            concurrency=self.config.max_num_seqs,
            config=self.config,
            unions=self.unions,
        )

    def _cost(self) -> CostModel:
        return CostModel(self.table, learns=False)

    def _proposers(self, configs: Configs) -> list[Proposer]:
        return [self._proposer(config) for config in configs]

    def _proposer(self, config: SpeculativeConfig) -> Proposer:
        if isinstance(config, ForwardingConfig):
            return cached_proposer(config, self.drafts(config), self._places)
        (proposer,) = build_proposers([config], self.target, strict=True)
        return proposer

    @property
    def _places(self) -> Sequence[int]:
        return range(len(self.traces)) if self.places is None else self.places

    def every(self, stride: int) -> Simulator:
        """The simulator of one in so many of the traces."""
        return self._only(range(0, len(self.traces), stride))

    def unlearnt(self) -> Simulator:
        """The simulator of the traces whose prompts no n-gram model was trained on."""
        learnt = frozenset[int]().union(*self.learnt.values())
        return self._only([i for i in range(len(self.traces)) if i not in learnt])

    def _only(self, kept: Sequence[int]) -> Simulator:
        learnt = {
            file: frozenset(i for i, old in enumerate(kept) if old in numbers)
            for file, numbers in self.learnt.items()
        }
        return replace(
            self,
            traces=[self.traces[i] for i in kept],
            places=[self._places[i] for i in kept],
            learnt={file: numbers for file, numbers in learnt.items() if numbers},
        )

    def _drafting(self, configs: Configs) -> DraftingCost:
        """What takes forwards costs their time, what takes none what was measured of its calls."""
        return DraftingCost({config.method: self._draft_time(config) for config in configs})

    def _draft_time(self, config: SpeculativeConfig) -> DraftTime:
        if not isinstance(config, ForwardingConfig):
            return DraftTime(self.table.host.call(config.method))
        requests = min(self.config.max_num_seqs, len(self.traces))
        table, depth = self.draft_tables[draft_name(config)], config.num_speculative_tokens
        key = self.drafts(config).key
        if key.form != LEVELS:
            return parallel_draft_time(table, requests, depth, key.block_rows)
        nodes, recorded = -(-config.tree_nodes // depth), self.drafts(config)
        spare = 1 if recorded.pair is None else SPARE
        time = translated(draft_time(table, requests, spare * nodes), *recorded.forwards)
        # What `self` and assistants lack the target has read.
        return time if config.has_own_kv else replace(time, token=0.0)


def draft_name(config: ForwardingConfig) -> str:
    """Which model drafts by forwards: as configurations name it, or which part of the target."""
    if config.model is not None or not isinstance(config, SelfDraftConfig):
        return config.model or config.method
    return f"{config.method}: {config.draft_layers or 'all'} layers, {config.dtype}"


def draft_time(table: CostTable, requests: int, nodes: int = 1) -> DraftTime:
    """What a draft model's table says of so many requests at a time.

    The first forward reads the token that the target added and the one before it. What the host
    takes for a call and for each level is in these times.

    Args:
        nodes: of each level of a request's tree.
    """
    context, host = table.contexts[0], table.host.drafting
    level = table.milliseconds(requests * nodes, context, requests=requests)
    level += host.further_level(requests, nodes)
    call = table.milliseconds(2 * requests, context, samples=requests, requests=requests)
    call += host.first_level(requests)
    chunk = table.milliseconds(1 + CATCH_UP_ROWS, context, samples=1)
    token = (chunk - table.milliseconds(1, context)) / CATCH_UP_ROWS
    return DraftTime(call, level, max(0.0, token))


def parallel_draft_time(
    table: CostTable, requests: int, depth: int, block_rows: int = 0
) -> DraftTime:
    """What a table says of one forward that drafts so many tokens for each request.

    It reads the same two tokens, and a mask for each further token of the draft, whose candidates
    are ranked like those of further nodes; or a block of so many rows.
    """
    rows, samples = requests * (block_rows or 1 + depth), requests * depth
    call = table.milliseconds(rows, table.contexts[0], samples=samples, requests=requests)
    call += table.host.drafting.first_level(requests, depth)
    return replace(draft_time(table, requests), call=call, level=0.0)


def translated(time: DraftTime, first: float, further: float) -> DraftTime:
    """The times of a draft that takes so many forwards for a level, in levels of the target."""
    call = time.call + (first - 1.0) * time.level
    return DraftTime(call, further * time.level, further * time.token)


def fixed_configs(configs: Configs) -> dict[str, tuple[SpeculativeConfig, ...]]:
    """What hindsight may choose from: plain decoding, ``configs``, and each of them by itself.

    The latter as chains of :data:`LENGTHS`, and those that need no forwards as :data:`TREES` too.
    """
    by_name: dict[str, tuple[SpeculativeConfig, ...]] = {"plain": ()}
    for number, config in enumerate(configs, start=1):
        twins = sum(other.method == config.method for other in configs) > 1
        name = f"{config.method} ({number})" if twins else config.method
        by_name |= {f"{name} {length}": (_sized(config, length),) for length in LENGTHS}
        if not config.needs_forwards:
            sized = {nodes: _sized(config, LENGTHS[-1], nodes, width) for nodes, width in TREES}
            by_name |= {f"{name}, tree of {nodes}": (each,) for nodes, each in sized.items()}
    if configs:
        by_name["as configured"] = tuple(configs)
    return by_name


def _sized(
    config: SpeculativeConfig, length: int, nodes: int = 0, width: int = 1
) -> SpeculativeConfig:
    return replace(config, num_speculative_tokens=length, max_branching=width, max_tree_nodes=nodes)


def largest_configs(fixed: Mapping[str, Configs]) -> list[SpeculativeConfig]:
    """Of everything that :func:`fixed_configs` found what has no larger one of its kind."""
    everything = dict.fromkeys(config for configs in fixed.values() for config in configs)
    shorter = {_sized(config, length) for config in everything for length in LENGTHS[:-1]}
    return [config for config in everything if config not in shorter]


def best_of_each(results: Sequence[ReplayResult]) -> ReplayResult:
    """Each trace as it was in the replay that was shortest for it.

    Of a single request at a time this is exact. Of several, a trace's time is its share of steps
    whose other requests were in the same configuration as itself. The result has no rows.
    """
    columns = zip(*(result.traces for result in results), strict=True)
    return ReplayResult([min(column, key=lambda trace: trace.ms) for column in columns])
