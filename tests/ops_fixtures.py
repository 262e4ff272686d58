"""Backends and settings that tests of several rooms ask for; their ``conftest.py`` takes them.

The root's does not: tests of another build of the native module must not load the usual one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module
from paceline.backends.rows.reference import ReferenceOps
from paceline.models.threads import num_threads, set_num_threads
from tests.levels import SOME


@pytest.fixture(params=["reference", *SOME])
def ops_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Backends by dtype, the native one at every level of this CPU."""
    if request.param == "reference":
        yield ReferenceOps
        return
    before = native_module().isa()
    native_module().set_isa(request.param)
    yield CpuOps
    native_module().set_isa(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices of tiny models only make threads wait for each other."""
    before = num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)
