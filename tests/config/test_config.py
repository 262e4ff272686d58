"""Engine options: what is taken, what is refused and how.

Objectives: the forms that are taken, and what is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.config import EngineConfig, Objective, environment_name, parse_objective
from paceline.core.checks import memory_bytes
from paceline.core.errors import ConfigError
from paceline.request.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float8"},
        {"max_num_seqs": 0},
        {"max_num_seqs": 2.0},
        {"max_num_batched_tokens": 4, "max_num_seqs": 8},
        {"kv_cache_memory": -1},
        {"max_step_ms": 0.0},
        {"num_threads": 0},
        {"num_threads": 1025},
        {"load_format": "zip"},
        {"planner": "clever"},
        {"objective": "fast"},
    ],
)
def test_engine_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"allowed|below"):
        EngineConfig(**options)


def test_environment_names() -> None:
    assert environment_name("--max-num-seqs") == "PACELINE_MAX_NUM_SEQS"


def test_an_objective_is_read() -> None:
    assert EngineConfig().objective == Objective("throughput")
    assert EngineConfig(objective="latency").objective == Objective("latency")
    assert EngineConfig(objective={"tpot_ms": 20}).objective == Objective("tpot", 20)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5g", 3 << 29),
        ("64KiB", 64 << 10),
        ("10MB", 10 << 20),
        ("1048576", 1 << 20),
        ("1T", 1 << 40),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "0", "1 G B", "nan", "1e9"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="512M"):
        memory_bytes(text)


def test_amounts_of_memory_may_be_texts() -> None:
    config = EngineConfig(kv_cache_memory="2G", weight_memory="1.5G", packed_space=7)  # type: ignore[arg-type]
    assert (config.kv_cache_memory, config.weight_memory, config.packed_space) == (
        *(2 << 30, 3 << 29),
        7,
    )


def test_every_field_says_what_it_is_for() -> None:
    for config in (EngineConfig, SamplingParams):
        for field in dataclasses.fields(config):
            assert field.metadata["help"].endswith("."), field.name


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
