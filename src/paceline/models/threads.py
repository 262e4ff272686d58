"""How many threads models compute with: the native kernels, and torch where it is loaded."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from paceline.config import MAX_THREADS
from paceline.core.machine import cpu_quota, read

_chosen: list[int] = []
"""What :func:`set_num_threads` said last; empty before."""


def num_threads() -> int:
    """What was set; torch's where it is loaded, ``OMP_NUM_THREADS`` or the cores."""
    if _chosen:
        return _chosen[0]
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else _usual()


def set_num_threads(number: int) -> None:
    _chosen[:] = [number]
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(number)


def cores() -> int:
    """That this process may use."""
    return len(_usable())


def physical_cores(folder: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Of them, those that share nothing; None where the system does not say."""
    shared = {
        read(folder / f"cpu{core}/topology/thread_siblings_list") or None for core in _usable()
    }
    return None if None in shared else len(shared)


@cache
def _usual() -> int:
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if said.isdecimal() and int(said):
        return min(int(said), MAX_THREADS)
    return within_quota(physical_cores() or cores(), cpu_quota())


def within_quota(threads: int, quota: float | None) -> int:
    """So many threads that none waits for time that a container does not have, but at least one."""
    return threads if quota is None else max(1, min(threads, int(quota)))


def _usable() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
