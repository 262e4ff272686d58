"""A replay takes the engine's own steps, and charges them what the cost table says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.api.llm import LLM
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.errors import ProposerError, TraceError
from paceline.engine.engine import Engine
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import NO_HOST_TIME, HostTime, StepShape
from paceline.planner.drafts import TextDrafter
from paceline.planner.pace import StepReport
from paceline.planner.planner import PLANNERS, CostAwarePlanner, FixedPlanner, Planner
from paceline.planner.value import DraftingCost, DraftTime
from paceline.proposers.base import Proposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from paceline_lab.simulate.recorded_drafts import CachedDrafts
from paceline_lab.simulate.replay import replay, verdict_of
from paceline_lab.simulate.simulator import Simulator
from tests.benchmarks.predicted import predict_times
from tests.lab.test_drafts import toy_drafter, toy_recording
from tests.lab.toy_traces import SEED, frozen_cost, make_meta, make_trace
from tests.toy import EOS, TOY, draft_config, lookup_config, toy_runner

MAX_TOKENS = 32
DRAFTING = DraftingCost(
    {"prompt_lookup": DraftTime(call=0.02), "draft_model": DraftTime(0.1, 0.08, 0.002)}
)
CURVE = (1.0, 1.05, 1.08, 1.1, 1.9, 2.0)
LOOKUP = lookup_config(num_speculative_tokens=6, max_branching=3, max_tree_nodes=10)
DRAFT = draft_config(num_speculative_tokens=5)
BUSY = HostTime(step=0.2, request=0.02, draft=0.05, ask=0.04, node=0.01, merge=0.1)


def make_planner(kind: str, cost: CostModel) -> Planner:
    return FixedPlanner() if kind == "fixed" else CostAwarePlanner(cost)


def make_prompts() -> list[list[int]]:
    """Of 4 to 84 tokens; every other one repeats itself."""
    random = np.random.default_rng(3)
    drawn = [random.integers(1, TOY.vocab_size, 4 + 20 * i).tolist() for i in range(5)]
    return [(tokens * 9)[: len(tokens) + 20] if i % 2 else tokens for i, tokens in enumerate(drawn)]


def limits(concurrency: int) -> EngineConfig:
    return EngineConfig(
        max_model_len=TOY.max_position,
        max_num_seqs=concurrency,
        max_num_batched_tokens=48,  # prompts are read in several chunks,
        max_step_ms=3.0,  # and in smaller ones beside those who decode
        enable_prefix_caching=False,
    )


class Steps:
    """What an engine did: rows of each step, and what each request emitted in each of its own."""

    def __init__(self, engine: Engine, temperature: float) -> None:
        for index, prompt in enumerate(make_prompts()):
            params = SamplingParams(
                max_tokens=MAX_TOKENS, temperature=temperature, seed=SEED + index
            )
            engine.add_request(prompt, params)
        requests = list(engine.requests.values())
        self.rows: list[int] = []
        self.emitted: list[list[int]] = [[] for _ in requests]
        while engine.has_work:
            before = engine.stats().num_rows
            for output in engine.step():
                self.emitted[output.request_id].append(len(output.token_ids))
            self.rows.append(engine.stats().num_rows - before)
        self.counters = [request.counters for request in requests]
        self.traces = [
            make_trace(request.request_id, request.token_ids[:length], request.token_ids[length:])
            for request in requests
            for length in [request.prompt_len]
        ]


def run_engine(
    concurrency: int,
    temperature: float,
    proposers: Sequence[Proposer] = (),
    kind: str = "fixed",
    curve: Sequence[float] = CURVE,
    host: HostTime = NO_HOST_TIME,
) -> Steps:
    cost = frozen_cost(curve, host)
    engine = Engine(toy_runner(), limits(concurrency), proposers, [EOS])
    predict_times(engine, make_planner(kind, cost), cost, DRAFTING)
    return Steps(engine, temperature)


def assert_same_steps(
    kind: str,
    concurrency: int,
    steps: Steps,
    proposers: Sequence[Proposer],
    curve: Sequence[float] = CURVE,
    host: HostTime = NO_HOST_TIME,
    **meta: Any,
) -> None:
    cost = frozen_cost(curve, host)
    result = replay(
        steps.traces,
        make_meta(MAX_TOKENS, **meta),
        proposers,
        make_planner(kind, cost),
        cost,
        drafting=DRAFTING,
        concurrency=concurrency,
        config=limits(1),
    )
    assert result.rows == steps.rows
    assert [trace.emitted for trace in result.traces] == steps.emitted
    assert [trace.counters for trace in result.traces] == steps.counters
    assert result.total("num_accepted_tokens") > 0


@pytest.mark.parametrize("kind", ["fixed", "auto"])
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_takes_the_steps_of_the_engine(
    kind: str, concurrency: int, temperature: float
) -> None:
    steps = run_engine(concurrency, temperature, [PromptLookupProposer(LOOKUP)], kind)
    assert_same_steps(kind, concurrency, steps, [PromptLookupProposer(LOOKUP)])
    ends = [len(trace.output_token_ids) < MAX_TOKENS for trace in steps.traces]
    assert any(ends)  # ends that nobody foresees
    assert not all(ends)  # and those at the limit


@pytest.mark.parametrize("host", [NO_HOST_TIME, BUSY], ids=["no host", "busy host"])
@pytest.mark.parametrize("kind", ["fixed", "auto"])
def test_drafts_of_a_model_replay_from_a_recording(kind: str, host: HostTime) -> None:
    meta = make_meta(MAX_TOKENS, 0.8)
    proposers = [toy_drafter(DRAFT), PromptLookupProposer(LOOKUP)]
    steps = run_engine(3, 0.8, proposers, kind, host=host)
    recording = toy_recording(DRAFT, steps.traces, meta)
    cached = CachedDrafts(DRAFT, recording, dict(enumerate(range(len(steps.traces)))))
    replayed = [cached, PromptLookupProposer(LOOKUP)]
    assert_same_steps(kind, 3, steps, replayed, host=host, temperature=0.8)


def test_the_embedded_model_takes_the_steps_of_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SpeculativeConfig(num_speculative_tokens=8)
    cost, rows = frozen_cost(), list[int]()

    def freeze(engine: Engine) -> None:
        predict_times(engine, CostAwarePlanner(cost), cost, DRAFTING)
        monkeypatch.setattr(cost, "observe", lambda shape, ms: rows.append(shape.rows))

    texts = ["def add(a, b):\n    return a", "1, 2, 3, 1, 2, 3, 1,", "Once upon a time", "import"]
    wishes = [SamplingParams(max_tokens=40, temperature=t, seed=3) for t in (0.0, 0.0, 0.8, 0.8)]
    with LLM(
        "embedded", speculative_config=config, max_num_seqs=2, enable_prefix_caching=False
    ) as llm:
        llm.call(freeze)
        outputs = llm.generate(texts, wishes)
    monkeypatch.undo()
    traces = [make_trace(i, o.prompt_token_ids, o.token_ids) for i, o in enumerate(outputs)]
    planner = CostAwarePlanner(cost)
    lookup = PromptLookupProposer(config)
    result = replay(
        traces, make_meta(40), [lookup], planner, cost, drafting=DRAFTING, concurrency=2
    )
    assert result.rows == rows
    counters = [output.completions[0].counters for output in outputs]
    assert [trace.counters for trace in result.traces] == counters
    assert result.total("num_accepted_tokens") > 20


def test_time_is_what_the_table_says_and_is_shared_out() -> None:
    cost, prompt = frozen_cost(), [7, 7, 7, 7]
    lookup = lookup_config(num_speculative_tokens=3)
    traces = [make_trace(0, prompt, [7] * 9), make_trace(1, prompt, [9, 8, 6, 5, 4, 3, 2, 1])]
    result = replay(
        traces,
        make_meta(9),
        [PromptLookupProposer(lookup)],
        FixedPlanner(),
        cost,
        drafting=DRAFTING,
    )
    assert result.traces[0].emitted == [1, 4, 4]
    steps = [StepShape(4, 0, 0, 1), StepShape(4, 4 * 4, 4, 4), StepShape(4, 4 * 8, 8, 4)]
    forward_ms = sum(map(cost.predict, steps))
    assert result.traces[0].draft_ms == pytest.approx(2 * 0.02)
    assert result.traces[0].ms == pytest.approx(forward_ms + 2 * 0.02)
    assert sum(result.traces[1].emitted) == 8

    def together(*proposers: Proposer) -> Any:
        return replay(traces, make_meta(9), proposers, FixedPlanner(), cost, concurrency=2)

    drafted, plain = together(PromptLookupProposer(lookup)), together()
    assert plain.traces[0].emitted == [1] * 9
    # Who drafts pays for the nodes: its neighbour's share of each step is a plain one.
    shares = [trace.ms / len(trace.emitted) for trace in drafted.traces]
    assert shares[0] > 1.03 * shares[1]


def test_what_the_host_takes_is_added_to_each_step() -> None:
    host = HostTime(step=0.5, request=0.1, draft=0.3)
    traces = [make_trace(0, [7, 7, 7, 7], [7] * 9)]
    lookup = lookup_config(num_speculative_tokens=3)

    def run(cost: CostModel) -> Any:
        return replay(traces, make_meta(9), [PromptLookupProposer(lookup)], FixedPlanner(), cost)

    quick, slower = run(frozen_cost()), run(frozen_cost(host=host))
    assert quick.rows == slower.rows
    assert slower.ms == pytest.approx(quick.ms + 3 * 0.5 + 2 * 0.3)


def test_asking_its_calls_and_nodes_are_charged() -> None:
    host = HostTime(step=0.5, draft=0.3, ask=0.2, node=0.01, calls={"prompt_lookup": 0.04})
    traces = [make_trace(0, [7, 7, 7, 7], [7] * 9)]
    lookup = lookup_config(num_speculative_tokens=3)
    config = EngineConfig(max_num_seqs=1)

    def run(host: HostTime) -> Any:
        table = frozen_cost(host=host).table
        simulator = Simulator(traces, make_meta(9), table, {}, _no_drafts, config)
        return simulator.run((lookup,), PLANNERS["fixed"])

    free, charged = run(HostTime()), run(host)
    assert free.rows == charged.rows == [4, 4, 4]
    each = 0.5 + 0.2 + 0.04 + 0.3 + 3 * 0.01  # in two steps; the first one reads the prompt
    assert charged.ms == pytest.approx(free.ms + 0.5 + 2 * each)


def test_each_tree_beyond_a_requests_first_is_merged_at_a_charge() -> None:
    traces = [make_trace(0, [7, 7, 7, 7], [7] * 9), make_trace(1, [5, 6], [1, 2, 3, 4])]

    def run(host: HostTime) -> Any:
        lookups = [PromptLookupProposer(lookup_config(num_speculative_tokens=n)) for n in (1, 3)]
        lookups[1].name = "another"
        return replay(traces, make_meta(9), lookups, FixedPlanner(), frozen_cost(host=host))

    free, charged = run(NO_HOST_TIME), run(HostTime(merge=0.1))
    assert free.rows == charged.rows
    assert free.traces[0].emitted == [1, 4, 4]
    assert charged.traces[0].ms == pytest.approx(free.traces[0].ms + 2 * 0.1)
    assert charged.traces[1].ms == free.traces[1].ms, "nothing repeats itself there"


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_planner_is_told_what_a_replay_charges(concurrency: int) -> None:
    cost, noted_ms = frozen_cost(host=BUSY), list[float]()

    class Noting(CostAwarePlanner):
        def end(self, report: StepReport) -> None:
            noted_ms.append(report.total_ms)
            super().end(report)

    lookups = [PromptLookupProposer(lookup_config(num_speculative_tokens=n)) for n in (6, 2)]
    lookups[1].name = "another"
    traces = [make_trace(i, [7 + i] * 4, [7 + i] * 30) for i in range(3)]
    result = replay(
        traces,
        make_meta(32),
        lookups,
        Noting(cost),
        cost,
        drafting=DRAFTING,
        concurrency=concurrency,
    )
    assert result.draft_ms > 0.0
    assert result.ms == pytest.approx(sum(noted_ms))


def _no_drafts(config: SpeculativeConfig) -> Any:
    raise AssertionError("nobody here drafts by forwards")


def test_a_proposer_that_fails_gives_no_figures() -> None:
    class Broken(PromptLookupProposer):
        def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
            raise ValueError("broken")

    trace = make_trace(0, [1, 2], [3, 4, 5])
    with pytest.raises(ProposerError):
        replay([trace], make_meta(3), [Broken(LOOKUP)], FixedPlanner(), frozen_cost())


@pytest.mark.parametrize(("output", "allowed"), [([], 4), ([1, 2, 3], 2)])
def test_traces_that_no_engine_makes_are_refused(output: list[int], allowed: int) -> None:
    with pytest.raises(TraceError, match="trace 0 has"):
        replay(
            [make_trace(0, [1, 2], output)],
            make_meta(allowed),
            [],
            FixedPlanner(),
            frozen_cost(),
        )


TREE = DraftTree([5, 6, 7, 8], [-1, -1, 1, 2], [0.5] * 4, ["a", "b", "b", "c"])


@pytest.mark.parametrize(
    ("log", "path", "tokens", "origins"),
    [
        ([1, 6, 7, 9], [0, 2, 3], [6, 7, 9], ["b", "b", "target"]),
        ([1, 4, 7, 9], [0], [4], ["target"]),
        ([1, 6, 7, 8, 2], [0, 2, 3, 4], [6, 7, 8, 2], ["b", "b", "c", "target"]),
        # The last token of all was drafted: it is emitted, and no root of another step.
        ([1, 6, 7], [0, 2], [6, 7], ["b", "b"]),
    ],
)
def test_a_log_says_what_is_accepted(
    log: list[int], path: list[int], tokens: list[int], origins: list[str]
) -> None:
    verdict = verdict_of(TREE, log, 1)
    assert (list(verdict.path), list(verdict.token_ids)) == (path, tokens)
    assert list(verdict.origins) == origins


def test_periodic_text_commits_five_tokens_per_step_at_four_drafted() -> None:
    period = [5, 9, 2, 7, 11, 3]
    traces = [make_trace(0, period * 3, (period * 30)[:150])]
    proposer = PromptLookupProposer(SpeculativeConfig(num_speculative_tokens=4))
    result = replay(traces, make_meta(150), [proposer], FixedPlanner(), frozen_cost())
    emitted = result.traces[0].emitted
    # The first token comes with the prompt, and the last step has less left to emit.
    assert set(emitted[1:-1]) == {5}
