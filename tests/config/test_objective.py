"""Objectives: the forms that are taken, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import Objective, parse_objective
from paceline.core.errors import ConfigError


def test_forms() -> None:
    assert parse_objective("throughput") == Objective()
    assert parse_objective("latency").kind == "latency"
    wanted = Objective("tpot", 12.5)
    for source in ({"tpot_ms": 12.5}, ' {"tpot_ms": 12.5}', wanted):
        assert parse_objective(source) == wanted


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("fast", "allowed: throughput, latency"),
        ("", "allowed: throughput, latency"),
        (None, "allowed: throughput, latency"),
        (20, "allowed: throughput, latency"),
        ("tpot", "tpot_ms None"),
        ("{", "not valid JSON"),
        ("{" * 3 + '"a":' * 100_000, "not valid JSON"),
        ({}, "allowed:"),
        ({"tpot": 20}, "allowed:"),
        ({"tpot_ms": 20, "kind": "latency"}, "allowed:"),
        ({"tpot_ms": None}, "allowed:"),
        ({"tpot_ms": "20"}, "tpot_ms is '20'"),
        ({"tpot_ms": True}, "tpot_ms is True"),
        ({"tpot_ms": 0}, "tpot_ms is 0"),
        ('{"tpot_ms": NaN}', "tpot_ms is nan"),
    ],
)
def test_what_is_none(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_objective(source)


def test_a_time_belongs_to_tpot() -> None:
    with pytest.raises(ConfigError, match="latency has tpot_ms 20"):
        Objective("latency", 20)
