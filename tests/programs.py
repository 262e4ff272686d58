"""The benchmarks as modules, for their tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"


def module(name: str) -> Any:
    """A module of the benchmarks' folder."""
    if str(FOLDER) not in sys.path:
        # As for a program that is started by its path: its neighbours are top-level modules.
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)
