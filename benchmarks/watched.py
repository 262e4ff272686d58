"""A planner that is watched while traces are replayed. Knows no benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.engine.planners import MakePlanner
from paceline.policy.planner import StepReport
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import Simulator


class Watched:
    """Another planner, with what came of its steps.

    Attributes:
        nodes: how many steps that decoded had so many draft nodes.
        prompt_ms: of the steps in which nobody decoded: what reading the prompts took, where
            requests run one at a time.
    """

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self.nodes: Counter[int] = Counter()
        self.prompt_ms = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def end(self, report: StepReport) -> None:
        if report.num_decoding:
            self.nodes[report.shape.rows - report.num_decoding] += 1
        else:
            self.prompt_ms += report.total_ms
        self._planner.end(report)


def watch(
    simulator: Simulator, configs: Sequence[SpeculativeConfig], make: MakePlanner
) -> tuple[ReplayResult, Watched]:
    """A replay with at least one proposer, and its planner."""
    made: list[Watched] = []

    def planner(*given: Any) -> Any:
        made.append(Watched(make(*given)))
        return made[0]

    return simulator.run(configs, planner), made[0]


def facts(result: ReplayResult) -> dict[str, Any]:
    """What is kept of a replay: each trace's time, and counts over all of them."""
    return {
        "ms": [trace.ms for trace in result.traces],
        "tokens": result.total("num_emitted_tokens"),
        "steps": result.total("num_steps"),
        "draft_tokens": result.total("num_draft_tokens"),
        "accepted_tokens": result.total("num_accepted_tokens"),
    }


def ratios(each: Mapping[str, Any], plain: Mapping[str, Any], prompt_ms: float) -> dict[str, Any]:
    """A row of a table from the facts of two replays; times are of decoding."""
    time, plain_time = sum(each["ms"]) - prompt_ms, sum(plain["ms"]) - prompt_ms
    return {
        "time": time,
        "plain_time": plain_time,
        "speedup": plain_time / time,
        "acceptance_length": each["tokens"] / each["steps"],
        "accepted_share": each["accepted_tokens"] / max(1, each["draft_tokens"]),
        "nodes_per_step": each["draft_tokens"] / each["steps"],
    }
