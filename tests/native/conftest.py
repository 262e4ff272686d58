"""The native kernels' tests: left out as a whole where the module is not built.

``PACELINE_NATIVE_MODULE`` names another build of the module to test, e.g. the emulated one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

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
native = sys.modules.get(NAME)
collect_ignore_glob = [] if _reason is None else ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if _reason is None else f"tests/native left out: {_reason}"


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Every test finds the level and the number of threads that the module was loaded with."""
    level, threads = native.isa(), native.num_threads()
    yield
    native.set_isa(level)
    native.set_threads(threads)


@pytest.fixture(params=[] if native is None else native.isas())
def isa(request: pytest.FixtureRequest) -> str:
    """The test runs once at each instruction-set level that this CPU has; its name."""
    native.set_isa(request.param)
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> int:
    """The test runs with each of these numbers of threads."""
    native.set_threads(request.param)
    return request.param
