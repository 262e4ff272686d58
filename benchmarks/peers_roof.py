"""How fast this machine reads memory: the bound of every engine's plain decoding.

Knows no engine.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

ARRAY_BYTES = 1 << 29
RUNS = 7


def read_bandwidth(threads: int) -> dict[str, Any]:
    """Bytes per second with which ``threads`` threads sum an array far larger than the caches.

    The best of several runs over whole and over real numbers: other work on the machine, or a loop
    that computes slower than it reads, can only lower it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # numpy asks for huge pages, which are read faster; weights may lie in such.
        array = torch.from_numpy(np.ones(ARRAY_BYTES // 4, np.float32))
        best = min(_seconds(a) for a in (array, array.view(torch.int64)) for _ in range(RUNS))
    finally:
        torch.set_num_threads(before)
    return {"bytes_per_second": ARRAY_BYTES / best, "threads": threads, "array": ARRAY_BYTES}


def _seconds(array: torch.Tensor) -> float:
    began = time.perf_counter()
    array.sum()
    return time.perf_counter() - began
