"""The best way to speculate on a set of traces, and how sure that is.

Owns the order of the search, the bootstrap and what counts as worthwhile; candidates are
:mod:`paceline_lab.tune.search`'s, replays :mod:`paceline_lab.simulate.simulator`'s. Knows no
files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.planner.planner import PLANNERS
from paceline_lab.bootstrap import ratio_interval
from paceline_lab.simulate.command import BEST_FIXED, BEST_STEPS, PLAIN
from paceline_lab.simulate.recording import widest
from paceline_lab.simulate.replay import ReplayResult
from paceline_lab.simulate.setup import num_learnt
from paceline_lab.simulate.simulator import Simulator, best_of_each
from paceline_lab.tune.search import (
    SUFFIX,
    Setting,
    all_configs,
    configured_candidate,
    draft_candidates,
    joint_candidates,
    search,
    suffix_candidates,
)

WORTHWHILE = 1.01
"""The speed-up whose interval must lie above it: a replay knows the machine no better."""
LEAST_ANSWERS = 5
"""That are resampled; an interval from fewer would say how few they are, not how sure it is."""
SINGLE_SHARE = 0.65
"""Of the time, for each proposer by itself; the rest is for two at once."""
Drafts = Mapping[str, SpeculativeConfig]
DEFAULT = "default"
DEFAULT_PLANNER = EngineConfig().planner


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Plain time over a row's time on all traces.

    Attributes:
        low, high: its 95 % interval; None for fewer than :data:`LEAST_ANSWERS` traces, and for
            plain decoding itself.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class TuningRow:
    """One way to decode all traces.

    Attributes:
        candidate: None for plain decoding and for hindsight.
        configs: whoever may have drafted.
        num_learnt: prompts that an n-gram model among them was trained on, so that other prompts
            will gain less.
    """

    name: str
    candidate: Setting | None
    result: ReplayResult
    speedup: SpeedUp
    configs: Sequence[SpeculativeConfig] = ()
    num_learnt: int = 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found.

    Attributes:
        default: what decodes where nothing is configured; None where that was not replayed.
        rows: candidates that were replayed in full, the best first, and of equally fast ones the
            smallest.
        oracles: hindsight: the best fixed setting of each trace out of ``rows``, and the best
            drafts of each step.
        num_candidates: that were tried at all.
        num_left_out: that there was no time for, in one round or another.
        seconds: of searching, hindsight included.
    """

    plain: TuningRow
    rows: list[TuningRow]
    oracles: list[TuningRow]
    num_candidates: int
    num_left_out: int
    seconds: float
    default: TuningRow | None = None

    @property
    def best(self) -> TuningRow | None:
        """The fastest candidate that beats plain decoding; None where none does.

        The default remains the best until another candidate beats it as clearly. Rows whose
        n-grams were learnt from these prompts are never it. A row surely beats another only if
        there are enough answers (:attr:`is_sure`).
        """
        fastest = next((row for row in self.rows if is_recommendable(row)), None)
        default = self.default
        if default is None or not is_recommendable(default):
            return fastest
        gain = self.gain(fastest)
        return fastest if gain is not None and is_clear(gain) else default

    def gain(self, row: TuningRow | None) -> SpeedUp | None:
        """How much faster a row is than the default."""
        if row is None or self.default is None:
            return None
        return speedup(self.default.result, row.result)

    @property
    def is_sure(self) -> bool:
        """Whether there are enough answers for intervals."""
        return len(self.plain.result.traces) >= LEAST_ANSWERS

    def distinct(self) -> list[list[TuningRow]]:
        """Rows of one family and planner whose replays took the same steps, the smallest first."""
        by_steps: dict[tuple[object, ...], list[TuningRow]] = {}
        for row in self.rows:
            by_steps.setdefault(_steps_of(row), []).append(row)
        return list(by_steps.values())

    def best_of(self, family: str) -> TuningRow | None:
        """The fastest candidate of a family, whether it pays or not."""
        return next((row for row in self.rows if _candidate(row).family == family), None)

    def by_budget(self) -> dict[tuple[str, str], list[TuningRow]]:
        """The fastest candidate of every node budget, by family and planner."""
        by_family: dict[tuple[str, str], dict[int, TuningRow]] = {}
        for row in self.rows:
            each = _candidate(row)
            by_family.setdefault((each.family, each.planner), {}).setdefault(each.nodes, row)
        return {key: [rows[n] for n in sorted(rows)] for key, rows in sorted(by_family.items())}


def is_clear(gain: SpeedUp) -> bool:
    """Whether the interval, or without one the speed-up, lies above :data:`WORTHWHILE`."""
    return (gain.value if gain.low is None else gain.low) > WORTHWHILE


def is_worthwhile(row: TuningRow) -> bool:
    """Whether a row clearly beats plain decoding."""
    return is_clear(row.speedup)


def is_recommendable(row: TuningRow) -> bool:
    """Whether a row clearly beats plain decoding, on prompts that it has not learnt."""
    return is_worthwhile(row) and not row.num_learnt


def _steps_of(row: TuningRow) -> tuple[object, ...]:
    """Equal for candidates of a family and planner that did and cost the same in every step."""
    each, result = _candidate(row), row.result
    traces = tuple((trace.ms, *trace.emitted) for trace in result.traces)
    return each.family, each.planner, tuple(result.rows), traces


def _candidate(row: TuningRow) -> Setting:
    assert row.candidate is not None
    return row.candidate


def wanted_configs(
    drafts: Drafts, default: Sequence[SpeculativeConfig] = ()
) -> list[SpeculativeConfig]:
    """Every configuration of the drafts and of the default that :func:`tune` may replay."""
    candidates = [draft_candidates(name, draft, ("auto",)) for name, draft in drafts.items()]
    if default:
        candidates.append([configured_candidate(default, drafts, DEFAULT_PLANNER)])
    return all_configs(each for group in candidates for each in group)


def tune(
    simulator: Simulator,
    drafts: Drafts,
    planners: Sequence[str],
    budget_seconds: float,
    default: Sequence[SpeculativeConfig] = (),
) -> Tuning:
    """Search among all proposers and settings.

    Args:
        simulator: opened with :func:`wanted_configs`.
        drafts: who drafts besides ``suffix``, whatever the size of its trees, by names for people.
        planners: keys of :data:`~paceline.planner.planner.PLANNERS`.
        budget_seconds: for replaying candidates; hindsight comes after it.
        default: who drafts where nothing is configured.
    """
    began = time.perf_counter()
    singles = suffix_candidates(planners)
    for name, draft in drafts.items():
        singles += draft_candidates(name, draft, planners)
    share = SINGLE_SHARE if drafts else 1.0
    singly = search(simulator, singles, began + share * budget_seconds)
    plain = simulator.plain()
    scores = {each: plain.ms / result.ms for each, result in singly.results.items()}
    joint = [each for name in drafts for each in joint_candidates(scores, name, planners)]
    more = search(simulator, joint, began + budget_seconds)
    results = singly.results | more.results
    rows = [_row(simulator, plain, c, result) for c, result in results.items()]
    rows.sort(key=lambda row: planners.index(_candidate(row).planner))
    return Tuning(
        plain=TuningRow(PLAIN, None, plain, SpeedUp(1.0, None, None)),
        rows=sorted(rows, key=lambda row: (-row.speedup.value, _candidate(row).size)),
        oracles=_oracles(simulator, drafts, plain, results),
        num_candidates=len(singles) + len(joint),
        num_left_out=singly.num_left_out + more.num_left_out,
        seconds=time.perf_counter() - began,
        default=_default(simulator, plain, drafts, default) if default else None,
    )


def _row(
    simulator: Simulator, plain: ReplayResult, each: Setting, result: ReplayResult
) -> TuningRow:
    learnt = num_learnt(each.configs, simulator.learnt)
    return TuningRow(each.name, each, result, speedup(plain, result), each.configs, learnt)


def _default(
    simulator: Simulator,
    plain: ReplayResult,
    drafts: Drafts,
    configs: Sequence[SpeculativeConfig],
) -> TuningRow:
    candidate = configured_candidate(configs, drafts, DEFAULT_PLANNER)
    result = simulator.run(candidate.configs, PLANNERS[DEFAULT_PLANNER])
    row = _row(simulator, plain, candidate, result)
    return replace(row, name=f"{DEFAULT}: {row.name}")


def _oracles(
    simulator: Simulator,
    drafts: Drafts,
    plain: ReplayResult,
    results: Mapping[Setting, ReplayResult],
) -> list[TuningRow]:
    def row(name: str, result: ReplayResult, configs: Sequence[SpeculativeConfig]) -> TuningRow:
        learnt = num_learnt(configs, simulator.learnt)
        return TuningRow(name, None, result, speedup(plain, result), configs, learnt)

    def best_steps(name: str, candidates: Iterable[Setting]) -> TuningRow:
        configs = widest(all_configs(candidates))
        return row(f"{BEST_STEPS}: {name}", simulator.best_steps(configs), configs)

    fixed = {each: result for each, result in results.items() if each.planner == "fixed"}
    rows = [row(BEST_FIXED, best_of_each([plain, *fixed.values()]), all_configs(fixed))]
    free = suffix_candidates(("fixed",))
    for name, draft in drafts.items():
        candidates = [*free, *draft_candidates(name, draft, ("fixed",))]
        rows.append(best_steps(f"{SUFFIX} + {name}", candidates))
    return rows if drafts else [*rows, best_steps(SUFFIX, free)]


def speedup(plain: ReplayResult, result: ReplayResult) -> SpeedUp:
    """The ratio of total times; its interval is a bootstrap over the traces.

    Fewer than :data:`LEAST_ANSWERS` have none: of a single one all draws are the same, and a trace
    does not tell the times of its parts.
    """
    value, count = plain.ms / result.ms, len(plain.traces)
    if count < LEAST_ANSWERS:
        return SpeedUp(value, None, None)
    times = np.array([[trace.ms for trace in each.traces] for each in (plain, result)])
    return SpeedUp(value, *ratio_interval(times, np.sum))
