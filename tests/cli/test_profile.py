"""``paceline profile`` on the embedded models: what it shows, keeps, draws, imports and refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import embedded_model
from paceline.cli.profile import numbers, profile_texts
from paceline.core.errors import ConfigError
from paceline.core.installation import install_command
from paceline.planner.cost_table import CostPoint, CostTable
from paceline.profiling.machine import READ_BYTES, Roofs, Work
from paceline.profiling.profile import Profile
from paceline.profiling.profile_store import find_imported, find_profile, from_document
from tests.cli.conftest import Result
from tests.models.reference import save_model
from tests.proposers.heads import embedded_head
from tests.proposers.test_mtp_mixtures import saved
from tests.text.vocabularies import byte_level_json, save_tokenizer

Cli = Callable[..., Result]
QUICK = ("--dtype", "float32", "--widths", "2,4", "--contexts", "16,40", "--budget", "0.01")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_measuring: None) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_embedded_pair(cli: Cli, tmp_path: Path) -> None:
    file, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    result = cli("profile", *QUICK, "--json", "-o", str(file), "--plot", str(plot))
    assert result.code == 0, result.err
    profiles = [from_document(each) for each in result.document["profiles"]]
    assert [profile.table.name for profile in profiles] == ["embedded", "draft"]
    for profile in profiles:
        assert profile.table.contexts == [16, 40]
        assert [point.width for point in profile.table.base_points(40)] == [1, 2, 4]
        assert profile.key is not None
        found = find_profile(profile.key)
        assert found is not None
        assert found.table.points == profile.table.points
    assert "deterministic" in profiles[0].key.backend  # type: ignore[union-attr]
    target, draft = (profile.table.host for profile in profiles)
    assert target.step > 0.0 == target.drafting.call
    assert draft.drafting.call > 0.0 == draft.step
    assert f"host, ms per call as a draft: {draft.drafting.call:.3f}" in result.err
    assert json.loads(file.read_text()) == result.document
    assert plot.read_bytes().startswith(b"\x89PNG")
    for shown in ("one request, context 40", "GFLOP/s", "cost ratio"):
        assert shown in result.err
    # Weights in a cache say nothing of memory, and no share of a roof is above all of it.
    assert "of weights may stay in caches" in result.err
    assert " cached " in result.err
    assert all(int(share) <= 100 for share in re.findall(r"(\d+)%", result.err))


def test_shares_of_the_roofs() -> None:
    work = Work(1, READ_BYTES, 0, 0, 1, 0, 0)
    table = CostTable("large", [CostPoint(1, 16, 1, 1, ms=200.0)])
    for gb_per_s, share in ((10.0, "13%"), (0.1, "100%")):
        profile = Profile(table, roofs=Roofs(gb_per_s, 1.0), work=work)
        shown = "\n".join(profile_texts([profile]))
        assert f" {share} " in shown
        assert "cache" not in shown


def test_it_ends_with_what_drafts_cost_and_which_of_them_pay(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    curve = {"name": "a", "cost_ratio": [1.0, 1.1, 1.2, 1.3, 1.4]}
    path.write_text(json.dumps({"curves": [curve]}))
    said = [
        "Checking 4 tokens costs 1.40 plain steps here.",
        "Drafts of up to 4 tokens pay when 1 of them is right.",
    ]
    assert cli("profile", "--import", str(path)).out.splitlines()[-2:] == said
    assert cli("profile", "--import", str(path), "--json").document["sentences"] == said


def test_what_varies_too_much_is_shown_and_not_kept(
    cli: Cli, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (embedded_model("draft"), *QUICK, "--max-num-seqs", "1", "--contexts", "16")
    first = cli("profile", *small, "--json").document
    kept = Path(first["files"][0]).read_text()
    monkeypatch.setattr("paceline.profiling.profile.BUSY", -1.0)
    file = tmp_path / "profile.json"
    result = cli("profile", *small, "--json", "-o", str(file))
    assert result.code == 0, result.err
    assert "draft: times vary by" in result.err
    assert "the profile of draft is not kept" in result.err
    assert "kept in" not in result.err
    assert result.document["files"] == []
    assert json.loads(file.read_text()) == result.document  # what is named is written all the same
    assert [path.read_text() for path in cache.glob("**/profiles/*.json")] == [kept]


def test_one_model_within_its_limits(cli: Cli) -> None:
    small = ("--max-model-len", "50", "--max-num-seqs", "2", "--contexts", "16,40,50,9999")
    result = cli("profile", embedded_model("draft"), *QUICK, *small, "--widths", "20", "--json")
    (profile,) = map(from_document, result.document["profiles"])
    assert {point.requests for point in profile.table.points} == {1, 2}
    assert profile.table.contexts == [16, 40]
    assert [point.width for point in profile.table.base_points(40)] == [1]
    notes = "\n".join(result.document["notes"])
    assert "draft: context 9999 is left out" in notes
    assert "these steps are beyond the limits: 1 x 20 at context 40" in notes
    assert "context 50 is left out" in result.err


def test_a_mixture(cli: Cli, tmp_path: Path) -> None:
    save_model("olmoe", tmp_path / "moe")
    save_tokenizer(tmp_path / "moe", byte_level_json(), eos_token="<|end|>")
    result = cli("profile", str(tmp_path / "moe"), *QUICK, "--max-num-seqs", "2", "--json")
    assert result.code == 0, result.err
    (profile,) = map(from_document, result.document["profiles"])
    table = profile.table
    assert table.experts is not None
    assert (table.experts.layers, table.experts.number, table.experts.per_token) == (2, 8, 3)
    assert {point.experts for point in table.points if point.width * point.requests == 1} == {6}
    assert all(6 < point.experts <= 16 for point in table.points if point.width == 4)
    assert profile.key is not None
    found = find_profile(profile.key)
    assert found is not None
    assert (found.table.experts, found.table.points) == (table.experts, table.points)
    assert "experts: 3 of 8 per row in each of 2 layers" in result.err


def test_the_mtp_layer_of_a_mixture(cli: Cli, tmp_path: Path) -> None:
    saved("deepseek-v3", tmp_path / "moe")
    save_tokenizer(tmp_path / "moe", byte_level_json(), eos_token="<|end|>")
    result = cli("profile", str(tmp_path / "moe"), *QUICK, "--max-num-seqs", "1", "--json")
    assert result.code == 0, result.err
    target, head = (from_document(each).table for each in result.document["profiles"])
    assert (target.name, head.name) == ("moe", "moe: mtp")
    assert head.experts is not None
    assert (head.experts.layers, head.experts.number, head.experts.per_token) == (1, 8, 3)
    assert {point.experts for point in head.points if point.width == 1} == {3}
    assert all(3 < point.experts <= 8 for point in head.points if point.width == 4)


def test_the_first_layers_as_a_draft(cli: Cli) -> None:
    small = ("--max-num-seqs", "1", "--draft-layers", "1")
    result = cli("profile", embedded_model("draft"), *QUICK, *small, "--json")
    target, draft = (from_document(each).key for each in result.document["profiles"])
    assert target is not None
    assert draft is not None
    assert target.model != draft.model  # the same name and another shape
    assert target.dtype == draft.dtype == "float32"


def test_another_draft(cli: Cli) -> None:
    model = embedded_model("draft")
    result = cli("profile", model, *QUICK, "--draft", model, "--json")
    target, draft = (from_document(each).key for each in result.document["profiles"])
    assert target is not None
    assert draft is not None
    assert target.model == draft.model


def test_a_head(cli: Cli, tmp_path: Path) -> None:
    head = embedded_head(tmp_path / "head")
    small = ("--max-num-seqs", "1", "--draft", str(head.model))
    result = cli("profile", *QUICK, *small, "--json")
    assert result.code == 0, result.err
    target, found = map(from_document, result.document["profiles"])
    assert (target.table.name, found.table.name) == ("embedded", "head")
    assert [point.width for point in found.table.base_points(40)] == [1, 2, 4]
    assert found.table.host.drafting.call > 0.0


def test_a_draft_of_another_vocabulary(cli: Cli, shared_data: Path) -> None:
    small = ("--max-num-seqs", "1", "--draft", str(shared_data / "models/stories260k"))
    result = cli("profile", embedded_model("draft"), *QUICK, *small, "--json")
    names = [each["table"]["name"] for each in result.document["profiles"]]
    assert names == ["draft", "stories260k"]


# --- imports -------------------------------------------------------------------------------------

BENCH = '{"pp": 128, "tg": 64, "pl": %d, "t_pp": 0.1, "t_tg": %s}'
CURVES = {
    "source": "a bench [1]",
    "curves": [{"name": "GPU", "cost_ratio": [1.0, 1.1], "draft_step_ratio": 0.25}],
}


def test_import(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "my-bench.jsonl"
    path.write_text(f"{BENCH % (1, 0.64)}\n{BENCH % (4, 0.96)}\n")
    result = cli("profile", "--import", str(path), "--json")
    assert result.code == 0
    assert "1.500" in result.err
    found = find_imported("my-bench")
    assert found is not None
    assert found.table.cost_ratio(4) == pytest.approx(1.5)
    assert found.key is None

    path.write_text(json.dumps(CURVES))
    plot = tmp_path / "curves.svg"
    result = cli("profile", "--import", str(path), "--plot", str(plot))
    assert result.code == 0
    assert "plain steps" in result.out
    assert plot.read_text().startswith("<?xml")
    draft = find_imported("GPU: draft")
    assert draft is not None
    assert (draft.table.milliseconds(1), draft.table.is_relative) == (0.25, True)


def test_names_have_no_power_over_the_terminal(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"curves": [{"name": "\x1b[2Jx", "cost_ratio": [1.0]}]}))
    result = cli("profile", "--import", str(path))
    assert result.code == 0
    assert "\x1b" not in result.out


# --- refusals ------------------------------------------------------------------------------------


def never(*_: object) -> Any:
    raise AssertionError("nothing may be measured")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--widths", "0"), "--widths has '0'"),
        (("--widths", "1,5000"), "--widths has '5000'"),
        (("--contexts", "64;512"), "--contexts has '64;512'"),
        (("--plot", "curve.bmp"), "allowed: files in .png, .svg, .pdf"),
        (("--plot", "nowhere/curve.png"), "no folder nowhere"),
        (("-o", "nowhere/x.json"), "no folder nowhere"),
        (("-o", "."), "it is a folder"),
        (("--budget", "inf"), "--budget is inf; allowed: numbers from 0.001"),
        (("--import", "missing.jsonl"), "missing.jsonl cannot be read"),
        (("--import", "x", "MODEL"), "leave out MODEL"),
        (("--draft", "x", "--import", "x"), "leave out MODEL and --draft"),
        (("--draft", "x", "--draft-layers", "2"), "leave out --draft"),
        (("--draft-dtype", "int7"), "error: --draft-dtype is 'int7'; allowed: auto, "),
        (("--threads", "-2"), "error: --threads is -2"),
        (("--budget", "0"), "--budget"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("paceline.profiling.profile.measure_profiles", never)
    result = cli("profile", *arguments)
    assert result.code == 2
    assert message in result.err


def test_without_matplotlib(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.profiling.profile.measure_profiles", never)
    for module in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli("profile", "--plot", "curve.png")
    assert result.code == 2
    assert install_command("plot") in result.err


def test_a_malformed_import_names_its_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(f"{BENCH % (1, 0.64)}\n{BENCH % (2, 0)}\n")
    result = cli("profile", "--import", str(path))
    assert result.code == 2
    assert "line 2: t_tg is 0" in result.err


def test_ratios_that_are_not_to_width_1_are_refused(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    path.write_text('{"curves": [{"name": "a", "cost_ratio": [2.0, 3.0]}]}')
    result = cli("profile", "--import", str(path))
    assert result.code == 2
    assert "cost_ratio of width 1 is 2.0; it must be 1" in result.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1-4,8", [1, 2, 3, 4, 8]), ("8, 1", [1, 8]), ("3,3,2-3", [2, 3]), (None, []), ("7-7", [7])],
)
def test_lists_of_numbers(text: str | None, expected: list[int]) -> None:
    assert numbers("--widths", text, 1, 100) == expected


@pytest.mark.parametrize("text", ["4-2", "x", "1,,2", "-3", "1-", "1.5", "1-99999", "²"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--widths has"):
        numbers("--widths", text, 1, 50_000)
