"""How full engines say they are, and how many replicas that makes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.ray.autoscaling import LOAD, ByLoad, load_of
from paceline.request.engine_stats import EngineStats


def engine(**counts: int) -> float:
    info: Any = SimpleNamespace(max_num_seqs=8)
    return load_of(EngineStats(kv_blocks_total=100, **counts), info)


def wanted(*loads: float, target: float = 0.8) -> int:
    """How many replicas are asked for where these report; Serve rounds up."""
    reports = {LOAD: dict(enumerate(loads))} if loads else {}
    found, _ = ByLoad(target)(SimpleNamespace(aggregated_metrics=reports, target_num_replicas=3))
    return math.ceil(found)


def test_an_engine_is_as_full_as_what_it_has_least_of() -> None:
    assert engine() == 0
    assert engine(num_running=4, kv_blocks_used=10) == 0.5
    assert engine(num_running=4, kv_blocks_used=90) == 0.9
    assert engine(num_running=8, num_waiting=16, kv_blocks_used=90) == 3


def test_replicas_are_asked_for_as_they_fill() -> None:
    assert wanted(0.5) == 1
    assert wanted(0.9) == 2
    assert wanted(3.0) == 4  # two thirds of its requests wait
    assert wanted(0.5, 0.5, 0.5, 0.5) == 3
    assert wanted(0.1, 0.1, 0.1) == 1
    assert wanted(0.0) == 0  # Serve keeps min_replicas
    assert wanted(3.0, target=1.5) == 2


def test_without_reports_nothing_changes() -> None:
    assert wanted() == 3


@pytest.mark.parametrize("target", [0, -1.0, "0.8", True])
def test_a_target_that_is_none(target: Any) -> None:
    with pytest.raises(ConfigError, match="target is"):
        ByLoad(target)
