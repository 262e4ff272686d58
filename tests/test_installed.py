"""Paceline as users have it: compiled, packed, installed and run from elsewhere.

Each environment is new and has nothing but Paceline in it. The libraries that Paceline needs are
those of the environment that runs the tests, so what is tested is Paceline's own files and
metadata, and not that its requirements can be installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.builds import NO_COMPILER, ROOT, build, clean_environment, needs_backend

needs_backend()
# Compiling the kernels takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPT = ("run", "embedded", "-p", "def add(a, b):", "--max-tokens", "8", "--json")


class Installed:
    """A new environment with one wheel in it."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(folder)]
        self._said([*pip, "install", "--no-deps", "--no-index", str(wheel)])
        (packages,) = folder.glob("lib/python*/site-packages")
        # Their own .pth files, such as that of an editable Paceline, are not read.
        (packages / "libraries.pth").write_text("\n".join(_libraries()))

    def python(self, program: str) -> str:
        """What a program says."""
        return self._said([str(self.folder / "bin" / "python"), "-c", program]).stdout

    def paceline(self, *arguments: str) -> tuple[dict[str, Any], str]:
        """What a command says: the document that ends its output, and its stderr."""
        done = self._said([str(self.folder / "bin" / "paceline"), *arguments])
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    def _said(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        home = str(self.folder / "home")
        environment = clean_environment(HOME=home, XDG_CACHE_HOME=home)
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


def _libraries() -> list[str]:
    """Folders of modules, but those that hold a Paceline."""
    return [path for path in sys.path if path and not (Path(path) / "paceline").exists()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture
def unpacked(sdist: Path, tmp_path: Path) -> Path:
    """The tree of an sdist, in which nothing was built."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    return tree


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("source", ["tree", "sdist"])
def test_an_installed_package_runs_natively(source: str, unpacked: Path, tmp_path: Path) -> None:
    wheel = build("wheel", ROOT if source == "tree" else unpacked, tmp_path)
    installed = Installed(wheel, tmp_path / "environment")
    where = installed.python("import paceline; print(paceline.__file__)")
    assert Path(where.strip()).is_relative_to(installed.folder)
    answered, _ = installed.paceline(*PROMPT)
    assert answered["backend"].startswith("native")
    found, err = installed.paceline("doctor", "--json")
    assert found["kernels"]["problem"] is None
    assert "native kernels" not in err


def test_a_package_without_kernels_runs_and_says_why(unpacked: Path, tmp_path: Path) -> None:
    wheel = build("wheel", unpacked, tmp_path, **NO_COMPILER)
    installed = Installed(wheel, tmp_path / "other")
    answered, err = installed.paceline(*PROMPT)
    assert answered["backend"].startswith("reference")
    assert len(answered["outputs"][0]["token_ids"]) == 8
    said = "built without native kernels because no working C++ compiler was found"
    assert said in err
    found, _ = installed.paceline("doctor", "--json")
    assert said in found["kernels"]["problem"]
    assert "install Paceline again where a C++17 compiler is" in found["advice"][0]
    advised = installed.python(
        "from paceline.core.installation import install_command; print(install_command('torch'))"
    )
    assert advised.strip().endswith(f"-m pip install '{wheel}[torch]'")
