"""``paceline train ngram``: its figures on the screen, its file in an engine and in a replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.api.llm import LLM, embedded_model
from paceline.request.sampling_params import SamplingParams
from paceline_lab.simulate.setup import FOOTNOTE
from tests.cli.conftest import Result

Cli = Callable[..., Result]
LINES = "for name in names:\n    print(name)\n    total += len(name)\n"


@pytest.fixture
def trained(cli: Cli, tmp_path: Path) -> tuple[Result, Path]:
    for number in range(8):
        (tmp_path / f"{number}.py").write_text(f"import x{number}\n" + LINES * 12)
    output = tmp_path / "code.ngram"
    more = ("--order", "3", "--json", "--max-size", "64K")
    return cli(
        "train", "ngram", "embedded", "--text", str(tmp_path), *more, "-o", str(output)
    ), output


def test_the_figures_of_held_out_text_are_shown(trained: tuple[Result, Path]) -> None:
    result, output = trained
    assert result.code == 0, result.err
    document = result.document
    assert document["num_bytes"] == output.stat().st_size <= 64 << 10
    assert document["num_tokens"] > 5 * document["report"]["num_tokens"] > 0
    assert document["report"]["acceptance"]["accepted"][0] > 0.5
    for words in ("with the text itself", "prompt lookup", "nats per token"):
        assert words in result.err


def test_it_drafts_for_the_embedded_target(trained: tuple[Result, Path], cli: Cli) -> None:
    model = str(trained[1])
    params = SamplingParams(max_tokens=16, temperature=0.0)
    speculative = {"method": "ngram_model", "model": model}
    with LLM("embedded", speculative_config=speculative, planner="fixed", strict=True) as llm:
        drafted = llm.generate(LINES, params)
    with LLM("embedded", speculative_config=[]) as llm:
        assert llm.generate(LINES, params).token_ids == drafted.token_ids
    assert drafted.completions[0].counters.num_accepted_tokens > 0
    single = cli(
        "run", "--method", "ngram_model", "--draft", model, "--max-tokens", "8", stdin=LINES
    )
    assert single.code == 0, single.err


def test_a_replay_takes_it_from_tokens_alone(
    trained: tuple[Result, Path], cli: Cli, tmp_path: Path
) -> None:
    prompts, folder = tmp_path / "prompts.jsonl", str(tmp_path / "traces")
    prompts.write_text(json.dumps({"prompt": LINES}))
    target = ("--max-tokens", "12", "-o", folder, "--top-logprobs", "1")
    assert cli("trace", embedded_model("target"), "--prompts", str(prompts), *target).code == 0
    config = json.dumps({"method": "ngram_model", "model": str(trained[1])})
    result = cli("simulate", folder, "--speculative-config", config, "--json")
    assert result.code == 0, result.err
    rows = result.document["rows"]
    assert rows["ngram_model 4"]["num_accepted_tokens"] > 0
    assert rows["ngram_model, tree of 16"]["num_steps"] < rows["plain"]["num_steps"]


def test_what_was_trained_on_the_replayed_prompts_is_marked(cli: Cli, tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("seen", "new")}
    for name, folder in folders.items():
        prompts = tmp_path / f"{name}.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(3)))
        target = ("--max-tokens", "12", "-o", folder, "--top-logprobs", "1")
        assert cli("trace", embedded_model("target"), "--prompts", str(prompts), *target).code == 0
    model = str(tmp_path / "seen.ngram")
    trained = cli(
        "train", "ngram", "--traces", folders["seen"], "-o", model, "--held-out-tokens", "0"
    )
    assert trained.code == 0, trained.err
    config = json.dumps([{"method": "suffix"}, {"method": "ngram_model", "model": model}])
    for name, count in (("seen", 3), ("new", 0)):
        found = cli("simulate", folders[name], "--speculative-config", config, "--json")
        assert found.code == 0, found.err
        rows = found.document["rows"]
        learnt = {row: each["num_learnt_prompts"] for row, each in rows.items()}
        assert learnt["plain"] == learnt["suffix 4"] == 0
        assert learnt["ngram_model 4"] == learnt["planner auto"] == count
        assert learnt["best drafts of each step"] == count
        stars = {line.split("  ")[0] for line in found.err.splitlines() if line[:60].count("*")}
        assert ("ngram_model 4 *" in stars) == (FOOTNOTE in found.err) == bool(count)
        assert not {star for star in stars if star.startswith(("plain", "suffix"))}
        notes = [note for note in found.document["notes"] if "was trained on answers to" in note]
        said = "seen.ngram was trained on answers to 3 of these 3 prompts"
        assert [note.startswith(said) for note in notes] == [True] * bool(count)


def test_what_cannot_be_done_is_one_line(cli: Cli, tmp_path: Path) -> None:
    output = str(tmp_path / "m")
    assert "one is needed" in cli("train", "ngram", "embedded", "-o", output).err
    missing = cli("train", "ngram", "--traces", str(tmp_path / "none"), "-o", output)
    assert (missing.code, missing.out) == (2, "")
    assert "meta.json" in missing.err
    config = json.dumps({"method": "ngram_model", "model": output})
    refused = cli("run", "--strict", "--speculative-config", config, stdin="hello")
    assert (refused.code, refused.out) == (2, "")
    assert "cannot be read" in refused.err
