"""The native kernels' tests: left out as a whole where the module is not built.

``PACELINE_NATIVE_MODULE`` names another build of the module to test, e.g. the emulated one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

NAME = "paceline._native"


def _load() -> str | None:
    """Import the module under test; why that failed, or None."""
    path = os.environ.get("PACELINE_NATIVE_MODULE")
    try:
        if path is None:
            importlib.import_module(NAME)
            return None
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[NAME] = module
    except ImportError as error:
        return str(error)
    return None


_reason = _load()
collect_ignore_glob = [] if _reason is None else ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if _reason is None else f"tests/native left out: {_reason}"
