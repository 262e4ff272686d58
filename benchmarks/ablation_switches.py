"""The planner's mechanisms by name, and how each is made to do nothing. Runs no replay.

A switch is a set of replacements: the dotted name of a constant, function or method, and what takes
its place. Native code cannot be replaced in part, so what it does is done in Python, to the last
bit alike, for those switches that reach into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np

from paceline.policy import acceptance, choice, cost_aware, cost_filter, evidence, merging
from paceline.policy import asking as asks
from paceline.policy.prices import FREE

NEVER, ALWAYS = 1e-12, 1e12
IN_PYTHON = {
    "paceline.engine.planners._choose": choice.choose_nodes,
    "paceline.engine.planners._new_calibration": acceptance.Calibration,
    "paceline.engine.drafting.merge": merging.merge,
}


@dataclass(frozen=True, slots=True)
class Switch:
    """How a mechanism is switched off.

    Attributes:
        lines, constants: that it takes in ``policy/``, about.
        off: by dotted name below ``paceline.policy``, what takes its place.
        native: whether the extension does it too.
    """

    lines: int
    constants: int
    off: Mapping[str, Any] = field(default_factory=dict)
    native: bool = False


@contextmanager
def switched_off(switch: Switch) -> Iterator[None]:
    """Within it the mechanism does nothing."""
    with ExitStack() as stack:
        if switch.native:
            for name, value in IN_PYTHON.items():
                stack.enter_context(patch(name, value))
        for name, value in switch.off.items():
            stack.enter_context(patch(f"paceline.policy.{name}", value))
        yield


def _constant(value: Any) -> Any:
    return lambda *_, **__: value


def _fixed(value: Any) -> property:
    return property(lambda self: value, lambda self, new: None)


def _planner(**changes: Any) -> Mapping[str, Any]:
    """A planner some of whose parts are others."""
    made = cost_aware.CostAwarePlanner.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for name, value in changes.items():
            setattr(self, name, value)

    return {"cost_aware.CostAwarePlanner.__init__": make}


def _observe_verified(self: Any, request: Any, result: Any) -> None:
    if request.request_id in self._step.trees and len(result.draft):
        self.calibration.learn(request.request_id, result.draft, result.token_ids)
    if self._fairness is not None:
        self._fairness.emitted(request, len(result.token_ids))


def _growth_of_forward(self: Any, max_nodes: int) -> Any:
    step = self._step
    count = min(
        max_nodes, max(cost_aware.MAX_NODES, cost_aware.NODES_PER_REQUEST * len(step.requests))
    )
    if len(step.growth) <= count:
        step.growth = self.cost.growth(step.shape, count)
    return step.growth


def _slopes(growth: Any) -> list[float]:
    steps = [after - before for before, after in pairwise(growth)]
    return [max(0.0, each) for each in [*steps, *steps[-1:]]] or [0.0]


def _is_worth_at_once(self: Any, asked: Any, rate: float) -> bool:
    gain = self._accounts.gain(asked.key, rate)
    return gain > 0.0 or asks.asks_for_drafts(asked.request)


def _never_rest(self: Any, *_: Any) -> bool:
    self.settle()
    return False


_ROWS_OF = evidence.rows_of.__wrapped__
_ONE_BUCKET = {"evidence.EDGES": (), "acceptance.rows_of": _ROWS_OF}
_NO_GLANCE = {"planner.Source.glance": _fixed(None)}
_NO_PROBE = {"accounts.PROBE_SHARE": NEVER}
_NO_RESIDUAL = {"cost_filter.MAX_VISITS": 0.0}
_NO_SHARES = [0.0] * len(cost_filter.SHARES)

SWITCHES: dict[str, Switch] = {
    # who is asked
    "glances at a draft": Switch(60, 3, _NO_GLANCE),
    "glances while resting": Switch(35, 5, {"ledger.Ledger._sees_promise": lambda *_: False}),
    "probes": Switch(35, 2, _NO_PROBE),
    "probes and glances": Switch(95, 5, {**_NO_PROBE, **_NO_GLANCE}),
    "accounts by situation": Switch(15, 3, {"accounts.EXPECTED_TOKENS": ()}),
    "reading as an investment": Switch(20, 1, {"asking.Asking._is_worth": _is_worth_at_once}),
    "share of delays": Switch(25, 1, {"asking.Asking._may_delay": _constant(True)}),
    "learnt planning time": Switch(8, 1, {"asking.HOST_PACE": 0.0}),
    "saved allowances": Switch(10, 1, {"allowance.SAVED": 1}),
    "resting": Switch(60, 2, {"ledger.Ledger.is_resting": _never_rest}),
    # for whom
    "fairness": Switch(140, 8, _planner(_fairness=None, _slowdown=None)),
    "drafting for the needy first": Switch(
        30,
        1,
        {"cost_aware.ENOUGH": -ALWAYS, "cost_aware.CostAwarePlanner._needy": _constant(())},
    ),
    "fairness at first": Switch(4, 2, {"fairness.AT_FIRST": 0.0}),
    "weights of the late": Switch(
        57, 1, {"lateness.Lateness.weights": lambda self, requests: None}
    ),
    # what is drafted, and verified
    "stopping by itself": Switch(60, 0, {"cost_aware.CostAwarePlanner.prices": _constant(FREE)}),
    "cliffs in prices": Switch(25, 0, {"cost_aware.cheapest_ahead": _slopes}),
    "price of the first node": Switch(
        30, 3, {"cost_aware.CostAwarePlanner._growth": _growth_of_forward}
    ),
    "rate above plain": Switch(15, 1, {"pace.Pace.factor": _fixed(1.0)}),
    # what a node is worth
    "priors": Switch(
        25, 1, {"acceptance.rows_of": lambda origin, number: _ROWS_OF("", number)}, native=True
    ),
    "corrections by cell": Switch(25, 3, {"acceptance.CELL_RATE": 0.0}, native=True),
    "buckets of cells": Switch(8, 1, _ONE_BUCKET, native=True),
    "slope of a text": Switch(8, 2, {"fit.SLOPE_RATE": 0.0}, native=True),
    "offset of a text": Switch(12, 5, {"fit.OFFSET_RATE": 0.0, "fit.HASTE": 0.0}, native=True),
    "haste of the offset": Switch(6, 2, {"fit.HASTE": 0.0}, native=True),
    "limit of siblings": Switch(13, 0, {"acceptance.limit_siblings": _constant(None)}, native=True),
    "labels without verification": Switch(
        4, 0, {"cost_aware.CostAwarePlanner.observe": _observe_verified}, native=True
    ),
    # what steps cost, where the clock is read
    "exploring width": Switch(115, 3, {"wide_steps.WideSteps._may_be_wider": _constant(False)}),
    "exploring plain steps": Switch(
        20, 1, {"cost_aware.CostAwarePlanner._explores_plain": _constant(False)}
    ),
    "slope with width": Switch(
        20,
        3,
        {"cost_filter.SHARES": _NO_SHARES, "cost_filter._SHARES": np.array(_NO_SHARES)},
    ),
    "residuals": Switch(25, 5, _NO_RESIDUAL),
    "surprises": Switch(25, 2, {"cost_filter.SURPRISE": ALWAYS}),
    "the whole correction": Switch(
        150, 12, {"cost_filter.CostFilter._settle": _constant(None), **_NO_RESIDUAL}
    ),
}
"""By name, in the order of the table. Several mechanisms stand in for each other; they are switched
off together too."""
PLACEBOS = {
    "placebo: probes 1 % dearer": Switch(0, 0, {"accounts.PROBE_SHARE": 0.99 * 0.002}),
    "placebo: glances 1 % rarer": Switch(0, 0, {"ledger.GLANCE_SHARE": 0.99 * 0.005}),
    "placebo: offsets 1 % slower": Switch(0, 0, {"fit.OFFSET_RATE": 0.99 * 0.1}, native=True),
    "placebo: noise 1 % less": Switch(0, 0, {"cost_filter.NOISE": 0.99 * 0.06}),
}
"""Changes that cannot matter. What they do to a cell nevertheless is how far its figure depends on
accidents: one draft more or less, and everything that is learnt of it."""
