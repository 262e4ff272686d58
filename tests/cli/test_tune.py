"""``paceline tune`` on the embedded target: what it ranks, writes, draws, says and refuses."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.api.llm import embedded_model
from paceline.build.default_drafts import default_speculative_config
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import SuffixConfig, without_memory
from paceline.profiling.profile import ProfileSettings, measure_profiles
from paceline.proposers.ngram_model import context_key, write_tables
from paceline.request.traces import Trace, TraceWriter, read_traces
from paceline_lab.simulate.replay import ReplayResult
from paceline_lab.simulate.setup import FOOTNOTE
from paceline_lab.tune import command as tune_command
from paceline_lab.tune import search as tune_search
from paceline_lab.tune import setup as tune_setup
from paceline_lab.tune.search import SUFFIX, draft_candidates, suffix_candidates
from paceline_lab.tune.setup import TuneOptions
from paceline_lab.tune.tuning import SpeedUp, Tuning, TuningRow
from paceline_lab.tune.view import configuration, how_to_use
from tests.cli.conftest import Result
from tests.proposers.heads import head_config, head_tensors, write_head
from tests.proposers.ngrams import train

Cli = Callable[..., Result]
TARGET, DRAFT = embedded_model("target"), embedded_model("draft")
EDIT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a +"
PROSE = "The old king of the mountain had three daughters, and"
RUN = ("run", "-p", EDIT, "--max-tokens", "8", "--json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune_search, "SUFFIX_NODES", (1, 4))
    monkeypatch.setattr(tune_search, "DRAFT_NODES", (1, 2, 4))
    return tmp_path / "cache"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in (EDIT, PROSE)))
    return str(path)


def random_draft(folder: Path) -> str:
    """The embedded draft with weights that know nothing."""
    shutil.copytree(DRAFT, folder)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    noise = {
        name: torch.randn_like(t) * t.std() if t.ndim == 2 else t for name, t in tensors.items()
    }
    save_file(noise, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_from_prompts_to_a_configuration_that_runs(
    cli: Cli,
    cost: tuple[str, ...],
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file, plot, folder = (tmp_path / name for name in ("best.json", "best.png", "answers"))
    wrong = random_draft(tmp_path / "random")
    drafts = ("--draft", DRAFT, "--draft", wrong)
    files = ("-o", str(file), "--plot", str(plot), "--traces", str(folder))
    found = cli(
        "tune", TARGET, "--prompts", prompts, *drafts, *cost, *files, "--max-tokens", "16", "--json"
    )
    assert found.code == 0, found.err
    document = found.document
    assert len(list(read_traces(folder))) == document["num_traces"] == 2
    assert document["draft_cost_tables"] == {DRAFT: "GPU: draft", wrong: "GPU: draft"}
    assert {row["name"].split(" ")[0] for row in document["rows"]} == {SUFFIX, "draft", "random"}
    speedups = [row["speedup"] for row in document["rows"]]
    assert speedups == sorted(speedups, reverse=True)
    assert [row["name"] for row in document["oracles"]] == [
        "best fixed of each prompt",
        "best drafts of each step: suffix + draft",
        "best drafts of each step: suffix + random",
    ]
    assert document["oracles"][1]["speedup"] >= max(
        row["speedup"] for row in document["rows"] if "random" not in row["name"]
    )
    good, bad = document["drafts"]["draft"], document["drafts"]["random"]
    assert bad["kl"] > 2 * good["kl"]
    assert bad["agreement"]["1"] < 0.1 < good["agreement"]["1"]
    assert bad["coupled_acceptance"] < good["coupled_acceptance"]
    assert "no setting of random alone beats plain decoding" in found.err
    assert "best: " in found.err
    assert set(document["seconds"]) == {"answers", "costs and drafts", "search", "comparing drafts"}
    assert plot.read_bytes().startswith(b"\x89PNG")

    assert document["default"]["name"].startswith("default: suffix ")
    assert document["default"]["planner"] == "auto"
    assert any(line.startswith("default: suffix") for line in found.err.splitlines())
    assert document["best"] == document["default"]["name"]
    assert "best: keep the default: suffix" in found.err
    assert found.err.splitlines()[-1] == "to use it: paceline run --config best.json"

    options = json.loads(file.read_text())
    assert options == document["config"]
    assert options["model"] == TARGET
    plain = cli(*RUN, "--no-speculation", "--seed", "1").document
    tuned = cli(*RUN, "--config", str(file), "--seed", "1").document
    assert tuned["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    usual = json.loads(json.dumps([asdict(c) for c in default_speculative_config(TARGET)]))
    assert "speculative_config" not in options
    assert tuned["speculative_config"] == usual


def test_what_beats_the_default_is_written_and_runs(
    cli: Cli,
    cost: tuple[str, ...],
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = str(tmp_path / "best.json")
    one = parse_speculative_config({"method": "suffix", "num_speculative_tokens": 1})
    for module in (tune_command, tune_setup):  # a default that is easy to beat
        monkeypatch.setattr(module, "usual_proposers", lambda model: one)
    found = cli("tune", "--prompts", prompts, *cost, "--max-tokens", "16", "-o", file, "--json")
    assert found.code == 0, found.err
    assert "times the default" in found.err
    options = json.loads(Path(file).read_text())
    assert options == found.document["config"]
    tuned = cli(*RUN, "--config", file).document
    said = [{k: v for k, v in c.items() if v} for c in options["speculative_config"]]
    for wanted, used in zip(said, tuned["speculative_config"], strict=True):
        assert wanted.items() <= used.items()


def test_every_kind_of_draft_is_tried(
    cli: Cli, cost: tuple[str, ...], prompts: str, tmp_path: Path, shared_data: Path
) -> None:
    parallel = Path(shutil.copytree(DRAFT, tmp_path / "parallel"))
    config = json.loads((parallel / "config.json").read_text())
    (parallel / "config.json").write_text(json.dumps(config | {"pard_token": 4095}))
    foreign, ngrams = shared_data / "models/stories260k", tmp_path / "few.ngram"
    write_tables(train([[5, 6, 7, 5, 6, 8]], order=2, vocab_size=4096), ngrams)
    drafts = [f"--draft={each}" for each in (parallel, foreign, ngrams)]
    folder = tmp_path / "answers"
    arguments = ("tune", *drafts, "--draft-layers", "2", *cost, "--planner", "fixed", "--json")
    files = ("--traces", str(folder), "--max-tokens", "6")
    found = cli(*arguments, "--prompts", prompts, *files)
    assert found.code == 0, found.err
    document = found.document
    names = {"parallel", "stories260k", "few.ngram", "self, 2 layers"}
    alone = {row["name"].rsplit(" ", 1)[0] for row in document["rows"] if "+" not in row["name"]}
    assert names <= {name.split(" tree")[0] for name in alone}
    assert {name for name, each in document["drafts"].items() if each} == {
        "parallel",
        "self, 2 layers",
    }
    assert set(document["drafts"]) == names
    for name in names:
        assert any(row["name"].endswith(f"suffix + {name}") for row in document["oracles"])
    (line,) = [line for line in found.err.splitlines() if line.startswith("few.ngram  ")][-1:]
    assert line.split().count("-") == 7


def test_drafts_that_learnt_these_answers_are_marked(
    cli: Cli, cost: tuple[str, ...], prompts: str, tmp_path: Path
) -> None:
    folder, file = str(tmp_path / "answers"), tmp_path / "learnt.ngram"
    traced = ("-o", folder, "--max-tokens", "12", "--top-logprobs", "1")
    assert cli("trace", TARGET, "--prompts", prompts, *traced).code == 0
    texts = [trace.token_ids.tolist() for trace in read_traces(folder)]
    first = next(iter(read_traces(folder)))
    key = np.array([context_key(first.token_ids[: first.prompt_len].tolist())], np.uint64)
    write_tables(replace(train(texts, order=3, vocab_size=4096), prompts=key), file)
    found = cli("tune", "--traces", folder, "--draft", str(file), *cost, "--json")
    assert found.code == 0, found.err
    document = found.document
    for row in [document["plain"], *document["rows"], *document["oracles"]]:
        name = row["name"]
        is_free = name == "plain" or (name.startswith((SUFFIX, "default")) and "+" not in name)
        assert row["num_learnt_prompts"] == (0 if is_free else 1), name
    said = "learnt.ngram was trained on answers to 1 of these 2 prompts"
    assert any(note.startswith(said) for note in document["notes"])
    assert said in found.err
    assert FOOTNOTE in found.err
    assert any(line.startswith("learnt.ngram") and " * " in line for line in found.err.splitlines())
    assert not any(line.startswith("plain *") for line in found.out.splitlines())
    # Its rows win, and are not what is recommended.
    assert "learnt.ngram" in document["rows"][0]["name"]
    assert "learnt.ngram" not in (document["best"] or "")
    assert "rows with a * are not recommended" in found.err


def test_prompts_that_a_draft_has_learnt_are_held_out(
    cli: Cli, cost: tuple[str, ...], tmp_path: Path
) -> None:
    folder, file = str(tmp_path / "answers"), tmp_path / "learnt.ngram"
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{EDIT} {n}"}) for n in range(7)))
    traced = ("-o", folder, "--max-tokens", "6", "--top-logprobs", "1")
    assert cli("trace", TARGET, "--prompts", str(prompts), *traced).code == 0
    traces = list(read_traces(folder))
    keys = sorted(context_key(t.token_ids[: t.prompt_len].tolist()) for t in traces[:2])
    texts = [trace.token_ids.tolist() for trace in traces[:2]]
    tables = train(texts, order=3, vocab_size=4096)
    write_tables(replace(tables, prompts=np.array(keys, np.uint64)), file)
    found = cli("tune", "--traces", folder, "--draft", str(file), *cost, "--json")
    assert found.code == 0, found.err
    assert found.document["num_traces"] == 5
    assert "2 of 7 prompts are held out of the search, because learnt.ngram was" in found.err
    assert {row["num_learnt_prompts"] for row in found.document["rows"]} == {0}
    assert FOOTNOTE not in found.err


def test_nothing_beats_plain_decoding(cli: Cli, cost: tuple[str, ...], tmp_path: Path) -> None:
    folder, file = tmp_path / "answers", tmp_path / "best.json"
    drawn = random.Random(1)
    params = {"max_tokens": 32, "temperature": 0.0, "seed": 0, "max_model_len": 256}
    rows = np.zeros((32, 1), np.float32)
    TraceWriter(folder, {"params": params}).write_shard(
        [
            Trace(i, 8, np.array(drawn.sample(range(4096), 40)), rows[:, 0], rows, rows)
            for i in range(2)
        ]
    )
    found = cli("tune", "--traces", str(folder), *cost, "-o", str(file), "--json")
    assert found.code == 0, found.err
    assert "nothing beats plain decoding" in found.err
    assert found.document["best"] is None
    # So few answers have no interval, and drafts that never came are all the same.
    assert {row["interval"] for row in found.document["rows"]} == {None}
    assert "too few answers (2 of 64 tokens) to be sure" in found.out
    first = found.document["rows"][0]
    assert first["same"]
    assert f"{first['name']} (and {len(first['same'])} larger)" in found.err
    assert json.loads(file.read_text()) == {"model": "embedded", "no_speculation": True}
    tuned = cli(*RUN, "--config", str(file))
    assert tuned.code == 0
    assert tuned.document["speculative_config"] == []


def test_what_is_not_known_is_measured_once(
    cli: Cli, prompts: str, cache: Path, monkeypatch: pytest.MonkeyPatch, quick_measuring: None
) -> None:
    calls: list[int] = []
    found: list[Any] = []  # what was measured the first time

    def measure(model: str, config: Any, draft: Any, settings: Any, advance: Any) -> Any:
        calls.append(config.max_num_seqs)
        quick = ProfileSettings(widths=(2, 4), contexts=(16,), budget_seconds=0.01)
        if not found:
            found.append(measure_profiles(model, config, draft, quick, advance))
        return found[0]

    monkeypatch.setattr("paceline.profiling.profile.measure_profiles", measure)
    arguments = ("tune", "--prompts", prompts, "--max-tokens", "4", "--budget", "0.01", "--json")
    with monkeypatch.context() as patch:  # measured on a busy machine: good for this once
        patch.setattr("paceline.profiling.profile.BUSY", -1.0)
        noisy = cli(*arguments, "--planner", "fixed")
    assert noisy.document["cost_table"] == "embedded"
    assert "2 prompts answered with 8 tokens\n" in noisy.err  # and no folder that is gone already
    assert "the profile of embedded is not kept" in noisy.err
    assert not list(cache.glob("**/profiles/*.json"))
    first = cli(*arguments, "--planner", "fixed")
    assert first.code == 0, first.err
    assert first.document["cost_table"] == "embedded"
    (note,) = first.document["notes"]
    assert "too few answers (2 of 8 tokens)" in note
    assert {row["planner"] for row in first.document["rows"]} == {"fixed"}
    assert "replays were left out for lack of time" in first.err
    assert cli(*arguments).document["time_unit"] == "ms"
    assert calls == [32, 32]


def test_what_is_written_is_what_was_tried_and_remembers_answers() -> None:
    (ngrams,) = parse_speculative_config({"method": "ngram_model", "model": "toy"})
    tried = [
        each
        for config in (
            SpeculativeConfig("draft_model", "toy"),
            SpeculativeConfig("draft_model", "toy", use_heterogeneous_vocab=True),
            SpeculativeConfig("parallel_draft", "toy"),
            SpeculativeConfig("self", draft_layers=3, dtype="int4"),
            SpeculativeConfig("self", dtype="int8"),
            ngrams,
        )
        for each in draft_candidates("toy", config, ("auto",))
    ]
    for each in (*suffix_candidates(("auto",)), *tried):
        best = TuningRow("x", each, ReplayResult([]), SpeedUp(2.0, 2.0, 2.0))
        written = configuration(TuneOptions(), tuned(best))["speculative_config"]
        (config,) = parse_speculative_config(json.loads(json.dumps(written)))
        assert without_memory([config]) == each.configs
        if isinstance(config, SuffixConfig):
            assert config.suffix_decoding_max_cached_requests > 0


def tuned(row: TuningRow, default: TuningRow | None = None) -> Tuning:
    plain = TuningRow("plain", None, ReplayResult([]), SpeedUp(1.0, None, None))
    return Tuning(plain, [row], [], 1, 0, 1.0, default)


def test_one_line_says_how_to_use_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {
        "threads": 2,
        "model": "smollm2",
        "enable_prefix_caching": False,
        "speculative_config": [{"method": "ngram_model", "model": str(tmp_path / "a.ngram")}],
        "planner": "fixed",
    }
    assert how_to_use(found, None) == (
        "paceline run smollm2 --threads 2 --no-enable-prefix-caching --speculative-config "
        '\'{"method": "ngram_model", "model": "a.ngram"}\' --planner fixed'
    )
    assert how_to_use(found, str(tmp_path / "best.json")) == "paceline run --config best.json"
    plain = tuned(
        TuningRow("x", suffix_candidates(("auto",))[0], ReplayResult([]), SpeedUp(1, 1, 1))
    )
    assert how_to_use(configuration(TuneOptions(model="smollm2"), plain), None) == (
        "paceline run smollm2 --no-speculation"
    )


# --- refusals ------------------------------------------------------------------------------------


def never(*_: object, **__: object) -> Any:
    raise AssertionError("nothing may be answered")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("embedded",), "tune needs --prompts FILE"),
        (("--prompts", "x", "--plot", "best.bmp"), "allowed: files in .png"),
        (("--prompts", "x", "-o", "nowhere/x.json"), "no folder nowhere"),
        (("--prompts", "x", "--budget", "0"), "--budget"),
        (("--prompts", "x", "--draft", "missing"), "missing"),
        (("--prompts", "x", "--concurrency", "0"), "--concurrency is 0; allowed: whole"),
        (("--prompts", "x", "-o", "."), "it is a folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_answered(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(tune_setup, "trace_command", never)
    result = cli("tune", *arguments)
    assert result.code == 2
    assert message in result.err


def test_mistaken_drafts(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune_setup, "trace_command", never)
    damaged = tmp_path / "x.ngram"
    damaged.write_bytes(b"PACENGRM" + bytes(9))
    write_head(tmp_path / "head", head_config(), head_tensors())
    for arguments, message in (
        (("--draft-layers", "900"), "draft_layers is 900"),
        (("--draft-dtype", "int5"), "int5"),
        (("--draft", str(damaged)), "x.ngram"),
        (("--draft", str(tmp_path / "head")), "was made for another target"),
    ):
        result = cli("tune", "--prompts", "x", *arguments)
        assert result.code == 2
        assert message in result.err


def test_a_file_of_options_may_name_one_draft_or_several(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, seen = tmp_path / "options.json", []

    def command(options: TuneOptions) -> int:
        seen.append(options.draft)
        return 0

    monkeypatch.setattr("paceline_lab.tune.command.tune_command", command)
    for value in ("a", ["a", "b"], [1]):
        path.write_text(json.dumps({"draft": value}))
        last = cli("tune", "--config", str(path))
    assert seen == [["a"], ["a", "b"]]
    assert "draft is [1]; it must be text or a list of texts" in last.err
