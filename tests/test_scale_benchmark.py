"""The benchmarks of replicas: what agents ask, what routing is counted and simulated to bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import RequestError
from paceline.planner.cost import CostModel
from paceline.planner.cost_points import CostPoint
from paceline.planner.cost_table import CostTable
from tests.programs import module


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with a trace of six requests, a second apart."""
    found = module("agent_requests")
    trace = tmp_path / found.TRACE
    trace.parent.mkdir()
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:0{i}.0000000,{900 + i},{i * 30}\n" for i in range(6))
    )
    edits = [f"def f{i}(a, b):\n    return a + b\n" * 40 for i in range(8)]
    monkeypatch.setattr(found, "data_folder", lambda: tmp_path)
    monkeypatch.setattr(found, "load_prompts", lambda source: _Sets(edits))
    return found


class _Sets:
    def __init__(self, edits: list[str]) -> None:
        self._edits = edits

    def kind(self, kind: str) -> list[str]:
        assert kind == "edit"
        return self._edits


def test_agents_ask_at_the_times_and_lengths_of_the_trace(agents: Any) -> None:
    asked = agents.turns(6, 2)
    assert [turn.seconds for turn in asked] == [0, 1, 2, 3, 4, 5]
    assert [turn.max_tokens for turn in asked] == [8, 30, 48, 48, 48, 48]
    assert [len(turn.text) for turn in asked] == [180, 180, 180, 180, 180, 181]
    assert {turn.agent for turn in asked} == {0, 1}


def test_without_the_trace_routing_is_left_out(agents: Any, tmp_path: Path) -> None:
    (tmp_path / agents.TRACE).unlink()
    with pytest.raises(RequestError, match="cannot read the trace"):
        agents.turns(6, 2)


@pytest.mark.slow
def test_affinity_reads_less_and_says_the_same(agents: Any) -> None:
    asked = agents.turns(6, 2)
    rows, answers = zip(*(agents.routed(arm, asked, 2) for arm in agents.ARMS), strict=True)
    assert len({tuple(each) for each in answers}) == 1
    assert all(row["routed"] == 6 for row in rows)
    by_arm = {row["arm"]: row["hit_rate"] for row in rows}
    assert by_arm[agents.TURNS] < by_arm[agents.AFFINITY] <= by_arm[agents.ONE]


# Simulated replicas

TABLE = CostTable("toy", [CostPoint(1, 0, 1, 1, 2.0), CostPoint(1, 0, 512, 512, 513.0)])
"""A row takes a millisecond, a step one more."""
fleet = module("simulated_replicas")


def ask(prompt_len: int, output_len: int, parts: Any = ()) -> Any:
    kept = tuple(parts)
    parts = kept[: prompt_len // fleet.PART_TOKENS]
    return fleet.Ask(fleet.Caller(0), prompt_len, output_len, 0, parts, kept)


def served(asked: Any, size: int, arm: str, num_parts: int = 1 << 20) -> Any:
    """A request comes each second."""
    found = fleet.Fleet(size, CostModel(TABLE, learns=False), num_parts)
    found.serve(range(len(asked)), iter(asked), fleet.chooser(arm, size))
    return found


def test_a_simulated_replica_takes_what_the_table_says() -> None:
    found = served([ask(100, 3), ask(1000, 1)], 1, fleet.TURNS)
    assert found.waits == pytest.approx([0.101, 0.513 + 0.489])  # the second one in two chunks
    assert found.ended == pytest.approx(2.002)
    (replica,) = found.replicas.values()
    assert replica.busy == pytest.approx(0.101 + 2 * 0.002 + 1.002)


def test_what_was_read_before_is_not_read_again() -> None:
    asked = [ask(640, 1, range(10)) for _ in range(3)]
    found = served(asked, 1, fleet.TURNS)
    # All but the last token is found; the first prompt is read in two steps.
    assert found.waits == pytest.approx([0.513 + 0.129, 0.002, 0.002])
    assert served(asked, 1, fleet.TURNS, num_parts=0).waits == pytest.approx([0.642] * 3)


def test_affinity_sends_a_prompt_where_its_beginning_is() -> None:
    asked = [ask(640, 1, range(100 * (i % 3), 100 * (i % 3) + 10)) for i in range(30)]
    cached = {
        arm: sum(each.num_cached_tokens for each in served(asked, 4, arm).replicas.values())
        for arm in (fleet.TURNS, fleet.AFFINITY)
    }
    assert cached[fleet.AFFINITY] == 27 * 639
    assert cached[fleet.TURNS] == 18 * 639  # each of three prompts is read by four replicas


def test_callers_go_on_with_what_they_said(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "data_folder", agents.data_folder)
    folder = agents.data_folder() / "traces"
    rows = ["2023-11-16 18:17:00.0,300,20", "2023-11-16 18:17:01.0,400,10"]
    rows += ["2023-11-16 18:17:02.0,350,5"]
    (folder / "azure_llm_inference_conv.csv").write_text("\n".join(["a,b,c", *rows]))
    found = fleet.asks(fleet.recorded("conv", 3), 1)
    first = next(found)
    first.caller.is_waiting = False
    second = next(found)
    second.caller.is_waiting = False
    third = next(found)
    assert [each.known for each in (first, second, third)] == [256, 320, 256]
    assert second.kept[:5] == first.kept[:5]
    assert third.kept[:4] == first.kept[:4]  # the instructions
    assert third.kept[4] != first.kept[4]
    assert len(first.parts) == 4


def test_who_waits_for_an_answer_does_not_ask(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "data_folder", agents.data_folder)
    first, second = fleet.asks(fleet.recorded("code", 2), 1)
    assert first.caller is not second.caller
    assert second.known == 256  # the instructions


def test_what_a_running_request_has_read_is_not_read_again() -> None:
    asked = [ask(640, 4000, range(80)), ask(640, 1, range(10))]
    first, second = served(asked, 1, fleet.TURNS).waits
    assert first == pytest.approx(0.513 + 0.129)
    assert second < 0.01
