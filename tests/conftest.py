"""What every test may lean on: threads, the property-test profile, and data beside the clone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# Read when torch is first imported: thread pools of parallel workers would only spin for each
# other, and tests that are about threads set their number themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("paceline", deadline=None, max_examples=30, print_blob=True)
settings.load_profile("paceline")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of trained models, prompts and texts that lies outside the repository."""
    configured = os.environ.get("PACELINE_TEST_DATA")
    folder = Path(configured) if configured else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set PACELINE_TEST_DATA to a folder that has it")
    return folder
