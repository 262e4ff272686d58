"""What every test may lean on: threads, garbage, the profile of property tests, data nearby."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
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


def pytest_collection_finish() -> None:
    """pytest puts its handlers on each logger that propagates nothing, of which torch has fifty,
    and takes them off again, three times a test: more work than most tests."""
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker says only how a test ended: what else is said of most takes longer than they do."""
    if not hasattr(item.config, "workerinput") or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of trained models, prompts and texts that lies outside the repository."""
    configured = os.environ.get("PACELINE_TEST_DATA")
    folder = Path(configured) if configured else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set PACELINE_TEST_DATA to a folder that has it")
    return folder
