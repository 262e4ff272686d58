"""``paceline explain`` and ``run --explain`` as a user calls them, and how steps look."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.explain import GREEN, StepView, summary_lines, verdict_lines
from paceline.planner.cost_table import StepShape
from paceline.profiling.chrome_trace import StepTimes
from paceline.profiling.explain import AskedProposer, Cut, NodeRecord, RequestPart, StepRecord
from paceline.profiling.explain_run import ExplainedRun, Explanation
from tests.cli.conftest import Result

Cli = Callable[..., Result]
CODE = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"


# --- the command ---------------------------------------------------------------------------------


def test_a_prompt_step_by_step(cli: Cli, tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "run.svg"
    files = ("--trace", str(trace), "--plot", str(plot))
    result = cli("explain", "-p", CODE, "--max-tokens", "24", "--seed", "7", "--json", *files)
    assert result.code == 0
    assert "step 1: " in result.err
    document = result.document
    verdict, *_ = document["verdict"]
    assert verdict.startswith("24 tokens took ")
    assert verdict.endswith("; output identical to plain decoding's")
    lines = result.err.splitlines()
    assert lines.index(verdict) < next(i for i, x in enumerate(lines) if x.startswith("step 1: "))
    assert "\x1b" not in result.out + result.err
    assert (document["seed"], document["identical"], len(document["token_ids"])) == (7, True, 24)
    steps = document["steps"]
    assert document["text"].endswith("".join(step["text"] for step in steps))
    emitted = [token for step in steps for part in step["requests"] for token in part["token_ids"]]
    assert emitted == document["token_ids"][1:]
    nodes = [node for step in steps for part in step["requests"] for node in part["nodes"]]
    assert sum(each["num_candidates"] for each in document["proposers"]) == len(nodes) > 0
    assert all(node["text"] for node in nodes)
    assert steps[1]["predicted_ms"] > 0.0
    events = json.loads(trace.read_text())["traceEvents"]
    wide = [event for event in events if event["name"] == "step" and event["tid"] == 1]
    assert [event["args"]["rows"] for event in wide] == [step["shape"]["rows"] for step in steps]
    assert plot.read_text().startswith("<?xml")


def test_some_steps_only(cli: Cli) -> None:
    out = cli(
        "explain", "-p", CODE, "--max-tokens", "12", "--planner", "fixed", "--steps", "2-3"
    ).out
    shown = {line.split()[1].rstrip(":") for line in out.splitlines() if line.startswith("step")}
    assert shown <= {"2", "3", "2-3"}
    assert "2" in shown or "2-3" in shown


def test_the_prompt_may_follow_the_model(cli: Cli) -> None:
    arguments = ("explain", "embedded", "--max-tokens", "4", "--seed", "7", "--json")
    named, option = cli(*arguments, "a", "b"), cli(*arguments, "-p", "a b")
    assert named.document["token_ids"] == option.document["token_ids"]
    assert cli("explain", "embedded", "--max-tokens", "4", stdin="a b").code == 0
    assert "explain needs a prompt: give one after MODEL" in cli("explain", "embedded").err


def test_steps_that_there_are_not(cli: Cli) -> None:
    arguments = ("explain", "-p", CODE, "--max-tokens", "4", "--planner", "fixed", "--json")
    result = cli(*arguments, "--steps", "99")
    count = len(result.document["steps"])
    assert result.code == 0
    assert f"the last step is step {count}: there is no step 99" in result.err
    assert "there is no step" not in cli(*arguments, "--steps", f"{count}").err


def never(*_: object, **__: object) -> Any:
    raise AssertionError("no model may be loaded")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--seed", "1"), "explain needs a prompt"),
        (("-p", "x", "--no-speculation"), "leave out --no-speculation"),
        (("-p", "x", "--steps", "0-3"), "--steps has '0-3'"),
        (("-p", "x", "--plot", "run.bmp"), "allowed: files in .png, .svg, .pdf"),
        (("-p", "x", "--plot", "nowhere/run.png"), "no folder nowhere"),
        (("-p", "x", "--trace", "nowhere/run.json"), "no folder nowhere"),
        (("-p", "x", "--temperature", "-1"), "temperature is -1.0; allowed:"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    monkeypatch.setattr("paceline.api.llm.LLM", never)
    result = cli("explain", *arguments)
    assert (result.code, result.out) == (2, "")
    assert problem in result.err


def test_run_writes_a_trace_of_plain_steps_too(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ("run", "-p", "x", "--max-tokens", "4", "--trace", str(path))
    assert cli(*arguments, "--no-speculation").code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "forward" for event in events) == 4
    refused = cli(*arguments, "--compare")
    assert refused.code == 2
    assert "--trace and --compare cannot be used together" in refused.err


# --- the view ------------------------------------------------------------------------------------


def node(
    token_id: int, parent: int, depth: int, cut: Cut | None, is_right: bool | None
) -> NodeRecord:
    return NodeRecord(token_id, parent, depth, "a", 0.5, 0.5**depth, cut, is_right)


def record(
    index: int, position: int, emitted: list[int], nodes: list[NodeRecord], **more: Any
) -> StepRecord:
    asks = [AskedProposer("a", 1, 0, 0.125, 0.0, 0.25, len(nodes)), AskedProposer("b", 0, 1)]
    part = RequestPart(0, position, emitted, nodes)
    fields = {"growth": [1.0, 1.25, 1.5, 2.0], "rate": 1.0, "predicted_ms": 1.25} | more
    return StepRecord(
        index,
        StepShape(2, 0, 0, 2),
        asks if nodes else [],
        [part],
        forward_ms=2.0,
        total_ms=3.0,
        num_decoding=1,
        num_emitted=len(emitted),
        **fields,
    )


def explanation(records: list[StepRecord], token_ids: list[int]) -> Explanation:
    plain = [StepTimes(0.0, {"forward": 0.004}, 1, 0, 0, 1) for _ in token_ids]
    fast = [StepTimes(0.0, {"forward": 0.002}, 1, 0, 0, 1) for _ in token_ids]
    return Explanation([9], ExplainedRun(token_ids, fast), ExplainedRun(token_ids, plain), records)


def view(records: list[StepRecord], token_ids: list[int], coloured: bool = False) -> StepView:
    run = explanation(records, token_ids)
    return StepView(
        run, "prompt\n", [f"<{i}>" for i in token_ids], lambda i: f"t{i}\x1b", coloured, 1e5
    )


NODES = [
    node(1, -1, 1, None, True),
    node(2, 0, 2, None, False),
    node(3, 0, 2, Cut.COST, True),
    *(node(4 + i, 1, 3, Cut.COST, None) for i in range(6)),
    node(11, -1, 1, Cut.DEPTH, False),
]


def test_a_step_shows_what_became_of_each_node() -> None:
    shown = view([record(0, 2, [1, 3], NODES)], [0, 1, 3], coloured=True)
    lines = list(shown.lines([]))
    text = "\n".join(lines)
    assert 'step 1  "prompt\\n<0>"' in lines[1]
    assert "a drafted 10 in 0.25 ms; tokens it had to bring: 0.125 for the first node" in lines[2]
    assert "b was passed over" in lines[3]
    accepted = [line for line in lines if "accepted" in line]
    assert len(accepted) == 1
    assert GREEN in accepted[0]
    assert '"t1\u241b"' in accepted[0]
    assert "t2\u241b" in text
    assert "rejected" in text
    assert "not worth it, but was right" in text
    assert "... and 3 not worth it" in text
    ending = "2 of 10 nodes verified: the next would bring 0.250 tokens and cost 0.500; 1 too deep"
    assert ending in text
    assert "forward 1.25 predicted, 2.00 ms measured, step 3.00, 2.00x plain so far" in lines[-1]
    assert lines[-1].endswith('+2 "<1><3>"')


def test_a_step_of_a_mixture_says_how_many_experts_it_read() -> None:
    read = record(0, 2, [1, 3], NODES)
    read = replace(read, shape=read.shape._replace(experts=37))
    *_, last = view([read], [0, 1, 3]).lines([])
    assert "2.00 ms measured (37 experts read, 3.7 MB), step 3.00" in last


def test_steps_without_candidates_are_one_line() -> None:
    records = [record(i, 2 + i, [i + 1], []) for i in range(3)]
    records.append(record(3, 5, [4], NODES[:2]))
    lines = list(view(records, [0, 1, 2, 3, 4]).lines([]))
    assert lines[1] == (
        'steps 1-3: plain, no proposer was asked; 3.00 ms each, 2.00x plain so far; +3 "<1><2><3>"'
    )
    assert lines[2].startswith("step 4")
    assert list(view(records, [0, 1, 2, 3, 4]).lines([2]))[1].startswith("step 2: plain")
    records[1] = replace(records[1], asks=[AskedProposer("a", 1, 0)])
    lines = list(view(records, [0, 1, 2, 3, 4]).lines([]))
    assert "steps 1-3: plain, asked in vain in 1; 3.00 ms each" in lines[1]


def test_the_verdict_claims_no_more_than_the_saved_steps_allow() -> None:
    nothing = explanation([], list(range(32)))
    assert list(verdict_lines(nothing)) == [
        "32 tokens took 31 steps instead of 31 after the prompt: the speed-up could not be "
        "measured: a plain step took 2.0 times as long as a speculative one, which does more work, "
        "so the machine must have been busy; measure again; output identical to plain decoding's"
    ]
    # Half the steps, each as long as a plain one: twice as fast, and no more.
    pair = StepTimes(0.0, {"forward": 0.004}, 2, 1, 1, 2)
    drafted = replace(
        nothing,
        speculative=ExplainedRun(list(range(33)), [nothing.plain.steps[0], *[pair] * 16]),
        plain=ExplainedRun(list(range(33)), [nothing.plain.steps[0]] * 33),
        records=[record(0, 2, [1, 3], NODES)],
    )
    assert list(verdict_lines(drafted)) == [
        "33 tokens took 16 steps instead of 32 after the prompt: 2.00x faster (1.82x to 2.00x); "
        "output identical to plain decoding's",
        "2 drafted tokens were checked, 1 accepted (1 of a)",
    ]
    other = replace(drafted, plain=ExplainedRun([7], [nothing.plain.steps[0]]))
    assert list(verdict_lines(other)) == [
        "33 tokens took 16 steps; output DIFFERENT from plain decoding's"
    ]


def test_the_last_line_says_how_well_costs_were_predicted() -> None:
    *_, last = summary_lines(explanation([record(0, 2, [1, 3], NODES)], [1, 3]))
    assert last == "forwards took as long as predicted, within 38% (median)"


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
