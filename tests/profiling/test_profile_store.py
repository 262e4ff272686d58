"""Stored profiles: found by their exact key, and never trusted."""

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
