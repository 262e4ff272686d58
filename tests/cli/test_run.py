"""``paceline run`` on the embedded model, as a user calls it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.api.llm import embedded_model
from paceline.request.sampling_params import AS_LLAMA_CPP
from tests.cli.conftest import Result

Cli = Callable[..., Result]
REPORTED = {
    "device",
    "model",
    "dtype",
    "speculative_config",
    "num_prompts",
    "plain",
    "speculative",
    "speedup",
    "identical",
    "outputs",
}
ARM = {
    "seconds",
    "output_tokens",
    "tokens_per_second",
    "longest_steps",
    "num_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_rate",
    "mean_acceptance_length",
}


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"prompt": "def add(a, b):"}, {"question": "Once upon a time"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_one_prompt(cli: Cli) -> None:
    options = ("--max-tokens", "12", "--planner", "fixed")  # which drafts whatever that takes
    result = cli("run", "-p", "def add(a, b):", *options)
    assert result.code == 0
    assert result.out.strip()
    assert "\x1b" not in result.out + result.err
    banner, sampling, cut, closing = result.err.splitlines()
    assert re.fullmatch(re.escape(f"sampling: {AS_LLAMA_CPP}") + r", seed \d+", sampling)
    assert cut == "cut at the limit of 12 tokens"
    assert "suffix + ngram_model" in banner
    assert "identical to plain decoding" in banner
    assert closing.startswith("12 tokens, ")
    assert "mean acceptance length" in closing


def test_a_model_without_a_tokenizer(cli: Cli, tmp_path: Path) -> None:
    """Prompts come as token ids, and so do answers; what needs texts says that it cannot be had."""
    bare, rows = tmp_path / "bare", tmp_path / "rows.jsonl"
    shutil.copytree(
        embedded_model("target"), bare, ignore=shutil.ignore_patterns("tokenizer*.json")
    )
    rows.write_text('{"prompt": [300, 301, 302]}\n')
    options = ("--prompts", rows, "--max-tokens", "6", "--temperature", "0")
    whole = cli("run", *options, "--json").document["outputs"][0]
    result = cli("run", bare, *options, "--json")
    assert result.code == 0
    assert result.document["outputs"][0] == {**whole, "text": ""}
    *_, shown, _, _ = result.err.splitlines()
    assert shown.split() == [str(token) for token in whole["token_ids"]]
    assert cli("run", bare, *options, "--compare").code == 0
    refused = cli("run", bare, "-p", "hello")
    assert refused.code == 2
    assert "the model has no tokenizer" in refused.err


def test_answers_of_a_shape(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({**schema, "additionalProperties": False}))
    config = tmp_path / "options.json"
    config.write_text(json.dumps({"json_schema": json.loads(path.read_text())}))
    for option in (
        ("--json-schema", str(path)),
        ("--json-schema", f" {path.read_text()}"),
        ("--config", str(config)),
    ):
        shaped = cli("run", "-p", "x", "--max-tokens", "40", *option)
        assert json.loads(shaped.out)["a"] in "bc", shaped.err
    again = cli("run", "-p", "x", "--max-tokens", "9", "--regex", "[0-9]{3}", "--compare")
    assert (again.code, len(again.err) > 0) == (0, True)
    assert cli("run", "-p", "x", "--regex", "[0-9]{3}").out.strip().isdigit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", "s.json", "--regex", "a"], "cannot be used together"),
        (["--json-schema", "nowhere.json"], "cannot read --json-schema nowhere.json"),
        (["--json-schema", '{"type": '], "not valid JSON"),
        (
            ["--json-schema", json.dumps({"const": "a" * 70_000})],
            "error: --json-schema has 70012 bytes; at most 65536 are allowed",
        ),
        (["--json-schema", '{"type": "strin"}'], "error: --json-schema cannot be used: Invalid"),
        (["--regex", "["], "error: --regex cannot be used"),
        (["--regex", ""], "not empty"),
    ],
)
def test_shapes_that_are_none(cli: Cli, options: list[str], message: str) -> None:
    result = cli("run", "-p", "x", *options)
    assert result.code != 0
    assert message in result.err


def test_standard_input_is_the_prompt(cli: Cli) -> None:
    greedy = ("run", "--max-tokens", "6", "--temperature", "0")
    given = cli(*greedy, "-p", "Once upon")
    assert cli(*greedy, stdin="Once upon").out == given.out


def test_the_prompt_may_follow_the_model(cli: Cli) -> None:
    greedy = ("--max-tokens", "6", "--temperature", "0")
    given = cli("run", embedded_model("target"), *greedy, "-p", "Once upon a time")
    assert cli("run", embedded_model("target"), "Once upon", *greedy, "a", "time").out == given.out
    twice = cli("run", embedded_model("target"), "Once", "-p", "upon")
    assert twice.code == 2
    assert "the prompt is given twice" in twice.err


def test_a_pipe_is_put_behind_the_prompt(cli: Cli) -> None:
    greedy = ("run", embedded_model("target"), "--max-tokens", "6", "--temperature", "0")
    whole = cli(*greedy, "-p", "Go on:\n\nOnce upon\n").out
    assert cli(*greedy, "-p", "Go on:", stdin="Once upon\n").out == whole
    assert cli(*greedy, "Go on:", stdin="Once upon\n").out == whole
    alone = cli(*greedy, "-p", "Go on:").out
    assert alone != whole
    assert cli(*greedy, "-p", "Go on:", stdin="\n").out == alone


def test_stop_texts_and_penalties(cli: Cli) -> None:
    greedy = ("run", "-p", "def add(a, b):", "--max-tokens", "24", "--temperature", "0", "--json")
    (free,) = cli(*greedy).document["outputs"]
    middle = free["text"][len(free["text"]) // 2 :][:3]
    (cut,) = cli(*greedy, "--stop", "never said", "--stop", middle).document["outputs"]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == free["text"][: free["text"].index(middle)]
    for penalty in ("--repeat-penalty", "--presence-penalty", "--frequency-penalty"):
        (other,) = cli(*greedy, penalty, "2").document["outputs"]
        assert other["token_ids"] != free["token_ids"]


def test_a_system_message_needs_a_template(cli: Cli) -> None:
    refused = cli("run", "-p", "x", "--system", "Be brief.")
    assert refused.code == 2
    assert "--system needs a chat template" in refused.err


def test_json_of_a_batch(cli: Cli, prompts: str) -> None:
    result = cli("run", "--prompts", prompts, "--max-tokens", "8", "--json")
    document = result.document
    assert document.keys() >= REPORTED
    assert (document["plain"], document["speedup"], document["identical"]) == (None, None, None)
    assert document["speculative"].keys() == ARM
    assert document["speculative"]["output_tokens"] == 16
    assert [c["method"] for c in document["speculative_config"]] == ["suffix", "ngram_model"]
    assert [output["prompt_index"] for output in document["outputs"]] == [0, 1]
    for output in document["outputs"]:
        assert len(output["token_ids"]) == 8
        assert output["finish_reason"] == "length"
        assert output["text"] in result.err


def test_json_of_a_stream_is_all_of_standard_output(cli: Cli) -> None:
    result = cli("run", "-p", "Once upon", "--max-tokens", "4", "--no-speculation", "--json")
    assert result.document["speculative"] is None
    assert result.document["plain"].keys() == ARM
    assert f"{result.document['outputs'][0]['text']}\n" in result.err


def test_repeat_counts_every_run_and_reports_one(cli: Cli, prompts: str) -> None:
    arguments = ("--prompts", prompts, "--max-tokens", "4", "--repeat", "2", "--json")
    document = cli("run", *arguments).document
    assert document["num_prompts"] == len(document["outputs"]) == 2
    assert document["speculative"]["output_tokens"] == 16


def test_a_seed_repeats_a_sample(cli: Cli) -> None:
    arguments = ("run", "-p", "Once upon", "--max-tokens", "12", "--temperature", "1", "--json")
    first = cli(*arguments).document
    again = cli(*arguments, "--seed", str(first["seed"]), "--no-speculation").document
    assert first["outputs"] == again["outputs"]


def test_options_from_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MAX_TOKENS", "3")
    monkeypatch.setenv("PACELINE_NO_SPECULATION", "1")
    monkeypatch.setenv("PACELINE_PROMPT", "Once")
    document = cli("run", "--json").document
    assert document["speculative_config"] == []
    assert len(document["outputs"][0]["token_ids"]) == 3
    assert cli("run", "--max-tokens", "2", "--json").document["plain"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-p", "x", "--prompts", "y"], "cannot be used together"),
        (["-p", "x", "--speculative-config", '{"gamma": 1}'], "allowed: method, model"),
        (["-p", "x", "--temperature", "-1"], "temperature is -1.0; allowed:"),
        (["-p", "x", "--dtype", "int7"], "dtype is 'int7'; allowed:"),
        (["-p", "x", "--kv-cache-memory", "lots"], "512M"),
        (["/nowhere/model", "-p", "x"], "no model /nowhere/model"),
        (["--prompts", "/nowhere/prompts"], "cannot read prompts from /nowhere/prompts"),
        (["-p", ""], "prompt is empty"),
        (["-p", "x", "--compare", "--no-speculation"], "--compare needs speculation"),
        (
            ["-p", "x", "--compare", "--pipeline-stage", "127.0.0.1:1"],
            "a stage serves one engine, and a comparison has two",
        ),
        (["-p", "x", "--chat"], "no chat template"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, arguments: list[str], problem: str) -> None:
    result = cli("run", *arguments)
    assert result.code == 2
    assert result.out == ""
    *_, line = result.err.splitlines()
    assert line.startswith("error: ")
    assert problem in line
    assert "Traceback" not in result.err


def test_a_bad_row_is_named(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"promt": "typo"}\n')
    result = cli("run", "--prompts", str(path))
    assert result.code == 2
    assert f"error: {path}, line 2: no prompt" in result.err


def test_unknown_options_are_usage_errors(cli: Cli) -> None:
    result = cli("run", "--fast")
    assert result.code == 2
    assert "No such option" in result.err


def test_a_draft_that_cannot_be_used_leaves_the_others_on(cli: Cli) -> None:
    arguments = ("run", "--draft", "no/such", "-p", "Once", "--max-tokens", "2", "--json")
    result = cli(*arguments)
    assert result.code == 0
    assert "suffix + ngram_model" in result.err
    result = cli(*arguments, "--strict")
    assert result.code != 0
    assert "no/such" in result.err
