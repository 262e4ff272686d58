"""``paceline rm`` deletes what Paceline fetched or packed, and nothing of others'."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.models import PullOptions, pull_command
from paceline.core.folders import PACKED, cache_folder
from paceline.disk.packed_room import MARK, hold, place_mark
from paceline.loading.catalogue import find_entry
from tests.cli.conftest import Result
from tests.loading.catalogues import entry_text, isolate, name_models, put_wheels
from tests.loading.test_downloaded import put_lm_studio, put_ollama

Cli = Callable[..., Result]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def fetched() -> Path:
    name_models(entry_text())
    pull_command(PullOptions(name="tiny"), put_wheels)
    entry = find_entry("tiny")
    assert entry is not None
    return entry.place


def packed_copy(file: Path) -> Path:
    copy = cache_folder(PACKED) / f"a-model-int8-{place_mark(file)}-0123456789abcdef"
    copy.mkdir(parents=True)
    (copy / MARK).write_text("{}")
    return copy


def test_a_fetched_model_goes_with_its_packed_copies(cli: Cli, fetched: Path) -> None:
    copy, other = packed_copy(fetched), packed_copy(Path("/elsewhere"))
    result = cli("rm", "tiny", "--yes")
    assert (result.code, result.out) == (0, f"deleted {fetched}\ndeleted {copy}\n")
    assert not fetched.exists()
    assert not copy.exists()
    assert other.exists()
    assert "paceline pull tiny" in cli("rm", "tiny", "--yes").err


def test_without_a_terminal_it_has_to_be_told(cli: Cli, fetched: Path) -> None:
    result = cli("rm", "tiny")
    assert result.code == 2
    assert str(fetched) in result.err
    assert "--yes" in result.err
    assert fetched.exists()


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
def test_a_terminal_is_asked(
    cli: Cli, fetched: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr(io, "StringIO", Terminal)
    result = cli("rm", "tiny", stdin=answer)
    assert result.code == code
    assert str(fetched) in result.err
    assert fetched.exists() == (code != 0)


def test_all_names_are_looked_at_first(cli: Cli, fetched: Path) -> None:
    result = cli("rm", "tiny", "nothing", "--yes")
    assert result.code == 2
    assert "no model named nothing" in result.err
    assert fetched.exists()


def test_paths_of_our_own_are_known(cli: Cli, fetched: Path, tmp_path: Path) -> None:
    copy = packed_copy(tmp_path)
    assert cli("rm", str(fetched), str(copy), "-y").code == 0
    assert not fetched.exists()
    assert not copy.exists()


def test_files_of_the_user_stay(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"")
    name_models(f"[mine]\npath = '{file}'\n")
    for name in ("mine", str(file)):
        result = cli("rm", name, "--yes")
        assert result.code == 2
        assert f"rm -r '{file}'" in result.err
    assert file.exists()


def test_what_was_packed_of_another_model_goes_and_the_model_stays(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    copy = packed_copy(file)
    result = cli("rm", str(tmp_path), "--yes")
    assert (result.code, result.out) == (0, f"deleted {copy}\n")
    assert f"rm -r {tmp_path}" in result.err
    assert file.exists()


def test_a_copy_in_use_stays(cli: Cli, tmp_path: Path) -> None:
    copy = packed_copy(tmp_path)
    held = hold(copy)
    result = cli("rm", str(copy), "--yes")
    assert held is not None
    assert result.code == 2
    assert "in use" in result.err
    assert copy.exists()


def test_owners_are_told_how(cli: Cli, folder: Path) -> None:
    put_ollama(folder, b"GGUF", "registry.ollama.ai/library/llama3/latest")
    file = put_lm_studio(folder, "publisher/repository/model-Q4_K_M.gguf", b"GGUF")
    wanted = {
        "ollama:llama3:latest": "ollama rm llama3:latest",
        "llama3": "ollama rm llama3",
        "lmstudio:publisher/repository": f"rm {file}",
        "hf.co/owner/model:Q4_0": "hf cache rm model/owner/model",
        "owner/model": "hf cache rm model/owner/model",
    }
    for name, command in wanted.items():
        result = cli("rm", name, "--yes")
        assert result.code == 2
        assert command in result.err
