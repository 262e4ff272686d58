"""What an sdist and a wheel hold, without compiling any kernel."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from paceline.backends.native.native import NOTE
from tests.builds import NO_COMPILER, ROOT, build, needs_backend

needs_backend()
OWN = f"paceline/_native{EXTENSION_SUFFIXES[0]}"
STAND_IN = """
cmake_minimum_required(VERSION 3.18)
project(paceline LANGUAGES NONE)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/@MODULE@ "installed by CMake")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/@MODULE@ DESTINATION paceline)
"""
INIT = '__version__ = "1.0.0"\n'
"""All that is built of the package's own: the version is taken from there."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The project without its modules and kernels; modules of two Pythons lie in the sources."""
    folder = tmp_path / "tree"
    package = folder / "src" / "paceline"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, folder)
    (package / "__init__.py").write_text(INIT)
    for name in (Path(OWN).name, "_native.cpython-27-vax-vms.so"):
        (package / name).write_text("built in place")
    return folder


def files(wheel: Path) -> dict[str, str]:
    """The text of the package's files by their names."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("paceline/")]
        return {name: archive.read(name).decode() for name in names}


@pytest.mark.slow
def test_an_sdist_holds_what_a_build_needs_and_no_results(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("csrc", "src", "tests", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    left_out = {".so", ".pyd", ".pyc"}
    wanted = {str(path.relative_to(ROOT)) for path in paths if path.suffix not in left_out}
    wanted |= {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert wanted - held == set()
    assert [name for name in held if name.startswith("benchmarks/results")] == []
    assert [name for name in held if Path(name).suffix in left_out] == []


def test_a_wheel_holds_the_module_that_was_compiled_for_it_and_no_stray_one(tree: Path) -> None:
    (tree / "CMakeLists.txt").write_text(STAND_IN.replace("@MODULE@", Path(OWN).name))
    wheel = build("wheel", tree, tree.parent)
    assert files(wheel) == {"paceline/__init__.py": INIT, OWN: "installed by CMake"}
    assert not wheel.stem.endswith("py3-none-any")


def test_a_wheel_without_kernels_says_why(tree: Path) -> None:
    wheel = build("wheel", tree, tree.parent, **NO_COMPILER)
    note = "no working C++ compiler was found where it was built\n"
    assert files(wheel) == {"paceline/__init__.py": INIT, f"paceline/{NOTE}": note}
    assert wheel.stem.endswith("py3-none-any")


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_kernels_that_do_not_compile_are_no_missing_compiler(tree: Path) -> None:
    wheel = build("wheel", tree, tree.parent)  # the tree has no csrc/
    assert files(wheel)[f"paceline/{NOTE}"].startswith("compiling them failed")
