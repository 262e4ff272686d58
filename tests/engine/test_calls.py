"""How much Python a drafted step and a plain one cost: counts, which no machine changes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest

import paceline
from paceline.engine.engine import Engine
from paceline.planner.cost import CostModel
from paceline.planner.planner import CostAwarePlanner, new_drafts
from paceline.proposers.base import Proposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from tests.toy import lookup_config, toy_engine

SOURCE = str(Path(paceline.__file__).parent)
ROOMS = ("engine", "planner", "proposers", "request")
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def decoding(proposers: Sequence[Proposer], requests: int, wish: SpeculativeParams) -> Engine:
    """An engine whose planner takes drafts to be cheap, and no clock says otherwise."""
    engine = toy_engine(proposers)
    engine.clock = engine.drafting.clock = lambda: 0.0
    engine.drafting.planner = CostAwarePlanner(CostModel(learns=False), drafts=new_drafts())
    engine.drafting.replace(proposers)
    for i in range(requests):
        engine.add_request([5 + i, 6, 7] * 5, replace(LONG, speculative=wish))
    while any(request.num_uncomputed != 1 for request in engine.requests.values()):
        engine.step()
    return engine


def calls_of_step(engine: Engine) -> list[str]:
    """The files of the calls of a step in the rooms that take part in every one."""
    files: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE):
            room = name[len(SOURCE) + 1 :].split("/")[0]
            if room in ROOMS:
                files.append(name)

    sys.setprofile(count)
    engine.step()
    sys.setprofile(None)
    return files


def drafted_calls(requests: int, wish: SpeculativeParams) -> list[list[str]]:
    """The calls of those steps that verify drafts of half of the requests or more."""
    engine = decoding([PromptLookupProposer(lookup_config())], requests, wish)
    found = []
    for _ in range(30):
        before = engine.stats().speculation.num_drafts
        files = calls_of_step(engine)
        if 2 * (engine.stats().speculation.num_drafts - before) >= requests:
            found.append(files)
    return found


@pytest.mark.parametrize(("requests", "most"), [(1, 120), (4, 160)])
def test_a_drafted_step_takes_few_calls_in_few_files(requests: int, most: int) -> None:
    """Several requests demand their drafts, which would not pay for all of them here."""
    wish = SpeculativeParams(num_speculative_tokens=4 if requests > 1 else None)
    steps = drafted_calls(requests, wish)
    assert len(steps) > 3
    assert 0 < median(map(len, steps)) <= most
    assert max(len(set(files)) for files in steps) <= 18


def test_a_plain_step_takes_few_calls_in_few_files() -> None:
    engine = decoding([], 1, SpeculativeParams())
    files = calls_of_step(engine)
    assert 0 < len(files) <= 48
    assert len(set(files)) <= 11
