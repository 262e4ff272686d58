"""The pool of threads: nothing lost, nothing seen early, forks and resizing, and who is active.

``pool_stress(phases, pieces)`` counts the pieces that went right; see there.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline._native as native

STALLED, WORKED = (0.004, 0.003, 8, 8), (0.004, 0.0, 8, 8)
"""Phases of four milliseconds: (seconds, of which the caller lost some, its pieces, others')."""


@pytest.mark.parametrize("threads", [1, 2, 3, 2 * (os.cpu_count() or 1) + 1])
@pytest.mark.parametrize("pieces", [1, 2, 24])
def test_every_piece_is_done_once_and_sees_the_phase_before(threads: int, pieces: int) -> None:
    native.set_threads(threads)
    assert native.num_threads() == threads
    assert native.pool_stress(500, pieces) == 500 * pieces


@pytest.mark.parametrize("nap", [2e-5, 1e-4, 1e-3])  # around the time that a thread spins
def test_sleeping_workers_wake(nap: float) -> None:
    native.set_threads(3)
    for _ in range(50):
        assert native.pool_stress(1, 24) == 24
        time.sleep(nap)


def test_resizing() -> None:
    for threads in (4, 1, 2, 7, 7, 3):
        native.set_threads(threads)
        assert native.pool_stress(5, 24) == 5 * 24
    for threads in (5, 2):  # threads that never ran
        native.set_threads(threads)
    assert native.pool_stress(5, 24) == 5 * 24
    with pytest.raises(ValueError, match=r"1\.\.1024"):
        native.set_threads(0)


@pytest.mark.timing
def test_idle_workers_use_no_cpu() -> None:
    """Three that went on spinning would use one processor at least."""
    native.set_threads(4)
    native.pool_stress(5, 24)
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
        counts = list(executor.map(lambda _: native.pool_stress(50, 24), range(6)))
    assert counts == [50 * 24] * 6


FORK = """
import os
import paceline._native as native
native.set_threads(3)
native.pool_stress(5, 24)
child = os.fork()
right = native.num_threads() == 3 and native.pool_stress(5, 24) == 5 * 24
if child == 0:
    os._exit(0 if right else 1)
raise SystemExit(0 if right and os.waitpid(child, 0)[1] == 0 else 1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False).returncode == 0


class TestCrew:
    """Which threads work is a function of how long phases took and how long they stalled."""

    def test_everyone_works_where_nothing_stalls(self) -> None:
        assert native.crew(4, [WORKED] * 100) == [4] * 100

    def test_a_seldom_stall_changes_nothing(self) -> None:
        assert set(native.crew(2, ([WORKED] * 9 + [STALLED]) * 20)) == {2}

    def test_a_thread_that_stalls_more_than_it_brings_is_left_out(self) -> None:
        assert native.crew(2, [STALLED] * 4)[-1] == 1

    def test_a_caller_without_a_processor_does_not_make_the_others_precious(self) -> None:
        """It did one piece of sixteen, because it was away for nearly all of the phase."""
        away = (0.004, 0.0, 1, 15)
        assert native.crew(2, ([away] + [STALLED] * 3) * 4)[-1] == 1

    def test_of_many_threads_one_goes_after_the_other(self) -> None:
        active = [8, *native.crew(8, [(0.004, 0.001, 16, 16)] * 10)]
        assert {a - b for a, b in itertools.pairwise(active)} <= {0, 1}
        assert active[-1] < 8

    def test_one_more_is_tried_at_longer_and_longer_intervals(self) -> None:
        """While two stall: how many phases there are from one trial to the next."""
        phases, trials, active = [], [], 2
        for number in range(1500):
            phases.append(STALLED if active == 2 else WORKED)
            before, active = active, native.crew(2, phases)[-1]
            if active > before:
                trials.append(number)
        gaps = [b - a for a, b in itertools.pairwise(trials)]
        assert gaps[0] < gaps[1] < gaps[2]
        assert max(gaps) <= 1.0 / 0.004 + 10  # after a second of work at the latest
        assert gaps[-1] > 200

    def test_all_work_again_when_the_machine_is_free(self) -> None:
        phases = [STALLED] * 4 + [WORKED] * 100
        assert native.crew(2, phases)[-1] == 2
