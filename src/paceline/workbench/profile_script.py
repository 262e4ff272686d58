"""Host times of steps in which the planner drafts as it will for users: now and then, unasked.

Where each step drafts, code and data of the host stay in the processor's caches; where one step in
five does, they do not, and the same work takes longer. Owns the text for it, which a target is made
to answer. Knows nothing of what is done with the times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from paceline.engine.engine import Engine
from paceline.models.ops.base import PackedBatch
from paceline.policy.cost_aware import CostAwarePlanner
from paceline.runtime.model_runner import ForwardResult, ModelRunner
from paceline.sampling_params import SamplingParams
from paceline.span import Span

NEW, REPEATED = 32, 16
"""Tokens that no draft can know, and how many of these come again after them."""
PROMPT_LENGTH = 64
STEPS = 400
"""Most steps that are measured."""


class DraftedStep(NamedTuple):
    """A step with a draft.

    Attributes:
        ms: outside of forwards.
        planning_ms: of them those of planning.
        nodes: of the draft.
    """

    ms: float
    planning_ms: float
    nodes: int


class _Scripted:
    """A model runner whose target says what a script says; forwards are run all the same."""

    def __init__(self, runner: ModelRunner, script: Sequence[int]) -> None:
        self._runner, self._script = runner, script
        self._spans: Sequence[Span] = ()
        self._own_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def seconds(self) -> float:
        """Inside forwards, reading the script included."""
        return self._runner.seconds + self._own_seconds

    @property
    def num_nodes(self) -> int:
        """Draft nodes of the latest step."""
        return sum(max(0, len(span.sample_rows) - 1) for span in self._spans)

    def pack(self, spans: Sequence[Span]) -> PackedBatch:
        self._spans = spans
        return self._runner.pack(spans)

    def forward(self, batch: PackedBatch, greedy: bool = False) -> ForwardResult:
        result = self._runner.forward(batch, greedy)
        began = time.perf_counter()
        said = [token for span in self._spans for token in following(self._script, span)]
        self._own_seconds += time.perf_counter() - began
        return ForwardResult(result.logits, result.offsets, said)


def following(script: Sequence[int], span: Span) -> list[int]:
    """What a target that says a script says after each sampled row of a span; its last token is
    said for ever."""
    depths: list[int] = []
    for parent in span.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    last = len(script) - 1
    return [script[min(span.start + depths[row] + 1, last)] for row in span.sample_rows]


def drafted_steps(engine: Engine, most_seconds: float) -> list[DraftedStep]:
    """Steps with drafts while an idle engine, with its proposers, answers such a text.

    There are none where another planner than the cost-aware one decides about them.

    Args:
        most_seconds: that this may take about.
    """
    planner = engine.drafting.planner
    if not isinstance(planner, CostAwarePlanner):
        return []
    assert engine.config.max_model_len is not None
    script = _text(engine.vocab_size, engine.config.max_model_len)
    runner, found = engine.runner, list[DraftedStep]()
    scripted = _Scripted(runner, script)
    engine.runner = cast(ModelRunner, scripted)
    params = SamplingParams(
        temperature=0.0, max_tokens=len(script) - PROMPT_LENGTH, ignore_eos=True
    )
    (request_id,) = engine.add_request(script[:PROMPT_LENGTH], params)
    end = time.perf_counter() + most_seconds
    try:
        for _ in range(STEPS):
            if request_id not in engine.requests or time.perf_counter() > end:
                break
            forwards, began = scripted.seconds, time.perf_counter()
            engine.step()
            passed = time.perf_counter() - began - (scripted.seconds - forwards)
            if scripted.num_nodes:
                planning_ms = planner.planned.host_ms
                found.append(DraftedStep(passed * 1e3, planning_ms, scripted.num_nodes))
    finally:
        engine.abort(request_id)
        engine.step()
        engine.runner = runner
    return found


def _text(vocab_size: int, length: int) -> list[int]:
    rng, text = random.Random(0), list[int]()
    while len(text) < length:
        new = rng.choices(range(vocab_size), k=NEW)
        text += [*new, *new[:REPEATED]]
    return text[:length]
