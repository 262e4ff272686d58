"""Stored profiles: found by their exact key, and never trusted.

Foreign measurements: read as their authors mean them, and refused by line where they are not.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import ProfileError
from paceline.core.files import write_json
from paceline.planner.cost_table import CostPoint, CostTable, DraftingHostTime, HostTime
from paceline.profiling.machine import Roofs, Work, profile_key
from paceline.profiling.profile import Profile
from paceline.profiling.profile_store import (
    find_imported,
    find_profile,
    from_document,
    import_tables,
    profiles_folder,
    read_profile,
    store_profile,
    to_document,
)
from paceline.tensors.placement import Placement, place_experts, place_layers
from tests.toy import TOY

KEY = profile_key("toy", TOY, ReferenceOps("float32"), "float32", "float32", 2)
TABLE = CostTable("toy", [CostPoint(1, 64, w, w, 1.0 + w, 0.1) for w in (1, 2, 5)])
PROFILE = Profile(TABLE, KEY, Roofs(30.0, 500.0), Work.of(TOY, "float32", "float32"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "profiles"


def same(a: Profile | None, b: Profile) -> bool:
    return a is not None and to_document(a) == to_document(b)


def test_round_trip(folder: Path) -> None:
    assert find_profile(KEY) is None
    path = store_profile(PROFILE)
    assert path.parent == folder
    assert same(find_profile(KEY), PROFILE)
    again = replace(PROFILE, roofs=Roofs(1.0, 2.0))
    assert store_profile(again) == path
    assert same(find_profile(KEY), again)
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_a_model_measured_as_a_draft_stays_measured_as_a_target() -> None:
    points, drafting = TABLE.points, DraftingHostTime(0.1, 0.05, 0.02, 0.01)
    for host in (HostTime(step=0.3, merge=0.01), HostTime(drafting=drafting), HostTime(step=0.4)):
        store_profile(replace(PROFILE, table=CostTable("toy", points, host=host)))
    found = find_profile(KEY)
    assert found is not None
    assert found.table.host == HostTime(step=0.4, drafting=drafting)


@pytest.mark.parametrize("field", list(asdict(KEY)))
def test_another_key_finds_nothing(field: str) -> None:
    store_profile(PROFILE)
    other = 3 if field == "threads" else "other"
    assert find_profile(replace(KEY, **{field: other})) is None


def test_the_key_knows_the_shape() -> None:
    def key(config: Any = TOY, **ops: Any) -> Any:
        return profile_key("toy", config, ReferenceOps(**ops), "float32", "float32", 2)

    assert key() == KEY
    assert key(replace(TOY, num_layers=3)).model != KEY.model
    assert key(deterministic=False).backend != KEY.backend


def test_a_profile_is_of_what_stays_in_memory() -> None:
    ops = ReferenceOps("float32")

    def key(placement: Placement | None) -> Any:
        return profile_key("toy", TOY, ops, "float32", "float32", 2, placement)

    def layers(limit: int) -> Any:
        return key(place_layers([10] * 10, 0, limit))

    def experts(limit: int) -> Any:
        return key(place_experts([[1] * 64], 36, limit))

    assert key(None) == layers(100) == experts(100) == KEY
    assert layers(70) == layers(80)
    assert experts(60) == experts(61)
    different = [KEY, layers(70), layers(50), experts(60), experts(50)]
    for at, each in enumerate(different):
        assert find_profile(each) is None
        host = HostTime(step=float(at))
        store_profile(Profile(CostTable("toy", TABLE.points, host=host), each))
    stored = [find_profile(each) for each in different]
    assert [each.table.host.step for each in stored if each] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_imported_tables_are_found_by_name() -> None:
    store_profile(Profile(TABLE))
    assert same(find_imported("toy"), Profile(TABLE))
    assert find_imported("other") is None
    assert find_profile(KEY) is None


def test_a_file_of_another_key_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    path = store_profile(replace(PROFILE, key=replace(KEY, machine="elsewhere")))
    path.rename(path.parent / f"{KEY.digest}.json")
    with caplog.at_level(logging.WARNING):
        assert find_profile(KEY) is None
    assert "something else" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "[" * 100_000, "\xff"])
def test_damaged_files_are_ignored_with_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = store_profile(PROFILE)
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert find_profile(KEY) is None
    assert "measure it again" in caplog.text
    with pytest.raises(ProfileError):
        read_profile(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "version is 2; known: 1"),
        ({"format": "other"}, "not a profile"),
        ({"more": 1}, "a profile must have"),
        ({"table": {}}, "a cost table must be"),
        ({"key": {**asdict(KEY), "threads": "2"}}, "threads of ProfileKey is '2'"),
        ({"key": {**asdict(KEY), "more": 1}}, "ProfileKey must have"),
        ({"key": []}, "ProfileKey must have"),
        ({"roofs": {"read_gb_per_s": float("nan"), "gflop_per_s": 1.0}}, "read_gb_per_s"),
        ({"roofs": {"read_gb_per_s": -1.0, "gflop_per_s": 1.0}}, "read_gb_per_s"),
        ({"work": {**asdict(PROFILE.work), "weights": 10**400}}, "weights of Work"),  # type: ignore[arg-type]
    ],
)
def test_documents_are_checked(change: dict[str, Any], message: str) -> None:
    document = {**json.loads(json.dumps(to_document(PROFILE))), **change}
    with pytest.raises(ProfileError, match=message):
        from_document(document)


def test_the_first_of_several_is_the_targets(tmp_path: Path) -> None:
    other = replace(PROFILE, roofs=Roofs(1.0, 2.0))
    path = tmp_path / "written-by-profile.json"
    write_json(path, {"profiles": [to_document(PROFILE), to_document(other)]}, ProfileError)
    assert same(read_profile(path), PROFILE)
    write_json(path, {"profiles": []}, ProfileError)
    with pytest.raises(ProfileError, match="not a profile"):
        read_profile(path)


def test_a_failed_write_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store_profile(PROFILE)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ProfileError, match="No space left"):
        store_profile(replace(PROFILE, roofs=None))
    assert path.read_bytes() == before
    assert list(folder.iterdir()) == [path]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {}, ProfileError, make_folder=True)


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert profiles_folder() == tmp_path / ".cache" / "paceline" / "profiles"


def run(pl: float, t_tg: float, pp: Any = 128, tg: int = 64, **more: Any) -> str:
    """A line as llama-batched-bench writes it."""
    rest = {"n_kv_max": 8192, "n_batch": 2048, "n_ubatch": 512, "is_pp_shared": 0, "n_threads": 8}
    sizes = {"pp": pp, "tg": tg, "pl": pl, "n_kv": 1}
    speeds = {"t_pp": 0.5, "speed_pp": 1.0, "speed_tg": 1.0, "t": 0.5 + t_tg, "speed": 1.0}
    return json.dumps({**rest, **sizes, **speeds, "t_tg": t_tg, **more})


def imported(tmp_path: Path, *lines: str) -> Any:
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(lines))
    return import_tables(path)


def test_batched_bench(tmp_path: Path) -> None:
    lines = ["", run(1, 0.64), run(2, 0.704), run(8, 1.28), "", run(1, 1.28, pp=1024), ""]
    (table,) = imported(tmp_path, *lines)
    assert (table.name, table.is_relative) == ("bench", False)
    assert table.contexts == [128 + 32, 1024 + 32]
    assert [table.milliseconds(w, 160) for w in (1, 2, 8)] == pytest.approx([10, 11, 20])
    assert table.milliseconds(1, 1056) == pytest.approx(20)
    assert table.cost_ratio(8, 160) == pytest.approx(2.0)


def test_repeated_runs_count_by_their_median(tmp_path: Path) -> None:
    (table,) = imported(tmp_path, run(1, 0.64), run(1, 6.4), run(1, 0.704))
    assert table.milliseconds(1) == pytest.approx(11)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([run(1, 1.0), "main: n_kv_max = 8192"], "line 2: not JSON"),
        ([run(1, 1.0), run(2, 1.0)[:-9]], "line 2: not JSON"),
        ([run(1, 1.0), "[1]"], "line 2: a run must be a JSON object"),
        ([run(1, 1.0), "", run(0, 1.0)], "line 3: pl is 0"),
        ([run(1, 1.0), run(2, 1.0, tg=0)], "line 2: tg is 0"),
        ([run(1, 0.0)], "line 1: t_tg is 0.0"),
        ([run(1, -1.0)], "line 1: t_tg is -1.0"),
        ([run(1, float("nan"))], "line 1: t_tg is nan"),
        ([run(1.5, 1.0)], "line 1: pl is 1.5"),
        ([run(True, 1.0)], "line 1: pl is True"),
        ([run(1, 1.0, pp="8")], "line 1: pp is '8'"),
        ([run(1, 1.0, is_tg_separate=1)], "line 1: is_tg_separate"),
        (['{"pp": 1, "pl": 1}'], "line 1: tg, t_tg is missing"),
        ([run(2, 1.0)], "no run with pl 1 at context 160"),
        ([], "no run with pl 1"),
        (["[" * 100_000], "line 1: not"),
    ],
)
def test_malformed_runs(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        imported(tmp_path, *lines)


# --- curves --------------------------------------------------------------------------------------

CURVE = {"name": "GPU", "cost_ratio": [1.0, 0.99, 1.5], "tokens_per_second_at_1": 20.0}


def curves(tmp_path: Path, *items: Any) -> Any:
    return imported(tmp_path, json.dumps({"source": "here", "curves": list(items)}, indent=1))


def test_curves(tmp_path: Path) -> None:
    absolute = {**CURVE, "draft_step_ratio": 0.1}
    relative = {"name": "CPU", "cost_ratio": [1, 3], "draft_step_ratio": None}
    draft = {**CURVE, "name": "both", "draft_step_ratio": 0.2, "draft_cost_ratio": [1.0, 0.9]}
    found = {table.name: table for table in curves(tmp_path, absolute, relative, draft)}
    assert list(found) == ["GPU", "GPU: draft", "CPU", "both", "both: draft"]
    gpu = found["GPU"]
    assert [gpu.milliseconds(w) for w in (1, 2, 3)] == pytest.approx([50, 49.5, 75])
    assert found["GPU: draft"].milliseconds(1) == pytest.approx(5)
    assert (found["CPU"].is_relative, gpu.is_relative) == (True, False)
    assert found["CPU"].milliseconds(2) == 3
    assert found["both: draft"].milliseconds(2) == pytest.approx(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "no name"),
        ({}, "a curve 'GPU' before"),
        ({"cost_ratio": None}, "cost_ratio must be a list"),
        ({"cost_ratio": []}, "cost_ratio must be a list"),
        ({"cost_ratio": [1.0, 0.0]}, "cost_ratio of width 2 is 0.0"),
        ({"cost_ratio": [1.0, "x"]}, "cost_ratio of width 2 is 'x'"),
        ({"tokens_per_second_at_1": 0}, "tokens_per_second_at_1 is 0"),
        ({"draft_step_ratio": float("inf")}, "draft_step_ratio is inf"),
        ({"name": "x" * 1000}, "name must have"),
    ],
)
def test_malformed_curves(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=f"curve 2: .*{message}"):
        curves(tmp_path, CURVE, {**CURVE, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"curves": []}', "there is no curve"),
        ('{"curves": [\n{"name": \n]}', "line 3: not JSON"),
        ('{"curves": [\n{"name": "a", "cost_ratio": [1]}\n', "not JSON"),
        ('{"curves": [\n{"name": "a", "cost_ratio": [1]},\n5]}', "curve 2: a curve must be"),
    ],
)
def test_malformed_files_of_curves(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        imported(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("binary", "missing", "."):
        with pytest.raises(ProfileError, match="cannot be read"):
            import_tables(tmp_path / name)


def test_published_curves(shared_data: Path) -> None:
    path = shared_data / "cost_curves.json"
    published = json.loads(path.read_text())["curves"]
    found = {table.name: table for table in import_tables(path)}
    for curve in published:
        table = found[curve["name"]]
        ratios = [table.cost_ratio(width) for width in range(1, len(curve["cost_ratio"]) + 1)]
        assert ratios == pytest.approx(curve["cost_ratio"])
        if curve["draft_step_ratio"]:
            step = found[f"{table.name}: draft"].milliseconds(1)
            assert step / table.milliseconds(1) == pytest.approx(curve["draft_step_ratio"])
