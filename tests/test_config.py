"""Engine options: what is taken, what is refused and how."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineConfig, environment_name
from paceline.config.objective import Objective
from paceline.core.errors import ConfigError


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
