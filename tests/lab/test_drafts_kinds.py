"""Recorded drafts of parallel drafts and of other vocabularies are those of the proposers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.proposers.base import Proposer
from paceline.request.traces import Trace
from paceline_lab.simulate.recorded_drafts import (
    RecordedDrafts,
    cached_proposer,
    read_drafts,
    write_drafts,
)
from paceline_lab.simulate.recording import (
    ForeignRecorder,
    Recorder,
    record_drafts,
)
from paceline_lab.simulate.replay import replay
from tests.lab.test_drafts import (
    BUDGETS,
    make_key,
    make_meta,
    make_trace,
    steps,
    toy_traces,
)
from tests.lab.test_replay import DRAFTING, MAX_TOKENS, limits, make_planner, run_engine
from tests.lab.toy_traces import frozen_cost
from tests.lab.toy_traces import make_meta as replay_meta
from tests.proposers.parallel_drafts import parallel_config, parallel_drafter
from tests.proposers.vocabularies import close_pair, far_pair, foreign_drafter, reversed_self
from tests.toy import TOY, draft_config, toy_runner

MASK = 47
CHAIN = {"num_speculative_tokens": 4}
TREE = {"max_tree_nodes": 8, "max_branching": 2, "num_speculative_tokens": 3}
SMALLER: list[tuple[dict[str, Any], Callable[[int], dict[str, Any]]]] = [
    ({}, BUDGETS[1]),
    ({"num_speculative_tokens": 2, "min_accept_prob": 0.1}, BUDGETS[2]),
]


def parallel_recording(config: SpeculativeConfig) -> Recorder:
    runner = toy_runner(num_blocks=400, prefix_caching=False, noise=0.3)
    shape = dataclasses.replace(TOY, mask_token_id=MASK)
    runner.decoder.config = shape
    return Recorder(config, runner)


def foreign_config(**options: Any) -> SpeculativeConfig:
    return draft_config(use_heterogeneous_vocab=True, **options)


PAIRS = {"close": close_pair(), "far": far_pair()}


class Kind:
    """A way to draft: its configurations, the proposer itself, and its recorder."""

    def __init__(self, name: str) -> None:
        self.pair = PAIRS.get(name)
        self.config: Callable[..., SpeculativeConfig] = (
            foreign_config if self.pair else parallel_config
        )

    def proposer(self, **options: Any) -> Any:
        if self.pair is None:
            return parallel_drafter(num_blocks=400, **options)
        return foreign_drafter(self.pair, self._runner(), **options)

    def recorder(self, config: SpeculativeConfig) -> Recorder:
        if self.pair is None:
            return parallel_recording(config)
        return ForeignRecorder(config, self._runner(), self.pair)

    def _runner(self) -> Any:
        if self.pair is PAIRS["close"]:
            return reversed_self(num_blocks=600)
        return toy_runner(num_blocks=600, prefix_caching=False, noise=0.2)

    def recording(
        self, traces: Sequence[Trace], meta: dict[str, Any], **options: Any
    ) -> RecordedDrafts:
        config = self.config(**options)
        key = make_key(config)
        found = record_drafts(key, self.recorder(config), traces, meta, lambda done: None)
        return dataclasses.replace(found, pair=self.pair)


KINDS = ("parallel", *PAIRS)


def replayed(config: SpeculativeConfig, recorded: RecordedDrafts, count: int) -> Any:
    return cached_proposer(config, recorded, dict(enumerate(range(count))))


@pytest.mark.parametrize(("temperature", "largest"), [(0.0, TREE), (0.8, CHAIN)])
@pytest.mark.parametrize("name", KINDS)
def test_replayed_drafts_are_the_proposers_own(
    name: str, temperature: float, largest: dict[str, Any]
) -> None:
    kind, traces, meta = Kind(name), toy_traces(temperature)[1::2], make_meta(temperature)
    recorded = kind.recording(traces, meta, **largest)
    nodes = 0
    for smaller, budget in SMALLER:
        real = kind.proposer(**largest | smaller)
        cached = replayed(kind.config(**largest | smaller), recorded, len(traces))
        pairs = zip(
            steps(real, traces, meta, budget), steps(cached, traces, meta, budget), strict=True
        )
        for trees, again in pairs:
            assert again == trees
            nodes += sum(map(len, trees))
        assert cached.num_forwards == real.num_forwards > 0
    assert nodes > 20


@pytest.mark.parametrize(
    ("name", "temperature", "kind"),
    [
        ("parallel", 0.8, "auto"),
        ("close", 0.0, "fixed"),
        ("far", 0.8, "auto"),
    ],
)
def test_a_replay_takes_the_steps_of_the_engine(name: str, temperature: float, kind: str) -> None:
    way, options = Kind(name), {"num_speculative_tokens": 2}
    run = run_engine(3, temperature, [way.proposer(**options)], kind)
    meta, cost = replay_meta(MAX_TOKENS, temperature), frozen_cost()
    recorded = way.recording(run.traces, meta, **options)
    proposers: list[Proposer] = [replayed(way.config(**options), recorded, len(run.traces))]
    result = replay(
        run.traces,
        meta,
        proposers,
        make_planner(kind, cost),
        cost,
        drafting=DRAFTING,
        concurrency=3,
        config=limits(1),
    )
    assert result.rows == run.rows
    assert [trace.emitted for trace in result.traces] == run.emitted
    assert [trace.counters for trace in result.traces] == run.counters
    assert result.total("num_drafts") > 0


def test_what_a_draft_of_another_vocabulary_writes_is_counted(tmp_path: Any) -> None:
    traces, meta = toy_traces(0.0), make_meta(0.0)
    close, far = (Kind(name).recording(traces[:1], meta, **CHAIN) for name in PAIRS)
    assert close.forwards == (1.0, 1.0)
    first, further = far.forwards
    assert first > 3.0
    assert further < first - 2.0  # two levels more, whatever is drafted
    path = tmp_path / "drafts"
    write_drafts(path, far)
    assert read_drafts(path, far.key).forwards == far.forwards


def test_a_text_that_the_drafts_context_does_not_hold_is_refused() -> None:
    trace = make_trace(0, list(range(1, 40)) * 6, list(range(1, 9)))
    with pytest.raises(ConfigError, match="trace 0 is longer than the context"):
        Kind("far").recording([trace], make_meta(0.0, context=2 * TOY.max_position), **CHAIN)


def test_a_model_without_masks_is_no_parallel_draft() -> None:
    with pytest.raises(ConfigError, match="no parallel draft"):
        Recorder(parallel_config(), toy_runner(prefix_caching=False))
