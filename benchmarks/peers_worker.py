"""The worker's half of the talk between ``peers.py`` and an engine: JSON lines on its pipes.

An engine lives in a process of its own, under its own interpreter, and sleeps in a read between two
tasks. Standard library only, since the interpreters differ. Knows no engine: the program that calls
:func:`serve` brings one, whose methods are the tasks.

A request is ``{"task": NAME, "args": {...}}``, the answer ``{"result": ...}``, ``{"error": TEXT}``
or ``{"unsupported": TEXT}``. The first request, ``open``, makes the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
MEMORY = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "file"}


class UnsupportedError(Exception):
    """The engine has no such mode; what it says is shown in the row."""


def memory() -> dict[str, int]:
    """Bytes of this process: the peak, and what is resident, anonymous and of files."""
    found = {}
    for line in STATUS.read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in MEMORY:
            found[MEMORY[key]] = int(rest.split()[0]) * 1024
    return found


def forget_peak() -> None:
    """Let the peak begin anew, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def timed(run: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> list:
    """Wall seconds of each repeat; ``before`` runs ahead of each, outside the time."""
    seconds = []
    for _ in range(repeats):
        if before is not None:
            before()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds


def generated(began: float, stamps: Sequence[float], token_ids: Sequence[int]) -> dict[str, Any]:
    """What a generation reports: ``stamps`` are the times at which tokens came."""
    return {
        "seconds": stamps[-1] - began,
        "first": stamps[0] - began,
        "tokens": len(token_ids),
        "token_ids": list(token_ids),
    }


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Answer requests until the pipe closes. Native code's prints go to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    engine: Any = None
    baseline = memory()["resident"]
    forget_peak()
    for line in sys.stdin:
        request = json.loads(line)
        task, args = request["task"], request["args"]
        try:
            if task == "open":
                engine = make(args)
                result = engine.describe()
            elif task == "usage":
                result = {**memory(), "baseline": baseline}
            else:
                result = getattr(engine, task)(**args)
            answer = {"result": result}
        except UnsupportedError as error:
            answer = {"unsupported": str(error)}
        except Exception as error:
            answer = {"error": repr(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
