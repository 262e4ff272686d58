"""Times the phases of an engine's steps, and writes them as a trace that Chrome and Perfetto open.

The file is in the JSON object form of the "Trace Event Format" (Google, the document of
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): complete events
``X`` with begin and duration in microseconds, counters ``C`` and names ``M``. Open it in
https://ui.perfetto.dev or ``chrome://tracing``. Knows no planner and no text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ProfileError
from paceline.core.files import write_json
from paceline.engine.engine import Engine
from paceline.request.engine_stats import EngineStats
from paceline.request.request import StepOutput

PHASES = ("schedule", "propose", "plan", "pack", "forward", "verify", "commit", "observe")
"""The phases of a step in their order."""
MAX_STEPS = 100_000
PROCESS = 1


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step as a clock saw it.

    Attributes:
        began: seconds, from a start of its own.
        seconds: by phase, in order; each phase begins where the one before it ends.
        num_rows: of the target's forward.
        num_experts: of layers, which it read; 0 where no layer is a mixture.
    """

    began: float
    seconds: Mapping[str, float]
    num_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_output_tokens: int
    num_experts: int = 0

    @property
    def milliseconds(self) -> float:
        """Of the whole step."""
        return 1e3 * sum(self.seconds.values())


class StepClock:
    """Times every step of an engine from :meth:`start` to :meth:`stop`, called where it lives.

    Reading counters takes a fraction of a millisecond between steps, which belongs to no phase.

    Attributes:
        steps: the latest :data:`MAX_STEPS`.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._engine = engine

    def start(self) -> StepClock:
        step = self._engine.step

        def timed() -> list[StepOutput]:
            before = self._engine.stats()
            began = time.perf_counter()
            outputs = step()
            self._record(began, before, self._engine.stats())
            return outputs

        # Whoever steps the engine looks the method up on the object, and so finds this one.
        vars(self._engine)["step"] = timed
        return self

    def stop(self) -> None:
        vars(self._engine).pop("step", None)

    def _record(self, began: float, before: EngineStats, after: EngineStats) -> None:
        past = before.seconds
        seconds = {
            phase: after.seconds[phase] - past.get(phase, 0.0)
            for phase in PHASES
            if after.seconds.get(phase, 0.0) > past.get(phase, 0.0)
        }
        now, then = after.speculation, before.speculation
        self.steps.append(
            StepTimes(
                began,
                seconds,
                after.num_rows - before.num_rows,
                now.num_draft_tokens - then.num_draft_tokens,
                now.num_accepted_tokens - then.num_accepted_tokens,
                after.num_output_tokens - before.num_output_tokens,
                after.num_experts_read - before.num_experts_read,
            )
        )


def write_trace(path: str | Path, runs: Mapping[str, Sequence[StepTimes]]) -> None:
    """Write the steps of runs by their names, a thread each; ``ProfileError`` if it cannot."""
    events = [_name("process_name", 0, "paceline")]
    began = min((step.began for steps in runs.values() for step in steps), default=0.0)
    for thread, (name, steps) in enumerate(runs.items(), start=1):
        events.append(_name("thread_name", thread, name))
        for index, step in enumerate(steps):
            events += _step_events(index, step, thread, name, (step.began - began) * 1e6)
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_json(path, document, ProfileError, make_folder=True)


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": thread, "args": {"name": name}}


def _step_events(
    index: int, step: StepTimes, thread: int, run: str, ts: float
) -> Iterator[dict[str, Any]]:
    """The step, its phases within it, and its counters. ``ts`` is its begin in microseconds."""
    common = {"cat": "step", "pid": PROCESS, "tid": thread}
    counts = {
        "draft tokens": step.num_draft_tokens,
        "accepted": step.num_accepted_tokens,
        "emitted": step.num_output_tokens,
    }
    args, dur = {"index": index, "rows": step.num_rows, **counts}, step.milliseconds * 1e3
    if step.num_experts:
        args["experts"] = step.num_experts
    yield {"name": "step", "ph": "X", "ts": ts, "dur": dur, **common, "args": args}
    yield {"name": f"{run}: tokens", "ph": "C", "ts": ts, **common, "args": counts}
    for phase, seconds in step.seconds.items():
        yield {"name": phase, "ph": "X", "ts": ts, "dur": seconds * 1e6, **common}
        ts += seconds * 1e6
