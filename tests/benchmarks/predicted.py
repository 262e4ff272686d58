"""Engines whose steps take what the cost table says, so that no decision depends on this machine.

They keep the time that a replay of their traces keeps, and so they take the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.engine.commit import Committed
from paceline.engine.engine import Engine
from paceline.engine.step import Scheduled, Step
from paceline.engine.verifier import Verdict
from paceline.planner.cost import CostModel
from paceline.planner.planner import Planner
from paceline.planner.value import DraftingCost
from paceline_lab.simulate.replay import Charged, ReplayClock


class PredictedEngine(Engine):
    """See the module's docstring; :func:`predict_times` makes one out of an engine."""

    clock: ReplayClock
    charged: list[Charged]
    has_drafts: bool

    def _propose(self, step: Step) -> list[Scheduled]:
        drafts = super()._propose(step)
        self.has_drafts = bool(drafts)
        return drafts

    def _forward(self, step: Step, batch: Any) -> Any:
        result = super()._forward(step, batch)
        step.forward_ms = self.cost.predict(step.shape)
        self.clock.milliseconds += step.forward_ms
        return result

    def _commit(self, step: Step, verdicts: Sequence[Verdict | None]) -> list[Committed]:
        merges = self.drafting.planner.drafts.num_merges if self.has_drafts else 0
        asked = sum([each.take_ms() for each in self.charged]) > 0.0
        sizes = [len(item.draft) for item in step.items]
        self.clock.milliseconds += self.cost.table.host.of(
            len(sizes), sum(map(bool, sizes)), sum(sizes), asked, merges
        )
        return super()._commit(step, verdicts)


def predict_times(
    engine: Engine, planner: Planner, cost: CostModel, drafting: DraftingCost | None = None
) -> Engine:
    """Let an engine's steps take what ``cost`` says, and drafting what ``drafting`` says."""
    engine.__class__ = PredictedEngine
    assert isinstance(engine, PredictedEngine)
    clock = engine.clock = engine.drafting.clock = ReplayClock()
    engine.cost = engine.scheduler.cost = cost
    engine.drafting.planner = planner
    times = drafting or DraftingCost()
    engine.charged = [Charged(each, times, clock) for each in engine.drafting.proposers]
    engine.drafting.replace(engine.charged)
    return engine
