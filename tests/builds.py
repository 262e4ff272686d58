"""Builds of the package by its own build backend, for the tests of what is in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
_BACKEND = "import sys, scikit_build_core.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def needs_backend() -> None:
    """Skip a module where the build backend is not installed."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed")


def clean_environment(**more: str) -> dict[str, str]:
    """This process' environment without what leads a program back to the checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    return {key: value for key, value in kept.items() if key != "PYTHONPATH"} | more


def build(kind: str, tree: Path, out: Path, **environment: str) -> Path:
    """Build a ``wheel`` or an ``sdist`` of a tree; returns its file."""
    done = subprocess.run(
        [sys.executable, "-c", _BACKEND, f"build_{kind}", str(out)],
        cwd=tree,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]
