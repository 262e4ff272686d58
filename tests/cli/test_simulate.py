"""``paceline simulate`` on the embedded models: its rows, its costs, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.api.llm import embedded_model
from paceline.planner.cost_table import CostTable, DraftingHostTime, HostTime
from paceline.request.traces import read_traces
from paceline_lab.simulate.setup import cost_notes
from tests.cli.conftest import Result
from tests.lab.test_simulate import simulator as toy_simulator
from tests.models.reference import save_model
from tests.text.vocabularies import byte_level_json, save_tokenizer

Cli = Callable[..., Result]
TEXTS = ["def add(a, b):", "1 2 3 1 2 3 1 2 3", "Once upon a time there was"]
CURVES = {
    "curves": [
        {
            "name": "machine",
            "tokens_per_second_at_1": 100,
            "cost_ratio": [1.0, 1.0, 1.1, 1.2, 1.9, 2.0, 2.1, 2.2, 2.3],
            "draft_step_ratio": 0.05,
        },
        {"name": "ratios", "cost_ratio": [1.0, 2.0, 3.0]},
    ]
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from paceline.cli.main import app

    home = tmp_path_factory.mktemp("traces")
    prompts = home / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    base = ["trace", embedded_model("target"), "--prompts", str(prompts), "--max-tokens", "24"]
    app([*base, "-o", str(home / "traces"), "--top-logprobs", "1"], standalone_mode=False)
    return home / "traces"


@pytest.fixture
def curves(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    file.write_text(json.dumps(CURVES))
    assert cli("profile", "--import", str(file)).code == 0


@pytest.mark.usefixtures("curves")
def test_the_rows(cli: Cli, folder: Path) -> None:
    config = json.dumps([{"method": "suffix"}, {"model": embedded_model("draft")}])
    arguments = ("--cost", "machine", "--json", "--concurrency", "2")
    result = cli("simulate", str(folder), *arguments, "--speculative-config", config)
    assert result.code == 0, result.err
    document = result.document
    rows = document["rows"]
    lengths = {f"{method} {n}" for method in ("suffix", "draft_model") for n in range(1, 9)}
    trees = {"suffix, tree of 8", "suffix, tree of 16"}
    others = {"plain", "as configured", "planner auto"}
    hindsight = {"best fixed of each prompt", "best drafts of each step"}
    assert {*rows} == lengths | trees | others | hindsight
    tokens = [len(trace.output_token_ids) for trace in read_traces(folder)]
    for name, row in rows.items():
        assert row["output_tokens"] == sum(tokens), name
        assert row["speedup"] == pytest.approx(rows["plain"]["time"] / row["time"])
        assert row["tokens_per_second"] == pytest.approx(1e3 * sum(tokens) / row["time"])
        assert any(line.startswith(name) for line in result.err.splitlines())
    assert rows["plain"]["speedup"] == 1.0
    assert rows["draft_model 2"]["draft_time"] > 0.0
    assert rows["best drafts of each step"]["speedup"] > 1.0
    assert document["cost_table"] == "machine"
    assert document["concurrency"] == 2
    assert [*document["draft_cost_tables"].values()] == ["machine: draft"]
    assert "predicted, not measured; answers: 3, tokens: " in result.err
    # What the draft model drafts is kept beside the traces.
    assert [*folder.rglob("*.safetensors")]


@pytest.mark.usefixtures("curves")
def test_the_model_is_that_of_the_traces(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, model = tmp_path / "prompts.jsonl", tmp_path / "models" / "small"
    prompts.write_text(json.dumps({"prompt": TEXTS[1]}))
    shutil.copytree(embedded_model("draft"), model)
    monkeypatch.chdir(model.parent)
    made = ("trace", "small", "--prompts", str(prompts), "-o", str(tmp_path / "traces"))
    assert cli(*made, "--max-tokens", "8").code == 0
    monkeypatch.chdir(tmp_path)
    plain = ("--no-speculation", "--cost", "machine", "--json")
    for command in (("simulate", "traces"), ("simulate", "models/small", "traces")):
        found = cli(*command, *plain)
        assert found.code == 0, found.err
        assert found.document["model"] == "small"
    tuned = cli("tune", "--traces", "traces", "--cost", "machine", "--budget", "0.01", "--json")
    assert tuned.code == 0, tuned.err
    assert "paceline run models/small" in tuned.document["use"]
    model.rename(model.parent / "moved")
    found = cli("simulate", "traces", *plain)
    assert found.code == 2
    assert f"the traces are answers of {model}, and there is no such file or folder" in found.err
    moved = (*made[:1], "models/moved", *made[2:])
    assert cli(*moved, "--max-tokens", "8").code == 2  # traces of a model of another name
    assert cli("simulate", "models/moved", "traces", *plain).code == 0
    assert cli("simulate", "traces", "--model", "models/moved", *plain).code == 0


def test_a_folder_of_traces_is_needed(cli: Cli, tmp_path: Path) -> None:
    assert "simulate needs a folder of traces" in cli("simulate").err
    assert "there is no folder of traces at nowhere" in cli("simulate", "nowhere").err


def test_a_target_that_drafts_for_itself(cli: Cli, folder: Path) -> None:
    config = json.dumps({"method": "self", "draft_layers": 4, "num_speculative_tokens": 2})
    arguments = ("--speculative-config", config, "--planner", "fixed", "--json")
    result = cli("simulate", str(folder), *arguments)
    assert result.code == 0, result.err
    row = result.document["rows"]["as configured"]
    assert 0 < row["draft_time"] < row["time"]
    assert [*result.document["draft_cost_tables"].values()] == ["self: 4 layers, auto"]


def test_other_kinds_of_drafts(cli: Cli, folder: Path, tmp_path: Path, shared_data: Path) -> None:
    parallel = Path(shutil.copytree(embedded_model("draft"), tmp_path / "parallel"))
    shape = json.loads((parallel / "config.json").read_text())
    (parallel / "config.json").write_text(json.dumps(shape | {"pard_token": 4095}))
    foreign = str(shared_data / "models/stories260k")
    for said in (
        {"method": "parallel_draft", "model": str(parallel)},
        {"method": "draft_model", "model": foreign, "use_heterogeneous_vocab": True},
    ):
        config = json.dumps(said | {"num_speculative_tokens": 2})
        result = cli("simulate", str(folder), "--speculative-config", config, "--json")
        assert result.code == 0, result.err
        rows = result.document["rows"]
        assert 0 < rows[f"{said['method']} 8"]["draft_time"] < rows["plain"]["time"]
        assert rows["as configured"]["num_accepted_tokens"] > 0


@pytest.mark.usefixtures("curves")
def test_costs_can_be_given_assumed_or_without_a_unit(cli: Cli, folder: Path) -> None:
    lookup = ("simulate", str(folder), "--method", "prompt_lookup", "-k", "4", "--json")
    result = cli(*lookup, "--cost", "ratios", "--planner", "fixed")
    rows = result.document["rows"]
    assert result.document["time_unit"] == "plain steps"
    assert "planner auto" not in rows
    assert rows["as configured"] == rows["prompt_lookup 4"]
    assert rows["as configured"]["speedup"] < 1.0  # each row costs as much as the first
    assert rows["plain"]["tokens_per_second"] is None
    result = cli(*lookup)
    assert "there is no profile of embedded on this machine" in result.err
    assert result.document["time_unit"] == "plain steps"
    drafts = ("simulate", str(folder), "--method", "draft_model", "--json")
    dear, cheap = (
        cli(*drafts, "--draft-cost", cost).document["rows"]["draft_model 4"]["speedup"]
        for cost in ("0.5", "0.01")
    )
    assert cheap > dear
    assert "costs is assumed by its size" in cli(*drafts).err


def test_plain_decoding_alone_is_one_row(cli: Cli, folder: Path) -> None:
    result = cli("simulate", str(folder), "--no-speculation", "--json")
    assert [*result.document["rows"]] == ["plain"]


def profile_file(folder: Path, ms: object, first: int = 1) -> str:
    points = [[1, 0, first, first, 1.0, 0.0], [1, 0, 4, 4, ms, 0.0]]
    columns = ["requests", "context", "width", "samples", "ms", "spread"]
    table = {"name": "by hand", "is_relative": False, "columns": columns, "points": points}
    profile = {"format": "paceline-profile", "format_version": 1, "table": table}
    file = folder / "profile.json"
    file.write_text(json.dumps({**profile, "key": None, "roofs": None, "work": None}))
    return str(file)


@pytest.mark.parametrize("ms", [-1.0, float("nan"), 0.0, None])
def test_impossible_costs_are_refused(cli: Cli, folder: Path, tmp_path: Path, ms: object) -> None:
    result = cli("simulate", str(folder), "--cost", profile_file(tmp_path, ms))
    assert result.code == 2
    assert "ms of a cost point is" in result.err


def test_a_profiles_file_is_named_and_must_begin_at_one_row(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    plain = ("simulate", str(folder), "--no-speculation", "--json", "--cost")
    result = cli(*plain, profile_file(tmp_path, 1.5))
    assert result.document["cost_table"] == "by hand"
    assert "costs: by hand" in result.err
    gap = cli(*plain, profile_file(tmp_path, 1.5, first=2))
    assert gap.code == 2
    assert "without a step of width 1" in gap.err


def test_curves_are_no_profile_and_gaps_are_said(cli: Cli, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "curves of others.json"
    file.write_text(json.dumps(CURVES))
    plain = ("simulate", str(folder), "--no-speculation", "--json")
    result = cli(*plain, "--cost", str(file))
    assert result.code == 2
    assert "paceline profile --import FILE keeps published curves" in result.err
    file.write_text("{}")
    assert f"{file}: this is not a profile" in cli(*plain, "--cost", str(file)).err
    said = cli(*plain, "--cost", profile_file(tmp_path, 1.5))
    assert "note: by hand: no step between these widths was measured" in said.err
    assert [note for note in said.document["notes"] if note.endswith("1 and 4")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cost", "nowhere"), "neither the file of a profile nor the name"),
        (("--draft-cost", "-1"), "--draft-cost is -1; allowed:"),
        (("--draft-cost", "nan"), "--draft-cost is nan; allowed:"),
        (("--draft-cost", "nowhere"), "neither the file of a profile nor the name"),
        (("--planner", "clever"), "allowed: auto, fixed"),
        (("--concurrency", "0"), "--concurrency is 0; allowed: whole numbers from 1 to 512"),
        (("--concurrency", "513"), "--concurrency is 513"),
        (("--speculative-config", '{"k": 4}'), "unknown speculative key 'k'"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    cli: Cli, folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = cli("simulate", str(folder), *arguments)
    assert result.code == 2
    assert message in result.err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"curves": [{"name": "a"}]}'])
def test_a_damaged_profile_is_named_with_what_makes_one(
    cli: Cli, folder: Path, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    result = cli("simulate", str(folder), "--cost", str(file))
    assert result.code == 2
    assert result.err.startswith(f"error: {file}")
    assert "paceline profile MODEL -o FILE writes a profile" in result.err


def test_other_traces_are_refused(cli: Cli, folder: Path, tmp_path: Path) -> None:
    nowhere = cli("simulate", str(tmp_path / "nowhere"))
    assert nowhere.code == 2
    assert f"there is no folder of traces at {tmp_path / 'nowhere'}; paceline trace" in nowhere.err
    assert "Errno" not in nowhere.err
    assert "it has no meta.json; paceline trace MODEL" in cli("simulate", str(tmp_path)).err
    meta = json.loads((folder / "meta.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "meta.json").write_text(json.dumps(meta))
    assert "holds no traces" in cli("simulate", str(other)).err
    for shard in folder.glob("shard-*.npz"):
        (other / shard.name).write_bytes(shard.read_bytes())
    (other / "meta.json").write_text(json.dumps({**meta, "vocab_fingerprint": "x"}))
    assert "another vocabulary" in cli("simulate", str(other)).err


def test_a_draft_whose_host_time_nobody_measured_is_named() -> None:
    base, host = toy_simulator(), HostTime(drafting=DraftingHostTime(call=0.1))
    draft = base.draft_tables["toy"]
    known = CostTable(draft.name, draft.points, host=host)
    table = CostTable(base.table.name, base.table.points, host=HostTime(step=0.2))
    for subject, is_named in (
        (base, False),
        (replace(base, table=table), True),
        (replace(base, table=table, draft_tables={"toy": known}), False),
    ):
        notes = "\n".join(cost_notes(subject))
        assert ("draft: what the host takes for its drafts was not measured" in notes) == is_named


def test_a_mixture_has_a_row_without_prices(cli: Cli, tmp_path: Path) -> None:
    """Its traces say what steps read; where they do not, or the costs do not, that is said."""
    model, folder, prompts = (str(tmp_path / name) for name in ("moe", "traces", "prompts.jsonl"))
    save_model("olmoe", Path(model))
    save_tokenizer(Path(model), byte_level_json(), eos_token="<|end|>")
    Path(prompts).write_text('{"prompt": "abab"}\n{"prompt": "abcd"}')
    result = cli("trace", model, "--prompts", prompts, "-o", folder, "--max-tokens", "8")
    assert result.code == 0, result.err
    assert all(trace.experts_read is not None for trace in read_traces(folder))
    arguments = ("--model", model, "--speculative-config", json.dumps({"method": "suffix"}))
    result = cli("simulate", folder, *arguments, "--json")
    assert result.code == 0, result.err
    assert "experts/step" in result.err
    rows = result.document["rows"]
    assert {"planner auto", "planner auto without expert prices"} <= {*rows}
    assert rows["plain"]["num_experts_read"] == 2 * 7 * 2 * 3  # decoding steps, layers, per row
    Path(tmp_path / "curves.json").write_text(json.dumps(CURVES))
    assert cli("profile", "--import", str(tmp_path / "curves.json")).code == 0
    result = cli("simulate", folder, *arguments, "--cost", "machine")
    assert "the costs of machine do not say what an expert of this model takes" in result.err
    assert "without expert prices" not in result.out
