"""The benchmark of replicas: what agents ask, and what routing is counted to bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RequestError
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
