"""Processes that are killed at random under load: clients hear the right tokens, or an error.

``PACELINE_TEST_FAULT_SECONDS`` says how long; 600 is what a release is held to.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("ray", reason="replicas need the extra ray")

from tests.programs import module

SECONDS = float(os.environ.get("PACELINE_TEST_FAULT_SECONDS", "25"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 575)]
faults = module("replica_faults")


@pytest.mark.parametrize("name", faults.STORIES)
def test_random_deaths_cost_no_token_and_hang_no_client(name: str) -> None:
    row = faults.told(name, faults.known(), SECONDS)
    assert [target.value for target in faults.targets([row])] == [0] * 4
    assert sum(row["deaths"].values()) >= 2
    assert row["ends"]["whole"] >= faults.NUM_CLIENTS
