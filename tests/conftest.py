"""What every test may lean on: threads, garbage, the profile of property tests, data nearby."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# Read when torch is first imported: thread pools of parallel workers would only spin for each
# other, and those of tests that are about threads, which set their number, likewise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("paceline", deadline=None, max_examples=30, print_blob=True)
settings.load_profile("paceline")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests and modules live to the end: no garbage is looked for among them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of trained models, prompts and texts that lies outside the repository."""
    configured = os.environ.get("PACELINE_TEST_DATA")
    folder = Path(configured) if configured else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set PACELINE_TEST_DATA to a folder that has it")
    return folder
