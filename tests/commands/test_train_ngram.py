"""``paceline train ngram``: its figures on the screen, its file in an engine and in a replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.llm import LLM, embedded_model
from paceline.sampling_params import SamplingParams
from tests.commands.conftest import Result

Cli = Callable[..., Result]
LINES = "for name in names:\n    print(name)\n    total += len(name)\n"


@pytest.fixture
def trained(cli: Cli, tmp_path: Path) -> tuple[Result, Path]:
    for number in range(8):
        (tmp_path / f"{number}.py").write_text(f"import x{number}\n" + LINES * 12)
    output = tmp_path / "code.ngram"
    more = ("--order", "3", "--table", "--json", "--max-size", "64K")
    return cli("train", "ngram", "--text", str(tmp_path), *more, "-o", str(output)), output


def test_the_figures_of_held_out_text_are_shown(trained: tuple[Result, Path]) -> None:
    result, output = trained
    assert result.code == 0, result.err
    document = result.document
    assert document["num_bytes"] == output.stat().st_size <= 64 << 10
    assert document["num_tokens"] > 5 * document["report"]["num_tokens"] > 0
    assert document["report"]["acceptance"]["accepted"][0] > 0.5
    assert len(document["table"]) == 9
    for words in ("with the text itself", "prompt lookup", "nats per token", "2 stupid-backoff"):
        assert words in result.out


def test_it_drafts_for_the_embedded_target(trained: tuple[Result, Path], cli: Cli) -> None:
    model = str(trained[1])
    params = SamplingParams(max_tokens=16, temperature=0.0)
    speculative = {"method": "ngram_model", "model": model}
    with LLM(speculative_config=speculative, planner="fixed", strict=True) as llm:
        drafted = llm.generate(LINES, params)
    with LLM() as llm:
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


def test_what_cannot_be_done_is_one_line(cli: Cli, tmp_path: Path) -> None:
    output = str(tmp_path / "m")
    assert "one is needed" in cli("train", "ngram", "-o", output).err
    missing = cli("train", "ngram", "--traces", str(tmp_path / "none"), "-o", output)
    assert (missing.code, missing.out) == (2, "")
    assert "meta.json" in missing.err
    config = json.dumps({"method": "ngram_model", "model": output})
    refused = cli("run", "--strict", "--speculative-config", config, stdin="hello")
    assert (refused.code, refused.out) == (2, "")
    assert "cannot be read" in refused.err
