"""Processes that are killed at random under load: clients hear the right tokens, or an error.

``PACELINE_TEST_FAULT_SECONDS`` says how long; 600 is what a release is held to.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("ray", reason="replicas need the extra ray")

from tests.ray.random_deaths import (
    HUNG,
    LEAST_DEATHS,
    NUM_CLIENTS,
    STORIES,
    WHOLE,
    Told,
    known,
    toll_of,
)

SECONDS = float(os.environ.get("PACELINE_TEST_FAULT_SECONDS", "25"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 575)]


@pytest.fixture(scope="module")
def expected() -> list[Told]:
    return known()


@pytest.mark.parametrize("name", STORIES)
def test_random_deaths_cost_no_token_and_hang_no_client(name: str, expected: list[Told]) -> None:
    toll = toll_of(name, expected, SECONDS)
    assert toll.wrong == []
    assert toll.ends[HUNG] == 0
    assert (toll.holding, toll.other_afterwards) == (0, 0)
    assert toll.deaths.total() >= LEAST_DEATHS
    assert toll.ends[WHOLE] >= NUM_CLIENTS
