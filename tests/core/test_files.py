"""Paths that somebody named: what the system says of them is an error of ours at every door.

Files and folders as a whole or not at all: full disks, places that are shut, other failures.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.build.default_drafts import default_speculative_config, is_embedded
from paceline.cli.serve import stored_bytes
from paceline.cli.settings import named_folders
from paceline.core import files
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError, TraceError
from paceline.core.files import (
    checked_path,
    exchange_folders,
    read_as,
    whole_file,
    whole_folder,
    write_text,
)
from paceline.loading.adapter import load_adapter
from paceline.loading.catalogue import embedded_model
from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers.heads.checkpoint import place_of
from paceline.server.batch import AnswerFile, count_lines, read_batch
from tests.adapters import adapter_folder, adapter_tensors
from tests.disks import full_disk
from tests.paths import impossible_paths
from tests.toy import toy_folder, toy_tensors

DOORS: dict[str, Callable[[str], Any]] = {
    "an adapter": lambda path: load_adapter(path, load_checkpoint(TOY).config, {}),
    "a model": load_checkpoint,
    "a head": place_of,
    "requests": lambda path: list(read_batch(Path(path))),
    "their number": lambda path: count_lines(Path(path)),
    "answers": lambda path: AnswerFile(Path(path)),
}
TOY = embedded_model("target")
KINDS = ("a long name", "a long path", "through a file", "a circle")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_a_path_that_cannot_be_read_is_an_error_of_ours(
    tmp_path: Path, door: str, kind: str
) -> None:
    with pytest.raises(PacelineError):
        DOORS[door](impossible_paths(tmp_path)[kind])


@pytest.mark.parametrize("kind", ["no such user", "a zero byte"])
@pytest.mark.parametrize("door", ["an adapter", "a model", "a head"])
def test_a_name_that_is_no_path_leads_to_nothing(tmp_path: Path, door: str, kind: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no"):
        DOORS[door](impossible_paths(tmp_path)[kind])


@pytest.mark.parametrize("kind", ["a circle", "no such user", "a zero byte", "through a file"])
def test_what_is_asked_of_a_model_before_it_is_loaded_takes_any_path(
    tmp_path: Path, kind: str
) -> None:
    path = impossible_paths(tmp_path)[kind]
    assert not is_embedded(path)
    assert default_speculative_config(path)
    assert stored_bytes(path) == 0
    assert named_folders([f"name={path}"]).keys() == {"name"}


def test_what_lies_in_a_folder_and_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's files, which tests that run as root cannot have."""
    model = toy_folder(tmp_path)
    adapter = adapter_folder(tmp_path / "adapter", adapter_tensors(toy_tensors()))
    config = load_checkpoint(model).config
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ModelLoadError, match=r"cannot read .*adapter_model.*: Permission denied"):
        load_adapter(adapter, config, {})
    with pytest.raises(ModelLoadError, match=r"cannot read .*model.safetensors: Permission denied"):
        load_checkpoint(model)


def test_an_error_names_what_was_asked_for_and_the_file_in_it() -> None:
    for name, told in (("/y", "cannot read requests from /x: /y: No"), ("/x", "from /x: No such")):
        with pytest.raises(ConfigError, match=told), read_as(ConfigError, "requests from /x"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def test_the_home_of_whoever_runs_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    assert checked_path("~/file", ConfigError) == (tmp_path / "file", True)
    assert checked_path("~/none", ConfigError) == (tmp_path / "none", False)


FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(place: Path) -> None:
    place.write_text("half")
    raise FULL


def fill(place: Path) -> None:
    with full_disk():
        place.write_bytes(bytes(1 << 20))


def fill_by_safetensors(place: Path) -> None:
    with full_disk():
        save_file({"a": np.zeros(1 << 20, np.uint8)}, place)


WAYS = (fail, fill, fill_by_safetensors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_stays_what_it_was(
    tmp_path: Path, way: Callable[[Path], None], before: str | None
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)

    def write() -> None:
        with whole_file(path, TraceError) as place:
            way(place)

    with pytest.raises(TraceError, match=r"cannot write .*/file: .*; make room"):
        write()
    assert sorted(tmp_path.iterdir()) == ([] if before is None else [path])
    assert before is None or path.read_text() == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_stays_what_it_was(
    tmp_path: Path, way: Callable[[Path], None], exists: bool
) -> None:
    path = tmp_path / "folder"
    if exists:
        path.mkdir()

    def write() -> None:
        with whole_folder(path, TraceError) as place:
            (place / "inner").mkdir()
            (place / "inner" / "first").touch()
            way(place / "second")

    with pytest.raises(TraceError, match=r"cannot write .*/folder: "):
        write()
    assert list(tmp_path.iterdir()) == ([path] if exists else [])
    assert not exists or not list(path.iterdir())


def test_what_is_complete_has_its_name(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "text", "caf\u00e9", TraceError, make_folder=True)
    assert (tmp_path / "a" / "text").read_text(encoding="utf-8") == "caf\u00e9"
    for name in ("new", "a"):
        with whole_folder(tmp_path / name, TraceError) as place:
            (place / "file").write_text("x")
        assert (tmp_path / name / "file").read_text() == "x"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "new"]


def test_files_can_be_read_by_others_as_any_that_a_program_writes(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_text(tmp_path / "file", "x", TraceError)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_errors_of_others_pass_and_leave_nothing(tmp_path: Path) -> None:
    for manager in (whole_file, whole_folder):
        with pytest.raises(ZeroDivisionError), manager(tmp_path / "x", TraceError):
            _ = 1 / 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_or_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        write_text(tmp_path / "no" / "file", "", TraceError)
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="File exists"):
        write_text(tmp_path / "file" / "inner", "", TraceError, make_folder=True)


def test_a_full_disk_behind_the_last_step_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*_: Any) -> None:
        raise FULL

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(TraceError, match="No space left"):
        write_text(tmp_path / "file", "x", TraceError)
    assert not list(tmp_path.iterdir())


def test_a_device_stays_one(tmp_path: Path) -> None:
    write_text(os.devnull, "x", TraceError)
    assert Path(os.devnull).is_char_device()
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    write_text(link, "x", TraceError)
    assert link.is_symlink()


def test_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(path, "through", TraceError)
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert path.is_fifo()


@pytest.mark.parametrize("before", [None, "old"])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, before: str | None) -> None:
    (tmp_path / "folder").mkdir()
    end, link = tmp_path / "folder" / "file", tmp_path / "link"
    link.symlink_to("folder/file")
    if before is not None:
        end.write_text(before)
    with pytest.raises(TraceError), whole_file(link, TraceError) as place:
        fail(place)
    assert (end.read_text() if end.exists() else None) == before
    write_text(link, "new", TraceError)
    assert link.is_symlink()
    assert end.read_text() == "new"
    assert list(end.parent.iterdir()) == [end]


@pytest.mark.parametrize("name", [".", "..", "", "/", "folder"])
def test_a_folder_is_no_place_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=r"cannot write .*: Is a directory"):
        write_text(name, "x", TraceError)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


# --- two folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_two_folders_get_each_others_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    exchange_folders(one, other, TraceError)
    assert [(folder / "name").read_text() for folder in (one, other)] == ["other", "one"]
    assert {path.name for path in tmp_path.iterdir()} == {"one", "other"}


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_folders_are_exchanged_at_once_on_linux(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    assert files._exchanged(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("at_once", [True, False])
def test_folders_stay_where_one_of_them_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    (tmp_path / "one").mkdir()
    with pytest.raises(TraceError, match="one"):
        exchange_folders(tmp_path / "one", tmp_path / "other", TraceError)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
