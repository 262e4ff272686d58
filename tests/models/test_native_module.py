"""Why the extension cannot be used: each cause has its own words, and what to do about it."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from paceline.models.ops import native
from paceline.models.ops.native import NOTE, explain

ERROR = ImportError("libfoo.so: undefined symbol")
OWN = f"_native{EXTENSION_SUFFIXES[0]}"
FOREIGN = "_native.cpython-27-vax-vms.so"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages" / "paceline"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, f"is missing: there is no {OWN}"),
        ({NOTE: "no compiler was found\n"}, "built without native kernels because no compiler was"),
        ({FOREIGN: ""}, f"{FOREIGN} is of another Python or system"),
        ({OWN: ""}, "is there and does not load (libfoo.so: undefined symbol)"),
        ({OWN: "", FOREIGN: ""}, "does not load"),
    ],
)
def test_each_cause_has_its_reason(package: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        (package / name).write_text(text)
    found = explain(package, ERROR)
    assert reason in found.reason
    assert "C++17 compiler" in found.remedy
    assert str(found) == f"{found.reason}; to get them {found.remedy}"


def test_a_checkout_builds_its_own(package: Path) -> None:
    (package.parents[1] / "CMakeLists.txt").write_text("")
    assert "make native" in explain(package, ERROR).remedy


def test_a_fallback_is_logged_once_with_its_cause(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (package / NOTE).write_text("no compiler was found")
    monkeypatch.setattr(native, "PACKAGE", package)
    monkeypatch.setattr(native, "MODULE", "paceline._absent")
    native._load.cache_clear()
    try:
        assert native.why_not_native() == native.why_not_native()
        assert native.missing() is not None
    finally:
        native._load.cache_clear()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "because no compiler was found; to get them install" in record.getMessage()
