"""The frame of the command line: how fast help is, the version, and ``python -m paceline``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paceline

HELP_SECONDS = 0.3
SOURCE = str(Path(paceline.__file__).parent.parent)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "paceline", *arguments)


def children_seconds() -> float:
    """Processor time of processes that have ended: a busy machine does not lengthen it."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_is_quick() -> None:
    seconds = []
    for _ in range(5):
        began = children_seconds()
        result = call("--help")
        seconds.append(children_seconds() - began)
        assert result.returncode == 0
        if seconds[-1] < HELP_SECONDS:
            break  # the best of them counts
    assert "run" in result.stdout
    assert min(seconds) < HELP_SECONDS


def test_version() -> None:
    assert call("--version").stdout == f"paceline {paceline.__version__}\n"


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\nfrom paceline.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    loaded = set(python("-c", code).stderr.split())
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "rich", "tokenizers", "safetensors", "pydantic"}
