"""The pool of threads: nothing lost, nothing seen early, idle threads at rest, forks and resizing.

``pool_stress(runs, barriers)`` counts what went right; see there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline._native as native


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_threads(before)


def expected(runs: int, barriers: int) -> int:
    return runs * native.num_threads() * (barriers + 8)


@pytest.mark.parametrize("threads", [1, 2, 3, 2 * (os.cpu_count() or 1) + 1])
def test_runs_and_barriers(threads: int) -> None:
    native.set_threads(threads)
    assert native.num_threads() == threads
    assert native.pool_stress(200, 3) == expected(200, 3)


@pytest.mark.parametrize("nap", [2e-5, 1e-4, 1e-3])  # around the time that a thread spins
def test_sleeping_workers_wake(nap: float) -> None:
    native.set_threads(3)
    for _ in range(50):
        assert native.pool_stress(1, 1) == expected(1, 1)
        time.sleep(nap)


def test_resizing() -> None:
    for threads in (4, 1, 2, 7, 7, 3):
        native.set_threads(threads)
        assert native.pool_stress(5, 2) == expected(5, 2)
    for threads in (5, 2):  # threads that never ran
        native.set_threads(threads)
    assert native.pool_stress(5, 2) == expected(5, 2)
    with pytest.raises(ValueError, match=r"1\.\.1024"):
        native.set_threads(0)


def test_idle_workers_use_no_cpu() -> None:
    """Three that went on spinning would use one processor at least."""
    native.set_threads(4)
    native.pool_stress(5, 2)
    time.sleep(0.02)
    shares = []
    while len(shares) < 3 and min(shares, default=1.0) >= 0.1:
        before, began = time.process_time(), time.monotonic()
        time.sleep(0.4)
        shares.append((time.process_time() - before) / (time.monotonic() - began))
    assert min(shares) < 0.1


def test_callers_take_turns() -> None:
    native.set_threads(3)
    with ThreadPoolExecutor(3) as executor:
        counts = list(executor.map(lambda _: native.pool_stress(50, 2), range(6)))
    assert counts == [expected(50, 2)] * 6


FORK = """
import os
import paceline._native as native
native.set_threads(3)
native.pool_stress(5, 2)
child = os.fork()
count = native.pool_stress(5, 2)
right = native.num_threads() == 3 and count == 5 * 3 * (2 + 8)
if child == 0:
    os._exit(0 if right else 1)
raise SystemExit(0 if right and os.waitpid(child, 0)[1] == 0 else 1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False).returncode == 0
