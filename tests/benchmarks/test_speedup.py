"""The comparison of plain and speculative decoding: what its times are of."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from tests.programs import module


def sample(arm: str, seconds: float | None, first_token: float = 0.0) -> Any:
    facts = {"output_tokens": 8, "first_token_seconds": first_token, "token_ids": [[1] * 8]}
    facts |= dict.fromkeys(module("harness").COUNTED, 1)
    error = "broken" if seconds is None else None
    return module("harness").Sample(arm, 0, 0, seconds, {} if error else facts, error)


def test_a_batch_is_behind_its_prompts_when_the_last_of_them_has_its_first_token() -> None:
    speedup = module("speedup")
    counters = SimpleNamespace(**dict.fromkeys(module("harness").COUNTED, 1))
    outputs = [
        SimpleNamespace(
            error=None,
            token_ids=[1, 2],
            completions=[SimpleNamespace(time_to_first_token=seconds, counters=counters)],
        )
        for seconds in (0.25, 0.5, None)
    ]
    assert speedup.count(outputs)["first_token_seconds"] == 0.5


def test_the_time_behind_the_prompt_is_what_is_left_and_a_failure_stays_one() -> None:
    samples = [sample("a", 3.0, first_token=1.0), sample("b", None)]
    behind = module("speedup").behind_prompt(samples)
    assert [each.seconds for each in behind] == [2.0, None]
    assert [each.seconds for each in samples] == [3.0, None]


@pytest.mark.parametrize(("leaves_out", "ratio"), [(False, 1.5), (True, 2.0)])
def test_prompts_are_left_out_of_speed_ups_and_not_of_samples(
    monkeypatch: pytest.MonkeyPatch, leaves_out: bool, ratio: float
) -> None:
    """Reading takes one second in both arms: 3 seconds over 2 become 2 seconds over 1."""
    harness, speedup = module("harness"), module("speedup")
    taken = {harness.PLAIN: 3.0, speedup.DEFAULT: 2.0}
    encoder = SimpleNamespace(encode=lambda text: [1, 2, 3])
    monkeypatch.setattr(speedup, "Encoder", lambda tokenizer: encoder)
    monkeypatch.setattr(speedup, "note", lambda text: None)

    def timed(arms: Any, *_: Any) -> list[Any]:
        return [sample(arm, taken.get(arm, 3.0), first_token=1.0) for arm in arms]

    monkeypatch.setattr(speedup, "run_cell", timed)
    arms = dict.fromkeys(
        (harness.PLAIN, speedup.DEFAULT, harness.CONTROL), SimpleNamespace(tokenizer=None)
    )
    options = argparse.Namespace(
        kinds=["code"], num_prompts=1, max_tokens=8, concurrency=[2], after_first_token=leaves_out
    )
    source = module("prompt_sets").PromptSets("embedded", {"code": ["a text"]})
    report = harness.Report("speedup", {})
    speedup.run_all(arms, source, options, report)
    found = harness.pick(report.results, arm=speedup.DEFAULT)
    assert len(found) == 3  # one request at both temperatures, and a batch
    assert [row["speedup"]["value"] for row in found] == [pytest.approx(ratio)] * 3
    assert {each["seconds"] for each in report.samples} == {2.0, 3.0}
    assert {each["first_token_seconds"] for each in report.samples} == {1.0}


def test_whether_prompts_are_left_out_is_asked_and_not_assumed() -> None:
    options_of = module("speedup").options_of
    assert options_of(["--prompts", "embedded"]).after_first_token is False
    assert options_of(["--prompts", "embedded", "--after-first-token"]).after_first_token is True
