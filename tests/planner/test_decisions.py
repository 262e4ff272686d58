"""The planner decides as it did: whom it asks, and which nodes it chooses, step by step.

A change that is meant to change decisions writes what is compared here anew, with
``python -m tests.planner.decisions``, and says in which way the new ones are better.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.planner.decisions import FEW, KNOWN, MANY, answers, cells, decisions, rounding


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(KNOWN.read_text(encoding="utf-8"))
    if document["rounding"] != rounding():
        pytest.skip("exp and log round otherwise here than where the decisions were taken down")
    return document


@pytest.mark.parametrize("name", cells())
def test_decisions_are_those_of_before(name: str, known: dict[str, Any]) -> None:
    assert cells()[name].run(answers(FEW)) == known["few"][name]


@pytest.mark.slow
def test_so_they_are_over_many_answers(known: dict[str, Any]) -> None:
    assert decisions(MANY) == known["many"]
