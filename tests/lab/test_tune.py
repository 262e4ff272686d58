"""The search for the best way to speculate: candidates, halving, hindsight, and how sure it is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.planner.cost_table import CostPoint, CostTable
from paceline.planner.planner import PLANNERS, MakePlanner
from paceline.request.traces import Trace
from paceline_lab.simulate.recorded_drafts import RecordedDrafts
from paceline_lab.simulate.recording import record_all, widest
from paceline_lab.simulate.replay import ReplayedTrace, ReplayResult, SpeculationCounters
from paceline_lab.simulate.simulator import Configs, Simulator
from paceline_lab.tune import search as tune_search
from paceline_lab.tune.search import (
    SUFFIX,
    Setting,
    draft_candidates,
    joint_candidates,
    search,
    suffix_candidates,
)
from paceline_lab.tune.tuning import (
    BEST_FIXED,
    LEAST_ANSWERS,
    SpeedUp,
    Tuning,
    TuningRow,
    is_worthwhile,
    speedup,
    tune,
    wanted_configs,
)
from tests.lab.test_drafts import make_key, toy_recording
from tests.lab.test_drafts import make_meta as sampled_meta
from tests.lab.test_drafts import toy_traces as sampled_traces
from tests.lab.test_oracle import repetitive
from tests.lab.toy_traces import frozen_cost, make_meta, make_trace
from tests.toy import draft_config

BOTH = tuple(PLANNERS)
TABLE = frozen_cost().table
DEAR = CostTable("dear", [CostPoint(1, 0, 1, 1, 0.9)])
TOY = {"toy": draft_config()}
FOREVER = 1e9


def simulator(traces: list[Trace], **more: Any) -> Simulator:
    fields: dict[str, Any] = {
        "meta": make_meta(64),
        "table": TABLE,
        "draft_tables": {},
        "drafts": never,
        "config": EngineConfig(max_num_seqs=1),
    }
    return Simulator(traces, **fields | more)


def never(config: SpeculativeConfig) -> RecordedDrafts:
    raise AssertionError("nothing was recorded")


def novel(count: int) -> list[Trace]:
    """Outputs in which no token comes twice."""
    drawn = random.Random(0)
    tokens = [drawn.sample(range(1, 2000), 40) for _ in range(count)]
    return [make_trace(index, each[:8], each[8:]) for index, each in enumerate(tokens)]


# --- candidates ----------------------------------------------------------------------------------


def test_no_candidate_drafts_beyond_its_budget() -> None:
    found = suffix_candidates(BOTH) + draft_candidates("toy", TOY["toy"], BOTH)
    found += joint_candidates(dict.fromkeys(found, 1.0), "toy", BOTH)
    for each in found:
        assert max(config.tree_nodes for config in each.configs) == each.nodes
        assert len(each.who) == len(each.configs)
    assert {each.family for each in found} == {SUFFIX, "toy", f"{SUFFIX} + toy"}
    assert len(set(found)) == len(found)


def test_the_best_of_each_proposer_are_tried_together() -> None:
    singles = suffix_candidates(("fixed",)) + draft_candidates("toy", TOY["toy"], ("fixed",))
    scores = {each: random.Random(str(each)).random() for each in singles}
    pairs = {each.configs for each in joint_candidates(scores, "toy", ("fixed",))}
    best = [
        max((c for c in singles if c.family == family), key=scores.__getitem__).configs[0]
        for family in (SUFFIX, "toy")
    ]
    assert tuple(best) in pairs
    assert joint_candidates({singles[0]: 1.0}, "toy", BOTH) == []


def test_the_widest_configurations_hold_the_drafts_of_all() -> None:
    configs = wanted_configs(TOY)
    keys = {config.max_branching: make_key(config) for config in widest(configs)}
    assert len(keys) == len(widest(configs)) == 3
    for config in configs:
        keys[config.max_branching].check_covers(config)


# --- the search ----------------------------------------------------------------------------------


class Known(Simulator):
    """Takes a known time for each configuration, by its number of tokens, and counts replays."""

    asked: ClassVar[Counter[tuple[int, int]]] = Counter()

    def run(self, configs: Configs, make_planner: MakePlanner) -> ReplayResult:
        (config,) = configs
        type(self).asked[len(self.traces), config.num_speculative_tokens] += 1
        ms = 1.0 + abs(config.num_speculative_tokens - 5.4)
        return ReplayResult([ReplayedTrace(SpeculationCounters(), [1], ms) for _ in self.traces])


@pytest.fixture
def known() -> Simulator:
    Known.asked.clear()
    plain = simulator(novel(1) * 33)
    return Known(plain.traces, plain.meta, plain.table, {}, never, plain.config)


def lengths(count: int) -> list[Setting]:
    """Even lengths in one group, odd ones in another."""
    return [
        Setting((SUFFIX,), 1 + n % 2, (SpeculativeConfig(num_speculative_tokens=n),), "fixed")
        for n in range(1, count + 1)
    ]


def test_every_round_halves_the_groups_and_doubles_the_traces(known: Simulator) -> None:
    found = search(known, lengths(16), FOREVER)
    assert {c.configs[0].num_speculative_tokens for c in found.results} == {5, 6}
    rounds = Counter(count for count, _ in Known.asked)
    assert rounds == {5: 16, 9: 8, 17: 4, 33: 2}
    assert set(Known.asked.values()) == {1}
    assert found.num_left_out == 0


def test_few_traces_are_replayed_in_full_at_once(known: Simulator) -> None:
    known.traces = known.traces[:7]
    assert len(search(known, lengths(16), FOREVER).results) == 16


def test_the_time_is_kept_and_each_round_gets_its_share(known: Simulator) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    found = search(known, lengths(60), 80.0, clock)
    assert now < 80.0 + 8
    assert found.results
    assert found.num_left_out > 0
    assert {count for count, _ in Known.asked} == {5, 9, 17, 33}
    # Without any time there is one replay per round.
    Known.asked.clear()
    assert len(search(known, lengths(60), 0.0, clock).results) == 1
    assert sum(Known.asked.values()) == 4


def test_a_part_of_the_traces_has_its_own_drafts() -> None:
    traces, meta = sampled_traces(0.8)[:4], sampled_meta(0.8)
    configs = [config for config in wanted_configs(TOY) if config.max_branching < 4]

    def drafts_for(some: list[Trace]) -> Callable[[SpeculativeConfig], RecordedDrafts]:
        return record_all(configs, lambda config: toy_recording(config, some, meta))

    def opened(some: list[Trace]) -> Simulator:
        return simulator(some, meta=meta, draft_tables={"toy": DEAR}, drafts=drafts_for(some))

    part, alone = opened(traces).every(2), opened(traces[::2])
    for config in configs[::3]:
        one, two = (each.run((config,), PLANNERS["fixed"]) for each in (part, alone))
        assert one.rows == two.rows
        assert one.ms == two.ms


# --- what is found -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_grid() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_search, "SUFFIX_NODES", (1, 2, 4, 8))
        patch.setattr(tune_search, "DRAFT_NODES", (1, 2, 8))
        yield


@pytest.fixture(scope="module")
def repeated(small_grid: None) -> Tuning:
    return tune(simulator(repetitive(1, 5)), {}, BOTH, FOREVER)


def test_where_text_repeats_suffix_pays(repeated: Tuning) -> None:
    best = repeated.best
    assert best is not None
    assert best is repeated.rows[0] is repeated.best_of(SUFFIX)
    assert best.speedup.low is not None
    assert best.speedup.low > 1.01
    values = [row.speedup.value for row in repeated.rows]
    assert values == sorted(values, reverse=True)
    hindsight = {row.name: row.speedup.value for row in repeated.oracles}
    fixed = [
        r.speedup.value for r in repeated.rows if r.candidate and r.candidate.planner == "fixed"
    ]
    assert hindsight.pop(BEST_FIXED) >= max(fixed)
    (steps,) = hindsight.values()
    assert steps >= max(values)
    assert repeated.num_left_out == 0


def test_each_budget_has_its_best(repeated: Tuning) -> None:
    for (family, planner), rows in repeated.by_budget().items():
        budgets = [row.candidate.nodes for row in rows if row.candidate]
        assert budgets == sorted(set(budgets))
        for row in rows:
            same = [
                other.speedup.value
                for other in repeated.rows
                if other.candidate
                and row.candidate
                and other.candidate.group == row.candidate.group
            ]
            assert row.speedup.value == max(same)
            assert row.candidate
            assert (row.candidate.family, row.candidate.planner) == (family, planner)


def test_where_nothing_repeats_and_the_draft_is_dear_nothing_beats_plain_decoding(
    small_grid: None,
) -> None:
    traces, meta = novel(4), make_meta(64)
    wrong = {"positions": np.cumsum([0, *(len(t.output_token_ids) for t in traces)])}
    count = int(wrong["positions"][-1])

    def drafts(config: SpeculativeConfig) -> RecordedDrafts:
        """One token after the other that never comes, each thought to be likely."""
        depth = 8
        return RecordedDrafts(
            make_key(widest(wanted_configs(TOY))[[1, 2, 4].index(config.max_branching)]),
            wrong["positions"],
            np.arange(count + 1) * depth,
            np.full(count * depth, 2001, np.int32),
            np.tile(np.arange(-1, depth - 1, dtype=np.int32), count),
            np.full(count * depth, 0.9),
        )

    found = tune(
        simulator(traces, meta=meta, draft_tables={"toy": DEAR}, drafts=drafts), TOY, BOTH, FOREVER
    )
    assert found.best is None
    assert all(row.speedup.value <= 1.0 for row in found.rows)
    alone = found.best_of("toy")
    assert alone is not None
    fixed = [row for row in found.rows if row.candidate and row.candidate.planner == "fixed"]
    assert min(row.speedup.value for row in fixed) < 0.7
    assert alone.speedup.value > 0.9  # the planner notices


def result(times: list[float]) -> ReplayResult:
    return ReplayResult([ReplayedTrace(SpeculationCounters(), [1], ms) for ms in times])


def test_the_interval_is_that_of_the_traces() -> None:
    plain = result([4.0] * 6)
    assert speedup(plain, plain) == SpeedUp(1.0, 1.0, 1.0)
    assert speedup(plain, result([2.0] * 6)) == SpeedUp(2.0, 2.0, 2.0)
    few, many = (speedup(result([4.0] * 6 * n), result([1.0, 3.0, 2.0] * 2 * n)) for n in (1, 20))
    assert few.value == many.value == 2.0
    ends = few.low, many.low, 2.0, many.high, few.high
    found = [end for end in ends if end is not None]
    assert len(set(found)) == len(ends)
    assert found == sorted(found)


@pytest.mark.parametrize("count", [1, LEAST_ANSWERS - 1])
def test_few_answers_have_no_interval(count: int) -> None:
    plain = result([4.0] * count)
    fast, slow = (speedup(plain, result([ms] * count)) for ms in (2.0, 3.99))
    assert fast == SpeedUp(2.0, None, None)
    rows = [TuningRow("x", suffix_candidates(BOTH)[0], plain, each) for each in (fast, slow)]
    assert [is_worthwhile(row) for row in rows] == [True, False]
    tuning = Tuning(TuningRow("plain", None, plain, SpeedUp(1.0, None, None)), rows, [], 2, 0, 1.0)
    assert not tuning.is_sure
    assert tuning.best is rows[0]


def test_the_default_stays_the_best_until_another_clearly_beats_it() -> None:
    times = [4.0] * LEAST_ANSWERS
    plain = result(times)
    usual, better, learnt = (result([ms] * LEAST_ANSWERS) for ms in (2.0, 1.9, 1.0))
    candidate = suffix_candidates(BOTH)[0]

    def row(name: str, each: ReplayResult, num_learnt: int = 0) -> TuningRow:
        return TuningRow(name, candidate, each, speedup(plain, each), num_learnt=num_learnt)

    def best(default: TuningRow | None, *rows: TuningRow) -> str | None:
        unit = TuningRow("plain", None, plain, SpeedUp(1.0, None, None))
        found = Tuning(unit, list(rows), [], len(rows), 0, 1.0, default).best
        return found and found.name

    default, starred = row("default", usual), row("starred", learnt, 1)
    assert best(default, row("better", better)) == "better"
    assert best(default, row("same", usual)) == "default"
    assert best(default) == "default"
    assert best(default, starred) == "default"
    assert best(None, starred, row("better", better)) == "better"
    assert best(row("default", plain), starred) is None
    assert best(row("default", learnt, 1), starred, row("same", usual)) == "same"


def test_the_default_is_replayed_as_it_is_configured(small_grid: None) -> None:
    usual = SpeculativeConfig("suffix", None, 3, max_tree_nodes=0, max_branching=1)
    found = tune(simulator(repetitive(1, 5)), {}, BOTH, FOREVER, default=(usual,))
    assert found.default is not None
    assert found.default.name == "default: suffix 3"
    assert found.default.candidate is not None
    assert found.default.candidate.planner == EngineConfig().planner
    chain = [row for row in found.rows if row.name == "suffix 4"]
    assert chain
    assert found.default.speedup.value > 1.0
    assert found.gain(found.default) == SpeedUp(1.0, 1.0, 1.0)


def test_traces_that_were_learnt_can_be_left_out() -> None:
    whole = simulator(novel(5), learnt={"a": frozenset({0, 3}), "b": frozenset({3})})
    left = whole.unlearnt()
    assert [trace.prompt_index for trace in left.traces] == [1, 2, 4]
    assert left.places == [1, 2, 4]
    assert left.learnt == {}
    part = whole.every(3)
    assert part.places == [0, 3]
    assert part.learnt == {"a": {0, 1}, "b": {1}}


def replayed(rows: list[int], ms: float = 1.0) -> ReplayResult:
    return ReplayResult([ReplayedTrace(SpeculationCounters(), [1, 2], ms)], rows)


def test_settings_that_took_the_same_steps_are_one(known: Simulator) -> None:
    chains = suffix_candidates(("fixed",))[:3]
    auto = suffix_candidates(("auto",))[0]
    same, wider, slower = replayed([5, 3]), replayed([5, 4]), replayed([5, 3], 2.0)
    unit = SpeedUp(1.0, None, None)
    rows = [
        TuningRow(str(number), candidate, each, unit)
        for number, (candidate, each) in enumerate(
            [
                (chains[0], same),
                (chains[1], wider),
                (chains[2], replayed([5, 3])),
                (auto, same),
                (chains[1], slower),
            ]
        )
    ]
    tuning = Tuning(TuningRow("plain", None, same, unit), rows, [], 5, 0, 1.0)
    names = [[row.name for row in group] for group in tuning.distinct()]
    assert names == [["0", "2"], ["1"], ["3"], ["4"]]


def test_the_smallest_of_equally_fast_settings_comes_first(
    small_grid: None, repeated: Tuning
) -> None:
    same = tune(simulator(novel(5)), {}, BOTH, FOREVER)
    for found in (same, repeated):
        order = [(-row.speedup.value, row.candidate.size) for row in found.rows if row.candidate]
        assert order == sorted(order)
    # Where nothing repeats nothing is drafted, whatever the size.
    (auto, *_), (fixed, *_) = same.distinct()
    for row, planner in ((auto, "auto"), (fixed, "fixed")):
        assert row.candidate is not None
        assert (row.candidate.nodes, row.candidate.planner) == (1, planner)
