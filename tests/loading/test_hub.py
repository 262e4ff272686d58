"""GGUF files of the hub by their quantisation, from a hub that is made up."""

from __future__ import annotations

import fnmatch
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelLoadError
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.fetching import hub_place, is_hub_id
from tests.loading.gguf_writing import convert

REPOSITORY = "some-org/tiny-GGUF"


class FakeHub:
    """A hub whose repository is a folder, with a cache that is another."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote, self.cache = remote, cache
        self.asked: list[str] = []
        self.is_reachable = True

    def snapshot_download(
        self, repository: str, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        assert repository == REPOSITORY
        if local_files_only and not self.cache.exists():
            raise FileNotFoundError("nothing is in the cache")
        if not local_files_only:
            for name in self.names():
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in allow_patterns):
                    self.asked.append(name)
                    (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(self.remote / name, self.cache / name)
        return str(self.cache)

    def HfApi(self) -> FakeHub:  # noqa: N802
        return self

    def list_repo_files(self, repository: str) -> list[str]:
        assert repository == REPOSITORY
        if not self.is_reachable:
            raise ConnectionError("offline")
        return self.names()

    def names(self) -> list[str]:
        paths = (path for path in self.remote.rglob("*") if path.is_file())
        return [path.relative_to(self.remote).as_posix() for path in paths]


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    convert("llama", folder / "tiny[1]-F16.gguf", qtype="F16")
    convert("llama", folder / "tiny-F32.gguf", shard_tensors=8)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    return folder


@pytest.fixture
def hub(remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made: Any = FakeHub(remote, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    return made


def test_the_one_file_of_a_quantisation_is_fetched(hub: FakeHub) -> None:
    checkpoint = load_checkpoint(f"{REPOSITORY}:f16")
    assert hub.asked == ["tiny[1]-F16.gguf"]
    assert checkpoint.name == f"{REPOSITORY}:f16"
    assert hub_place(f"hf.co/{REPOSITORY}:F16") == hub.cache / "tiny[1]-F16.gguf"


def test_all_shards_are_fetched(hub: FakeHub) -> None:
    assert load_checkpoint(f"{REPOSITORY}:F32").tensors["model.norm.weight"].ndim == 1
    assert len(hub.asked) > 1
    assert all(name.startswith("tiny-F32-0000") for name in hub.asked)


def test_what_is_in_the_cache_is_not_asked_for(hub: FakeHub) -> None:
    place = hub_place(f"{REPOSITORY}:F16")
    hub.asked.clear()
    hub.is_reachable = False
    assert hub_place(f"{REPOSITORY}:F16") == place
    assert hub.asked == []
    with pytest.raises(ModelLoadError, match="ConnectionError: offline"):
        hub_place(f"{REPOSITORY}:F32")


def test_a_cache_without_all_shards_is_completed(hub: FakeHub) -> None:
    place = hub_place(f"{REPOSITORY}:F32")
    place.unlink()
    assert hub_place(f"{REPOSITORY}:F32") == place
    assert place.is_file()


def test_an_unknown_quantisation_lists_those_that_are_there(hub: FakeHub) -> None:
    with pytest.raises(ModelLoadError, match=r"no GGUF file of Q4_0; there are F32, F16$"):
        load_checkpoint(f"{REPOSITORY}:Q4_0")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/name", True),
        ("org/name:Q4_K_M", True),
        ("hf.co/org/name:Q4_K_M", True),
        ("huggingface.co/org/name:Q4_K_M", True),
        ("hf.co/org/name", False),
        ("a/b/c", False),
        ("org/name:", False),
        ("org/name:a/b", False),
        ("org/..:Q4_0", False),
        ("name:tag", False),
    ],
)
def test_hub_ids(name: str, is_one: bool) -> None:
    assert is_hub_id(name) is is_one
