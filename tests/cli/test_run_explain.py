"""``paceline run --explain``: what ``paceline explain`` shows, of what ``run`` was told to run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.test_explain import CODE, Cli, never


def without_times(shown: str) -> str:
    """What is shown less whatever a clock says, and the columns that depend on it."""
    lines = [line for line in shown.splitlines() if " tokens took " not in line]
    text = re.sub(r"\d+%", "#", re.sub(r"\d+\.\d+", "#", "\n".join(lines)))
    return re.sub(r"[ -]+", " ", text)


def test_run_explains_what_explain_explains(cli: Cli, tmp_path: Path) -> None:
    # The fixed planner drafts whatever the clock says.
    sampled = ("--temperature", "0.8", "--seed", "7", "--max-tokens", "24", "--planner", "fixed")
    common = (*sampled, "--method", "ngram_model", "-k", "3", "--json")
    path, trace = tmp_path / "one.jsonl", tmp_path / "trace.json"
    path.write_text(json.dumps({"prompt": CODE}))
    explained = cli("explain", "-p", CODE, *common)
    found = [
        cli("run", "--explain", "-p", CODE, *common, "--trace", str(trace)),
        cli("run", "--explain", "--prompts", str(path), *common),
    ]
    expected = explained.document
    assert any(part["nodes"] for step in expected["steps"] for part in step["requests"])
    for result in found:
        assert result.code == 0
        assert without_times(result.err) == without_times(explained.err)
        document = result.document
        assert document.keys() == expected.keys()
        for name in ("token_ids", "text", "seed", "temperature", "speculative_config"):
            assert document[name] == expected[name]
        for one, other in zip(document["steps"], expected["steps"], strict=True):
            assert (one["shape"], one["requests"]) == (other["shape"], other["requests"])
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["paceline", "speculative", "plain"]
    unfiltered = ("--top-p", "1", "--top-k", "0", "--min-p", "0")  # as explain has it
    answered = cli("run", "-p", CODE, *sampled, *unfiltered, "--no-speculation", "--json")
    (plain,) = answered.document["outputs"]
    assert (plain["token_ids"], plain["text"]) == (expected["token_ids"], expected["text"])


def test_answers_of_a_shape_are_explained(cli: Cli) -> None:
    pytest.importorskip("llguidance")
    arguments = (
        "run",
        "-p",
        "x",
        "--max-tokens",
        "9",
        "--temperature",
        "0",
        "--regex",
        "[0-9]{3}",
        "--json",
    )
    document = cli(*arguments, "--explain").document
    assert document["identical"] is True
    assert document["token_ids"] == cli(*arguments).document["outputs"][0]["token_ids"]
    assert re.fullmatch("[0-9]{3}", document["text"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("-p", "x", "--compare"), "--explain and --compare cannot be used together"),
        (("-p", "x", "--repeat", "2"), "--explain and --repeat cannot be used together"),
        (("-p", "x", "--no-speculation"), "leave out --no-speculation"),
        (("-p", "x", "--trace", "nowhere/run.json"), "no folder nowhere"),
        (("--prompts", "two.jsonl"), "--explain shows one prompt, and two.jsonl has 2"),
    ],
)
def test_what_run_cannot_explain(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.jsonl").write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    monkeypatch.setattr("paceline.api.llm.LLM", never)
    result = cli("run", "--explain", *arguments)
    assert (result.code, result.out) == (2, "")
    assert problem in result.err
