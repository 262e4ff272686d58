"""Answers of a shape behind thoughts, from a trained model with a real grammar library.

The thoughts end where the model itself writes the end of a sentence, which are several tokens. Its
prompt holds such an end with JSON behind it, so what looks tokens up drafts across the boundary.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.request.structured_outputs import JSON_STYLE, ThoughtMarks
from tests.structured.test_structured_outputs import SCHEMA, SPECULATION

pytest.importorskip("llguidance")
MARKS = ThoughtMarks(["<think>"], [". The", '." The', ". He", ". She", ".\n"])
OPENED = replace(MARKS, opened=True)
RECORD = '{"name": "Tom", "age": 7, "role": "reader", "tags": ["a"], "active": true}'
STORY = f"Once there was a boy. He {RECORD}\nOnce there was a cat. She {RECORD}\nOnce there was a"
SUFFIX = {"method": "suffix", "min_accept_prob": 0.0}
DRAFTS = {"suffix": SUFFIX, **SPECULATION, "merged": [SUFFIX, *SPECULATION["all"]]}
STYLED = {**SCHEMA, "x-guidance": JSON_STYLE}
NUM_ANSWERS = 24


def wishes() -> list[SamplingParams]:
    """Greedy and sampled, one schema and one grammar, thoughts that are open and that may be."""
    shapes = [
        StructuredOutputs(json=SCHEMA, after=OPENED),
        StructuredOutputs(json=SCHEMA, after=MARKS),
        StructuredOutputs(grammar=f"start: %json {json.dumps(STYLED)}", after=OPENED),
    ]
    return [
        SamplingParams(
            max_tokens=160,
            temperature=(0.0, 0.6, 0.8)[i % 3],
            seed=i,
            logprobs=1,
            structured_outputs=shapes[i // 3 % 3],
        )
        for i in range(NUM_ANSWERS)
    ]


def outputs(llm: LLM) -> list[Any]:
    params = wishes()
    return [
        (c.token_ids, c.text, c.finish_reason, c.logprobs)
        for output in llm.generate([STORY] * len(params), params)
        for c in output.completions
    ]


def answer_of(text: str, opened: bool) -> str:
    """What follows the first closing mark, found without any of the engine's code."""
    if not opened and not text.startswith("<think>"):
        return text
    ends = [text.find(mark) + len(mark) for mark in MARKS.closing if mark in text]
    return text[min(ends) :] if ends else ""


def num_valid(found: list[Any]) -> int:
    """How many answers there are; each must be valid, and only thoughts may be cut short."""
    valid = 0
    for (_, text, reason, _), params in zip(found, wishes(), strict=True):
        shape = params.structured_outputs
        assert shape is not None
        assert shape.after is not None
        answer = answer_of(text, shape.after.opened)
        assert str(reason) == ("stop" if answer else "length"), text
        if answer:
            assert list(json.loads(answer)) == SCHEMA["required"]
            valid += 1
    return valid


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with LLM("embedded", speculative_config=[], max_num_seqs=1) as llm:
        return outputs(llm)


def test_every_answer_is_valid_and_thoughts_come_first(plain: list[Any]) -> None:
    assert num_valid(plain) >= NUM_ANSWERS - 3
    opened = [text for _, text, *_ in plain if not text.startswith("{")]
    assert len(opened) > NUM_ANSWERS / 2


@pytest.mark.parametrize(
    ("drafts", "at_once"),
    [
        ("suffix", 8),
        ("merged", 8),
        pytest.param("grammar", 8, marks=pytest.mark.slow),
        pytest.param("draft tree", 8, marks=pytest.mark.slow),
        pytest.param("merged", 1, marks=pytest.mark.slow),
    ],
)
def test_drafts_across_the_boundary_change_nothing(
    drafts: str, at_once: int, plain: list[Any]
) -> None:
    with LLM(
        "embedded", speculative_config=DRAFTS[drafts], planner="fixed", max_num_seqs=at_once
    ) as llm:
        assert outputs(llm) == plain
        counters = llm.stats().speculation
        assert counters.num_accepted_tokens > 0
        assert llm.stats().num_proposer_failures == 0
