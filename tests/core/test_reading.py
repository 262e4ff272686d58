"""Paths that somebody named: what the system says of them is an error of ours at every door."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.build.drafts import default_speculative_config, is_embedded
from paceline.cli.serve import stored_bytes
from paceline.cli.settings import named_folders
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError
from paceline.core.files import checked_path, read_as
from paceline.loading.adapter import load_adapter
from paceline.loading.catalogue import embedded_model
from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers.heads.checkpoint import place_of
from paceline.server.batch import AnswerFile, count_lines, read_batch
from tests.adapters import adapter_folder, adapter_tensors
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
