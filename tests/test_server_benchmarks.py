"""What the benchmarks of a served engine accept as an answer, and what they must reject."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.programs import module

DONE = "data: [DONE]\n\n"
PERSON = {"first_name": "A", "last_name": "B", "age": 3, "email": "c", "is_active": True}


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (f'data: {{"choices": []}}\n\n{DONE}', "whole"),
        (f'data: {{"error": {{"code": "engine_dead"}}}}\n\n{DONE}', "engine_dead"),
        (f'data: {{"error": {{"code": null}}}}\n\n{DONE}', "no code"),
        ('data: {"choices": []}\n\n', "cut off"),
        ("", "cut off"),
    ],
)
def test_how_a_stream_ended(text: str, end: str) -> None:
    assert module("server_faults").whole(text) == end


def test_lost_answers_and_such_without_a_code_are_told_apart_from_errors() -> None:
    faults = module("server_faults")
    row: dict[str, Any] = {"most_seconds": 1.0, "requests": 4, "left_open": 0}
    row |= {"hangs": 1, "untyped": 2, "ends": {"whole": 3}}
    targets = {target.name: target.value for target in faults.targets([row, row, row])}
    assert targets["requests that never ended"] == 3
    assert targets["requests without an answer or a code"] == 6
    assert targets["errors beside slow clients"] == 1


@pytest.mark.parametrize(
    ("text", "status", "is_stream", "told"),
    [
        ('{"choices": [{"text": "ab"}]}', 200, False, ("ab", "")),
        ('{"choices": [{"te', 200, False, ("", "lost")),
        (f'data: {{"choices": [{{"text": "ab"}}]}}\n\n{DONE}', 200, True, ("ab", "")),
        ('data: {"choices": [{"text": "a"}]}\n\ndata: {"cho', 200, True, ("a", "lost")),
        (f'data: {{"error": {{"code": "engine_dead"}}}}\n\n{DONE}', 200, True, ("", "engine_dead")),
        ('{"error": {"code": "starting"}}', 503, True, ("", "starting")),
        ("", -1, False, ("", "lost")),
    ],
)
def test_what_a_client_heard(
    text: str, status: int, is_stream: bool, told: tuple[str, str]
) -> None:
    assert module("replica_faults").heard(text, status, is_stream) == told


@pytest.mark.parametrize(
    ("text", "error", "is_wrong"),
    [
        ("abc", "", False),
        ("ab", "", True),
        ("ab", "engine_dead", False),
        ("ax", "engine_dead", True),
        ("ab", "lost", True),
        ("", "hung", False),  # counted as such
    ],
)
def test_what_of_it_is_wrong(text: str, error: str, is_wrong: bool) -> None:
    faults = module("replica_faults")
    told, expected = faults.Told(text, error), faults.Told("abc")
    assert faults.is_wrong(told, expected, faults.TYPED) is is_wrong


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        *(({"age": age}, False) for age in (121, True, "3")),
        *((change, False) for change in ({"email": ""}, {"is_active": 1}, {"more": 1})),
    ],
)
def test_what_fits_a_schema(change: dict[str, Any], is_valid: bool) -> None:
    formats = module("served_formats")
    assert formats.is_valid("person", json.dumps({**PERSON, **change})) is is_valid
    assert not formats.is_valid("person", json.dumps(PERSON)[:-1])


def test_rows_say_when_drafts_change_an_answer() -> None:
    formats = module("served_formats")
    base = {"kind": "format", "at_once": 1, "schema": "person", "seed": 0}
    same = [{**base, "drafts": drafts, "said": "a", "valid": True} for drafts in (True, False)]
    other = [same[0], {**same[1], "said": "b", "valid": False}]
    for samples, expected in ((same, (1, 1, True)), (other, (1, 0, False))):
        row = formats.summary(samples, 1, "format")
        told = row["valid_with_drafts"], row["valid_without"], row["identical"]
        assert told == expected
