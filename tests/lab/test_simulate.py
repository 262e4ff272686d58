"""Replays side by side: what hindsight may choose from, what it chooses, and what drafts cost."""

from __future__ import annotations

import random

import pytest

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.errors import ProfileError
from paceline.planner.cost_table import CostPoint, CostTable, DraftingHostTime, HostTime
from paceline.planner.planner import PLANNERS
from paceline.planner.value import DraftTime
from paceline_lab.simulate.recorded_drafts import RecordedDrafts
from paceline_lab.simulate.recording import record_all
from paceline_lab.simulate.simulator import (
    Simulator,
    best_of_each,
    draft_time,
    fixed_configs,
    largest_configs,
    parallel_draft_time,
    translated,
)
from tests.lab.test_drafts import toy_recording
from tests.lab.toy_traces import frozen_cost, make_meta, make_trace
from tests.toy import draft_config, lookup_config

LOOKUP = lookup_config(num_speculative_tokens=12)
DRAFT = draft_config(num_speculative_tokens=3, max_branching=2)
TABLE = frozen_cost().table
DRAFT_TABLE = CostTable("draft", [CostPoint(1, 0, 1, 1, 0.05), CostPoint(1, 0, 2, 2, 0.06)])
SLOW = HostTime(drafting=DraftingHostTime(call=9.0, level=9.0))
META = make_meta(16, 0.8)


def simulator(concurrency: int = 1, draft_table: CostTable = DRAFT_TABLE) -> Simulator:
    drawn = random.Random(5)
    traces = [
        # The first repeats itself, the second never does.
        make_trace(0, [1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]),
        make_trace(1, [9, 8, 7], drawn.sample(range(10, 40), 14)),
        make_trace(2, [4, 5], [drawn.randint(1, 3) for _ in range(16)]),
    ]
    wanted = [config for each in fixed_configs([LOOKUP, DRAFT]).values() for config in each]
    found = record_all(wanted, lambda config: toy_recording(config, traces, META))
    config = EngineConfig(max_num_seqs=concurrency)
    return Simulator(traces, META, TABLE, {"toy": draft_table}, found, config)


def test_hindsight_chooses_from_plain_chains_trees_and_what_was_configured() -> None:
    fixed = fixed_configs([LOOKUP, DRAFT])
    assert fixed["plain"] == ()
    assert fixed["as configured"] == (LOOKUP, DRAFT)
    lengths = {name: [c.num_speculative_tokens for c in each] for name, each in fixed.items()}
    assert lengths["prompt_lookup 3"] == lengths["draft_model 3"] == [3]
    assert fixed["draft_model 8"][0].max_tree_nodes == 0
    assert fixed["prompt_lookup, tree of 16"][0].max_branching == 4
    assert not any("draft_model, tree" in name for name in fixed)
    assert len(fixed) == 2 + 2 * 8 + 2
    largest = largest_configs(fixed)
    assert {LOOKUP, DRAFT, *fixed["prompt_lookup 8"], *fixed["draft_model 8"]} <= {*largest}
    assert not {*fixed["prompt_lookup 7"], *fixed["draft_model 1"]} & {*largest}
    twins = fixed_configs([DRAFT, draft_config()])
    assert {"draft_model (1) 4", "draft_model (2) 4"} <= {*twins}


def test_configurations_of_one_kind_share_a_recording() -> None:
    made: list[SpeculativeConfig] = []

    def record(config: SpeculativeConfig) -> RecordedDrafts:
        made.append(config)
        return toy_recording(config, [], META)

    fixed = fixed_configs([LOOKUP, DRAFT])
    wanted = [config for each in fixed.values() for config in each]
    find = record_all(wanted, record)
    assert len(made) == 2
    for config in wanted:
        if config.model is not None:
            find(config).key.check_covers(config)


def test_hindsight_is_the_best_of_all_and_the_oracle_is_better_still() -> None:
    subject = simulator()
    fixed = fixed_configs([LOOKUP, DRAFT])
    results = [subject.run(configs, PLANNERS["fixed"]) for configs in fixed.values()]
    best = best_of_each(results)
    for index, trace in enumerate(best.traces):
        assert trace.ms == min(result.traces[index].ms for result in results)
    assert best.ms < min(result.ms for result in results)
    assert best.rows == []
    oracle = subject.best_steps(largest_configs(fixed))
    planned = subject.run([LOOKUP, DRAFT], PLANNERS["auto"])
    assert oracle.ms < best.ms
    assert oracle.ms < planned.ms
    assert oracle.total("num_accepted_tokens") == oracle.total("num_draft_tokens")
    # What never repeats itself is best left alone; repetition is not.
    assert best.traces[1].counters.num_draft_tokens == 0
    assert best.traces[0].counters.num_draft_tokens > 0


@pytest.mark.parametrize("concurrency", [1, 3])
def test_plain_decoding_is_what_the_table_says(concurrency: int) -> None:
    result = simulator(concurrency).plain()
    assert result.total("num_draft_tokens") == 0
    assert result.total("num_steps") == result.total("num_emitted_tokens") == 10 + 14 + 16
    assert len(result.rows) == (40 if concurrency == 1 else 16)


def test_drafting_is_charged_by_the_draft_models_own_curve() -> None:
    time = draft_time(DRAFT_TABLE, 1)
    assert (time.call, time.level) == (0.06, 0.05)
    assert time.token == pytest.approx(0.01)  # the curve's last slope
    assert draft_time(DRAFT_TABLE, 2).level == draft_time(DRAFT_TABLE, 1, 2).level == 0.06
    one, two = (
        simulator(draft_table=CostTable("draft", [CostPoint(1, 0, 1, 1, ms)])).run(
            [DRAFT], PLANNERS["fixed"]
        )
        for ms in (0.05, 0.1)
    )
    assert two.draft_ms == pytest.approx(2 * one.draft_ms)
    assert two.ms - one.ms == pytest.approx(one.draft_ms)


def test_what_drafting_takes_beside_forwards_is_charged() -> None:
    points = DRAFT_TABLE.points
    host = HostTime(drafting=DraftingHostTime(call=0.3, level=0.2, request=0.04, node=0.01))
    table = CostTable("draft", points, host=host)
    time, bare = draft_time(table, 3, 2), draft_time(DRAFT_TABLE, 3, 2)
    assert time.call == pytest.approx(bare.call + 0.3 + 2 * 0.04)
    assert time.level == pytest.approx(bare.level + 0.2 + 2 * 0.04 + 3 * 0.01)
    assert time.token == bare.token
    masks = parallel_draft_time(table, 2, 3).call - parallel_draft_time(DRAFT_TABLE, 2, 3).call
    assert masks == pytest.approx(0.3 + 0.04 + 2 * 2 * 0.01), "each mask is ranked like a node"
    (chain,) = fixed_configs([DRAFT])["draft_model 3"]
    quick, busy = (
        simulator(draft_table=each).run([chain], PLANNERS["fixed"]) for each in (DRAFT_TABLE, table)
    )
    assert busy.rows == quick.rows
    drafts = [draft for draft in quick.rows if draft > 1]
    assert busy.ms - quick.ms == pytest.approx(busy.draft_ms - quick.draft_ms)
    more = busy.draft_ms - quick.draft_ms
    assert len(drafts) * 0.3 <= more <= len(quick.rows) * (0.3 + 2 * 0.2)
    planned = [
        simulator(draft_table=each).run([DRAFT], PLANNERS["auto"]).total("num_draft_tokens")
        for each in (DRAFT_TABLE, CostTable("slow", points, host=SLOW))
    ]
    assert planned[1] < planned[0], "the planner is told what drafting takes"


def test_masks_are_rows_of_one_forward_and_foreign_levels_take_several() -> None:
    time = parallel_draft_time(DRAFT_TABLE, 2, 3)
    assert time.call == DRAFT_TABLE.milliseconds(8, samples=6, requests=2) > 0.06
    assert time.level == 0.0
    block = parallel_draft_time(DRAFT_TABLE, 2, 3, block_rows=8).call
    assert block == DRAFT_TABLE.milliseconds(16, samples=6, requests=2) > time.call
    assert translated(DraftTime(4.0, 2.0, 1.0), 3.5, 1.5) == DraftTime(9.0, 3.0, 1.5)


def test_units_are_not_mixed() -> None:
    relative = CostTable("draft", [CostPoint(1, 0, 1, 1, 0.05)], is_relative=True)
    with pytest.raises(ProfileError, match="different units"):
        simulator(draft_table=relative)
