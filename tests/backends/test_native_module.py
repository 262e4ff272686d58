"""Why the extension cannot be used: each cause has its own words, and what to do about it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.native import native
from paceline.backends.native.native import NOTE, explain

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
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (package / NOTE).write_text("no compiler was found")
    fresh = another_native()
    fresh.PACKAGE, fresh.MODULE = package, "paceline._absent"
    assert fresh.why_not_native() == fresh.why_not_native()
    assert fresh.missing() is not None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "because no compiler was found; to get them install" in record.getMessage()


def another_native() -> Any:
    """The module once more, which has not looked for the extension yet."""
    spec = importlib.util.spec_from_file_location("paceline.models.ops.another", native.__file__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
