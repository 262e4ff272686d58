"""The benchmark of equal answers: what it asks, how streams are read, what counts as different."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.programs import module

same = module("same_answers")
client = module("load_client")


def test_every_kind_of_options_is_asked_in_every_way() -> None:
    asked = same.requests(200, "embedded")
    assert len(asked) == 200
    told = {(path, body["stream"]) for path, body in asked}
    assert told == set(itertools.product((same.COMPLETIONS, same.CHAT), (False, True)))
    assert all(count >= 40 for count in _counts((p, b["stream"]) for p, b in asked).values())
    for name in ("n", "logprobs", "stop", "min_p", "logit_bias", "repetition_penalty"):
        assert {path for path, body in asked if name in body} == {same.COMPLETIONS, same.CHAT}
    assert {name for _, body in asked for name in body} >= {"structured_outputs", "response_format"}
    assert len({json.dumps(body["seed"]) for _, body in asked}) == 200


def _counts(values: Any) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found


def events(*pieces: tuple[int, str, float], **last: Any) -> list[dict[str, Any]]:
    """A stream of pieces: which sample, its text and its log-probability."""
    made: list[dict[str, Any]] = [
        {
            "id": f"cmpl-{number}",
            "created": number,
            "choices": [
                {
                    "index": index,
                    "text": text,
                    "logprobs": {"token_logprobs": [logprob], "tokens": [text]},
                    "finish_reason": None,
                }
            ],
            "usage": None,
        }
        for number, (index, text, logprob) in enumerate(pieces)
    ]
    return [*made, {"id": "x", "created": 9, "choices": [], "usage": {"total_tokens": 3, **last}}]


def test_a_stream_is_what_its_events_add_up_to() -> None:
    one = events((0, "a", -1.0), (1, "x", -3.0), (0, "b", -2.0))
    other = events((1, "x", -3.0), (0, "a", -1.0), (0, "b", -2.0), prompt_tokens_details=3)
    assert same.said(one) == same.said(other)
    first = json.loads(same.said(one))["choices"]["0"]
    assert (first["text"], first["logprobs"]["token_logprobs"]) == ("ab", [-1.0, -2.0])
    chat = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in ("He", "y")]
    assert json.loads(same.said(chat))["choices"]["0"]["delta"]["content"] == "Hey"


@pytest.mark.parametrize(
    "other",
    [
        events((0, "a", -1.0), (0, "c", -2.0)),
        events((0, "a", -1.0), (0, "b", -2.5)),
        events((0, "a", -1.0)),
        events((0, "a", -1.0), (0, "b", -2.0), total_tokens=4),
        [*events((0, "a", -1.0), (0, "b", -2.0)), {"error": {"code": "engine_dead"}}],
    ],
)
def test_another_answer_is_seen(other: Any) -> None:
    assert same.said(events((0, "a", -1.0), (0, "b", -2.0))) != same.said(other)


def test_answers_that_differ_or_are_none_are_counted() -> None:
    asked: list[Any] = [(same.CHAT, {}), (same.CHAT, {"n": 2})]
    row, samples = same.compared("w", asked, ['{"a": 1}', '{"a": 2}'], ['{"a": 1}', '{"a": 2}'])
    assert (row["requests"], row["differing"], samples) == (2, 0, [])
    row, samples = same.compared("w", asked, ['{"a": 1}', '{"a": 3}'], ['{"a": 1}', '{"a": 2}'])
    assert row["differing"] == 1
    assert samples[0]["request"] == [1, same.CHAT, {"n": 2}]
    assert "error" in samples[0]
    refused = ["RuntimeError: status 400"] * 2
    assert same.compared("w", asked, refused, refused)[0]["differing"] == 2
