"""The folders that Paceline writes into: the list of them, and the page that tells users."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.core.folders import (
    CACHED,
    UserFolder,
    cache_folder,
    config_folder,
    places,
    state_folder,
)
from tests.builds import ROOT

PAGE = ROOT / "docs" / "files.md"
OWN = re.compile(r"^\| `(~/\.(?:cache|config|local/state)/paceline[^`]*)` \|", re.MULTILINE)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_the_page_lists_every_folder_and_no_other(home: Path) -> None:
    told = OWN.findall(PAGE.read_text(encoding="utf-8"))
    folders = [*map(cache_folder, CACHED), config_folder(), state_folder()]
    assert [each.replace("~", str(home)) for each in told] == [str(each) for each in folders]


def test_folders_that_are_there_are_told_with_their_sizes(home: Path) -> None:
    assert places() == ()
    packed = cache_folder("packed") / "a-int8"
    packed.mkdir(parents=True)
    (packed / "weights").write_bytes(bytes(1000))
    (packed / "config.json").write_bytes(bytes(24))
    (packed / "gone").symlink_to("nowhere")
    assert places() == (
        UserFolder(str(cache_folder("packed")), CACHED["packed"], 1024 + len("nowhere")),
    )
    config_folder().mkdir(parents=True)
    assert [place.num_bytes for place in places()] == [1031, 0]


def test_a_kind_that_is_not_listed_has_no_folder() -> None:
    with pytest.raises(AssertionError):
        cache_folder("secrets")


def test_no_other_module_decides_on_a_folder_of_the_user() -> None:
    """Those of Ollama and LM Studio are read alone."""
    home = re.compile(r"Path\.home\(|XDG_\w+_HOME\"|platformdirs|user_cache_dir")
    deciding = {
        path.relative_to(ROOT / "src" / "paceline").as_posix()
        for path in ROOT.glob("src/**/*.py")
        if home.search(path.read_text(encoding="utf-8"))
    }
    assert deciding == {"core/folders.py", "loading/catalogue.py"}
