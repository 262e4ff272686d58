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

from paceline.planner import cost_aware, cost_filter, drafts, exploration, priors
from paceline.planner.planned import asks_for_drafts
from paceline.planner.prices import FREE
from paceline.planner.selection import selected

ALWAYS = 1e12
IN_PYTHON = {"paceline.planner.planners.new_drafts": drafts.Drafts}


@dataclass(frozen=True, slots=True)
class Switch:
    """How a mechanism is switched off.

    Attributes:
        lines, constants: that it takes in ``policy/``, about.
        off: by dotted name below ``paceline.planner``, or ``paceline`` where it begins with
            ``engine``: what takes its place.
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
            package = "paceline" if name.startswith("engine.") else "paceline.planner"
            stack.enter_context(patch(f"{package}.{name}", value))
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


def _learn_verified(self: Any, request_id: int, token_ids: Any) -> None:
    if request_id in self._ids:
        index = self._ids.index(request_id)
        verified = selected(self.tree(index), self._chosen[index])
        self._calibration.learn(request_id, verified, token_ids)


def _growth_of_forward(self: Any, max_nodes: int) -> Any:
    step = self._step
    count = min(
        max_nodes, max(cost_aware.MAX_NODES, cost_aware.NODES_PER_REQUEST * len(step.requests))
    )
    if len(step.growth) <= count:
        step.growth = step.forwards = self.cost.growth(step.shape, count)
    return step.growth


def _slopes(growth: Any) -> list[float]:
    steps = [after - before for before, after in pairwise(growth)]
    return [max(0.0, each) for each in [*steps, *steps[-1:]]] or [0.0]


def _is_worth_at_once(self: Any, step: Any, candidate: Any) -> bool:
    is_forced = asks_for_drafts(step.requests[candidate.place])
    return candidate.value.gain(step.rate) > 0.0 or is_forced


_NOBODY_WAITS = {"asking._holds_up": _constant(False)}
_NO_PRIOR = {"acceptance.logits_of": lambda origin: priors.logits_of("")}
_NO_RESIDUAL = {"cost_filter.MAX_VISITS": 0.0}
_NO_SHARES = [0.0] * len(cost_filter.SHARES)

SWITCHES: dict[str, Switch] = {
    # who is asked
    "exploring proposers": Switch(20, 1, {"asking.Asking._explored": _constant(())}),
    "values by situation": Switch(5, 1, {"proposer_value.SITUATIONS": ()}),
    "looking at matches": Switch(20, 1, {"engine.contained.Entry.sees_matches": False}),
    "what drafts keep of their promise": Switch(25, 2, {"promise.Promise.kept": 1.0}),
    "asking texts together": Switch(20, 1, {"cost_aware.CostAwarePlanner.asks_together": False}),
    "enough of one text's drafts": Switch(3, 1, {"engine.contained.ENOUGH_FROM_TEXT": ALWAYS}),
    "reading as an investment": Switch(10, 0, {"asking.Asking._is_worth": _is_worth_at_once}),
    "learnt host times": Switch(8, 1, {"pace.HOST_PACE": 0.0}),
    "saved exploration": Switch(5, 1, {"exploration.SAVED": 1}),
    "skipped steps": Switch(20, 1, {"cost_aware.MAX_SKIPPED": 1}),
    # for whom
    "credits": Switch(
        90, 6, {**_planner(_credits=None, _slowdown=_constant(None)), **_NOBODY_WAITS}
    ),
    "drafting for those who cannot wait": Switch(8, 1, _NOBODY_WAITS),
    "credits at first": Switch(4, 2, {"credit.AT_FIRST": 0.0}),
    # what is drafted, and verified
    "stopping by itself": Switch(60, 0, {"cost_aware.CostAwarePlanner.prices": _constant(FREE)}),
    "cliffs in prices": Switch(25, 0, {"cost_aware.cheapest_ahead": _slopes}),
    "price of the first node": Switch(
        30, 3, {"cost_aware.CostAwarePlanner._growth": _growth_of_forward}
    ),
    "rate above plain": Switch(15, 1, {"pace.Pace.factor": _fixed(1.0)}),
    # what a node is worth
    "priors": Switch(25, 1, _NO_PRIOR, native=True),
    "offset that all texts share": Switch(6, 2, {"acceptance.SHARED_RATE": 0.0}, native=True),
    "offset of a text": Switch(
        14, 5, {"acceptance.OFFSET_RATE": 0.0, "acceptance.HASTE": 0.0}, native=True
    ),
    "haste of the offset": Switch(5, 2, {"acceptance.HASTE": 0.0}, native=True),
    "labels without verification": Switch(
        4, 0, {"drafts.Drafts.learn": _learn_verified}, native=True
    ),
    # what steps cost, where the clock is read
    "exploring width": Switch(115, 3, {"wide_steps.WideSteps._may_be_wider": _constant(False)}),
    "exploring plain steps": Switch(5, 1, {"cost_aware.PLAIN_DOUBT": ALWAYS}),
    "slope with width": Switch(
        20,
        3,
        {"cost_filter.SHARES": _NO_SHARES},
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
    "placebo: exploring 1 % rarer": Switch(0, 0, {"exploration.SHARE": 0.99 * exploration.SHARE}),
    "placebo: offsets 1 % slower": Switch(
        0, 0, {"acceptance.OFFSET_RATE": 0.99 * 0.1}, native=True
    ),
    "placebo: noise 1 % less": Switch(0, 0, {"cost_filter.NOISE": 0.99 * 0.06}),
}
"""Changes that cannot matter. What they do to a cell nevertheless is how far its figure depends on
accidents: one draft more or less, and everything that is learnt of it."""
