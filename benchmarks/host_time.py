"""Host time of single engine steps, with the real forward or with a scripted one.

Owns the arithmetic: the wall time of ``Engine.step`` less the time inside forwards, and its parts.
Knows no cases and no targets.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.engine.engine import Engine
from paceline.models.ops.base import PackedBatch
from paceline.request import Request
from paceline.runtime.model_runner import ForwardResult, ModelRunner
from paceline.span import Span
from paceline.workbench.profile_host import following

PHASES = ("schedule", "propose", "plan", "pack", "forward", "verify", "commit", "observe")
WARM_UP_STEPS = 10


class ScriptedRunner(ModelRunner):
    """Instead of a forward: logits whose largest entry is the next token of a script.

    Attributes:
        scripts: by request id, the tokens of prompt and output.
    """

    PEAK = 20.0

    def __init__(self, real: ModelRunner) -> None:
        super().__init__(real.decoder, real.kv)
        self.scripts: dict[int, list[int]] = {}
        self._spans: Sequence[Span] = ()

    def pack(self, spans: Sequence[Span]) -> PackedBatch:
        self._spans = spans
        return super().pack(spans)

    def forward(self, batch: PackedBatch, greedy: bool = False) -> ForwardResult:
        began = time.perf_counter()
        offsets = batch.sample_offsets
        logits = torch.zeros(offsets[-1], self.decoder.config.vocab_size)
        for index, span in enumerate(self._spans):
            said = following(self.scripts[span.request_id], span)
            for at, token in enumerate(said, start=offsets[index]):
                logits[at, token] = self.PEAK
        self.num_forwards += 1
        self.seconds += time.perf_counter() - began
        return ForwardResult(logits, offsets)


def forward_seconds(engine: Engine) -> tuple[float, float]:
    """Seconds inside the target's forwards and inside those of draft models, so far."""
    runners = [getattr(proposer, "_runner", None) for proposer in engine.drafting.proposers]
    return engine.runner.seconds, sum(runner.seconds for runner in runners if runner)


@dataclass(slots=True)
class Steps:
    """Microseconds of every measured step, and whether it verified a draft."""

    host: list[float] = field(default_factory=list)
    draft_forward: list[float] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    context: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def median(self, values: Sequence[float], drafted_only: bool = False) -> float | None:
        kept = [v for v, d in zip(values, self.drafted, strict=True) if d or not drafted_only]
        return round(statistics.median(kept), 1) if kept else None


def measure(engine: Engine, requests: Sequence[Request], steps: int) -> Steps:
    """Step until ``steps`` were measured or a request ended."""
    found = Steps()
    while any(request.num_uncomputed != 1 for request in requests):
        engine.step()
    for _ in range(WARM_UP_STEPS):
        engine.step()
    while len(found.host) < steps and not any(request.is_finished for request in requests):
        found.context.append(statistics.mean(len(request.token_ids) for request in requests))
        _measure_step(engine, found)
    return found


def _measure_step(engine: Engine, found: Steps) -> None:
    before, (target, drafts) = engine.stats(), forward_seconds(engine)
    began = time.perf_counter()
    engine.step()
    total = time.perf_counter() - began
    after, (target_after, drafts_after) = engine.stats(), forward_seconds(engine)
    target, drafts = target_after - target, drafts_after - drafts
    spent = {
        phase: after.seconds.get(phase, 0.0) - before.seconds.get(phase, 0.0) for phase in PHASES
    }
    rest = total - sum(spent.values())
    spent["propose"] -= drafts
    spent["forward"] -= target  # what is left is entering and leaving it
    for phase, seconds in [*spent.items(), ("rest", rest)]:
        found.phases.setdefault(phase, []).append(seconds * 1e6)
    found.host.append(round((total - target - drafts) * 1e6, 1))
    found.draft_forward.append(drafts * 1e6)
    found.rows.append(after.num_rows - before.num_rows)
    found.drafted.append(after.speculation.num_draft_tokens > before.speculation.num_draft_tokens)
