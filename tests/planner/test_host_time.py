"""Host times: the line that they describe, and what is refused."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from paceline.core.errors import ProfileError
from paceline.planner.cost_table import NO_HOST_TIME, CostTable, DraftingHostTime, HostTime
from tests.planner.machine import cost_table

DRAFTING = DraftingHostTime(call=0.1, level=0.05, request=0.02, node=0.01)


def test_a_step() -> None:
    host = HostTime(step=1.0, request=0.1, draft=0.5, further_draft=0.2)
    assert host.of(1, 0) == 1.0
    assert host.of(3, 0) == pytest.approx(1.2)
    assert host.of(3, 1) == pytest.approx(1.7)
    assert host.of(3, 3) == pytest.approx(2.1)
    assert NO_HOST_TIME.of(9, 9) == 0.0


def test_asking_and_nodes() -> None:
    host = HostTime(step=1.0, draft=0.5, ask=0.3, node=0.01, calls={"suffix": 0.02, "odd": 0.07})
    assert host.of(1, 0, asked=True) == pytest.approx(1.3), "in vain"
    assert host.of(1, 1, 16, asked=True) == pytest.approx(1.96)
    assert host.call("suffix") == 0.02
    assert host.call("not measured") == 0.07
    assert NO_HOST_TIME.call("suffix") == 0.0


def test_a_table_keeps_it() -> None:
    table = CostTable(
        "t",
        cost_table([1.0, 2.0]).points,
        host=HostTime(1.0, 0.1, 0.5, 0.2, 0.3, 0.01, {"suffix": 0.02}, 0.006, DRAFTING),
    )
    assert CostTable.from_dict(table.to_dict()).host == table.host
    document = table.to_dict()
    for key in ("ask", "node", "calls", "merge", "drafting"):  # as before these were measured
        del document["host"][key]
    assert CostTable.from_dict(document).host == HostTime(1.0, 0.1, 0.5, 0.2)
    without = {key: value for key, value in table.to_dict().items() if key != "host"}
    assert CostTable.from_dict(without).host == NO_HOST_TIME


def test_merging_and_drafting() -> None:
    host = HostTime(step=1.0, draft=0.5, ask=0.3, node=0.01, merge=0.04, drafting=DRAFTING)
    assert host.of(2, 2, 6, True, merges=2) == pytest.approx(1.94)
    assert DRAFTING.first_level(1) == 0.1
    assert DRAFTING.further_level(1) == 0.05
    assert DRAFTING.first_level(3) == pytest.approx(0.14)
    assert DRAFTING.further_level(3, nodes=2) == pytest.approx(0.05 + 2 * 0.02 + 3 * 0.01)


def test_one_model_as_a_target_and_as_a_draft() -> None:
    target, draft = HostTime(step=1.0, calls={"suffix": 0.1}), HostTime(drafting=DRAFTING)
    both = HostTime(step=1.0, calls={"suffix": 0.1}, drafting=DRAFTING)
    assert target.completed_by(draft) == draft.completed_by(target) == both
    later = HostTime(step=2.0)
    assert later.completed_by(both) == HostTime(step=2.0, drafting=DRAFTING)
    assert both.completed_by(later) == both


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        asdict(NO_HOST_TIME) | {"more": 1.0},
        asdict(NO_HOST_TIME) | {"step": -1.0},
        asdict(NO_HOST_TIME) | {"step": float("nan")},
        asdict(NO_HOST_TIME) | {"draft": "1"},
        asdict(NO_HOST_TIME) | {"draft": True},
        asdict(NO_HOST_TIME) | {"calls": {"suffix": -1.0}},
        asdict(NO_HOST_TIME) | {"calls": {"suffix": None}},
        asdict(NO_HOST_TIME) | {"calls": [1.0]},
        asdict(NO_HOST_TIME) | {"calls": {1: 1.0}},
        asdict(NO_HOST_TIME) | {"merge": -1.0},
        asdict(NO_HOST_TIME) | {"drafting": None},
        asdict(NO_HOST_TIME) | {"drafting": {}},
        asdict(NO_HOST_TIME) | {"drafting": asdict(DraftingHostTime()) | {"more": 1.0}},
        asdict(NO_HOST_TIME) | {"drafting": asdict(DraftingHostTime()) | {"level": -1.0}},
        asdict(NO_HOST_TIME) | {"drafting": asdict(DraftingHostTime()) | {"call": "1"}},
    ],
)
def test_what_is_refused(wrong: object) -> None:
    with pytest.raises(ProfileError, match="host time"):
        CostTable.from_dict(cost_table([1.0]).to_dict() | {"host": wrong})
