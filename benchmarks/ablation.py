"""What each mechanism of the planner brings: it is switched off, one at a time, and replayed.

What it is measured on is :mod:`ablation_grid`'s. With ``--keep FILE`` figures are kept as they
come, and those that are there already are not computed again, so that a long run can be done in
pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from harness import Report, among, arguments, geometric_mean, note, table
from never_slower import NOT_SLOWER

from paceline.planner import corrections, drafts, planner, priors, value
from paceline.planner.drafts import FREE, selected

ALWAYS = 1e12
IN_PYTHON = {
    "paceline.planner.planner.new_drafts": drafts.Drafts,
    "paceline.planner.cost.new_filter": corrections.CostFilter,
}


@dataclass(frozen=True, slots=True)
class Switch:
    """How a mechanism is switched off.

    Attributes:
        lines, constants: that it takes in ``planner/``, about.
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
            for name, stand_in in IN_PYTHON.items():
                stack.enter_context(patch(name, stand_in))
        for name, stand_in in switch.off.items():
            package = "paceline" if name.startswith("engine.") else "paceline.planner"
            stack.enter_context(patch(f"{package}.{name}", stand_in))
        yield


def _constant(answer: Any) -> Any:
    return lambda *_, **__: answer


def _fixed(answer: Any) -> property:
    return property(lambda self: answer, lambda self, new: None)


def _planner(**changes: Any) -> Mapping[str, Any]:
    """A planner some of whose parts are others."""
    made = planner.CostAwarePlanner.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for name, stand_in in changes.items():
            setattr(self, name, stand_in)

    return {"planner.CostAwarePlanner.__init__": make}


def _learn_verified(self: Any, request_id: int, token_ids: Any) -> None:
    if request_id in self._ids:
        index = self._ids.index(request_id)
        verified = selected(self.tree(index), self._chosen[index])
        self._calibration.learn(request_id, verified, token_ids)


def _growth_of_forward(self: Any, max_nodes: int) -> Any:
    step = self._step
    count = min(max_nodes, max(planner.MAX_NODES, planner.NODES_PER_REQUEST * len(step.requests)))
    if len(step.growth) <= count:
        step.growth = step.forwards = self.cost.growth(step.shape, count)
    return step.growth


def _slopes(growth: Any) -> list[float]:
    steps = [after - before for before, after in pairwise(growth)]
    return [max(0.0, each) for each in [*steps, *steps[-1:]]] or [0.0]


def _is_worth_at_once(self: Any, step: Any, candidate: Any) -> bool:
    is_forced = step.requests[candidate.place].is_forced
    return candidate.value.gain(step.rate) > 0.0 or is_forced


_NOBODY_WAITS = {"value._holds_up": _constant(False)}
_NO_PRIOR = {"acceptance.logits_of": lambda origin: priors.logits_of("")}
_NO_RESIDUAL = {"corrections.MAX_VISITS": 0.0}
_NO_SHARES = [0.0] * len(corrections.SHARES)

SWITCHES: dict[str, Switch] = {
    # who is asked
    "exploring proposers": Switch(20, 1, {"value.Asking._explored": _constant(())}),
    "values by situation": Switch(5, 1, {"value.SITUATIONS": ()}),
    "looking at matches": Switch(20, 1, {"engine.contained_proposers.Entry.sees_matches": False}),
    "what drafts keep of their promise": Switch(25, 2, {"acceptance.Promise.kept": 1.0}),
    "asking texts together": Switch(20, 1, {"planner.CostAwarePlanner.asks_together": False}),
    "enough of one text's drafts": Switch(
        3, 1, {"engine.contained_proposers.ENOUGH_FROM_TEXT": ALWAYS}
    ),
    "reading as an investment": Switch(10, 0, {"value.Asking._is_worth": _is_worth_at_once}),
    "learnt host times": Switch(8, 1, {"pace.HOST_PACE": 0.0}),
    "saved exploration": Switch(5, 1, {"value.SAVED": 1}),
    "skipped steps": Switch(20, 1, {"planner.MAX_SKIPPED": 1}),
    # for whom
    "credits": Switch(
        90, 6, {**_planner(_credits=None, _slowdown=_constant(None)), **_NOBODY_WAITS}
    ),
    "drafting for those who cannot wait": Switch(8, 1, _NOBODY_WAITS),
    "credits at first": Switch(4, 2, {"pace.AT_FIRST": 0.0}),
    # what is drafted, and verified
    "stopping by itself": Switch(60, 0, {"planner.CostAwarePlanner.prices": _constant(FREE)}),
    "cliffs in prices": Switch(25, 0, {"planner.cheapest_ahead": _slopes}),
    "price of the first node": Switch(
        30, 3, {"planner.CostAwarePlanner._growth": _growth_of_forward}
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
    "exploring width": Switch(115, 3, {"planner.WideSteps._may_be_wider": _constant(False)}),
    "exploring plain steps": Switch(5, 1, {"planner.PLAIN_DOUBT": ALWAYS}),
    "slope with width": Switch(
        20,
        3,
        {"corrections.SHARES": _NO_SHARES},
        native=True,
    ),
    "residuals": Switch(25, 5, _NO_RESIDUAL, native=True),
    "surprises": Switch(25, 2, {"corrections.SURPRISE": ALWAYS}, native=True),
    "the whole correction": Switch(
        150, 12, {"corrections.CostFilter._settle": _constant(None), **_NO_RESIDUAL}, native=True
    ),
}
"""By name, in the order of the table. Several mechanisms stand in for each other; they are switched
off together too."""
PLACEBOS = {
    "placebo: exploring 1 % rarer": Switch(0, 0, {"value.SHARE": 0.99 * value.SHARE}),
    "placebo: offsets 1 % slower": Switch(
        0, 0, {"acceptance.OFFSET_RATE": 0.99 * 0.1}, native=True
    ),
    "placebo: noise 1 % less": Switch(0, 0, {"corrections.NOISE": 0.99 * 0.06}, native=True),
}
"""Changes that cannot matter. What they do to a cell nevertheless is how far its figure depends on
accidents: one draft more or less, and everything that is learnt of it."""


PLAIN, WHOLE = "plain decoding", "nothing"
KINDS = ("replayed", "simulated")
Kept = Mapping[str, Mapping[str, Sequence[float]]]
"""By what is switched off and cell: tokens per millisecond, of all and of the slowest request."""


def cells_of(kind: str, kept: Kept) -> list[str]:
    return [cell for cell in kept[WHOLE] if cell.startswith("simulated") == (kind == "simulated")]


def group_of(cell: str) -> str:
    """Its machine, batch size and temperature; of a simulated one all but the seed."""
    place, _, label = cell.partition(": ")
    if place == "simulated":
        return label.rpartition(", seed")[0]
    _, requests, temperature = label.split(", ")
    return f"{place}, {requests} at {temperature}"


def grouped(gains: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for cell, gain in gains.items():
        found.setdefault(group_of(cell), []).append(gain)
    return {group: geometric_mean(each) for group, each in found.items()}


def row(name: str, switch: Switch, kept: Kept) -> dict[str, Any]:
    """How many times as fast the planner is with a mechanism as without it."""
    found: dict[str, Any] = {"mechanism": name, "lines": switch.lines}
    found["constants"] = switch.constants
    for kind in KINDS:
        cells = cells_of(kind, kept)
        speed, slowest = (
            {cell: kept[WHOLE][cell][at] / kept[name][cell][at] for cell in cells} for at in (0, 1)
        )
        groups = grouped(speed)
        best, worst = max(groups, key=groups.__getitem__), min(groups, key=groups.__getitem__)
        found[kind] = {
            "mean": geometric_mean(list(speed.values())),
            "best": groups[best],
            "best_group": best,
            "worst": groups[worst],
            "worst_group": worst,
            "below": below(kept, name, cells) - below(kept, WHOLE, cells),
            "slowest": geometric_mean(list(slowest.values())),
        }
    whole, without = kept[WHOLE], kept[name]
    found["gains"] = [round(whole[cell][0] / without[cell][0], 4) for cell in whole]
    return found


def below(kept: Kept, name: str, cells: Iterable[str]) -> int:
    """Cells in which it is slower than plain decoding."""
    return sum(kept[name][cell][0] < NOT_SLOWER * kept[PLAIN][cell][0] for cell in cells)


def summary(kept: Kept) -> dict[str, Any]:
    """The whole planner over plain decoding."""
    found = {}
    for kind in KINDS:
        cells = cells_of(kind, kept)
        ratios = [kept[WHOLE][cell][0] / kept[PLAIN][cell][0] for cell in cells]
        found[kind] = {
            "cells": len(cells),
            "mean": geometric_mean(ratios),
            "worst": min(ratios),
            "below": below(kept, WHOLE, cells),
            "slowest": fmean(kept[WHOLE][c][1] / kept[PLAIN][c][1] for c in cells),
        }
    return found


def percent(gain: float) -> str:
    return f"{(gain - 1) * 100:+.1f}"


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["mechanism", "lines", "const.", "replayed %", "best %", "worst %", "below"]
    headers += ["slowest %", "simulated %", "best %", "where", "worst %", "now"]
    lines = []
    for each in rows:
        real, made = (each[kind] for kind in KINDS)
        line = [each["mechanism"], each["lines"], each["constants"], percent(real["mean"])]
        line += [percent(real["best"]), percent(real["worst"]), f"{real['below']:+d}"]
        line += [percent(real["slowest"]), percent(made["mean"]), percent(made["best"])]
        is_there = each["mechanism"] in SWITCHES or not each["lines"]
        where = made["best_group"] if made["best"] >= 1.005 else "-"
        lines.append([*line, where, percent(made["worst"]), "" if is_there else "removed"])
    return [table(headers, lines)]


ALL = {**SWITCHES, **PLACEBOS}


def measure(name: str) -> dict[str, list[float]]:
    """Every cell with one mechanism switched off: its speed, and that of its slowest request."""
    from ablation_grid import run_replays, run_scenes  # whose machines are the tests'

    found = {}
    for run in (run_replays, run_scenes):
        if name in ALL:
            with switched_off(ALL[name]):
                figures = run(False)
        else:
            figures = run(name == PLAIN)
        found |= {cell: [each.speed, each.slowest] for cell, each in figures.items()}
    return found


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--mechanisms", type=among(ALL), default=list(ALL))
    parser.add_argument("--keep", type=Path, help="a file of figures, read and added to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    kept: dict[str, dict[str, list[float]]] = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    for name in (PLAIN, WHOLE, *options.mechanisms):
        if name not in kept:
            note(f"without {name}")
            kept[name] = measure(name)
            if options.keep:
                options.keep.write_text(json.dumps(kept))
    report = Report("ablation", {"whole": summary(kept), "cells": list(kept[WHOLE])})
    report.results += [row(name, ALL[name], kept) for name in options.mechanisms]
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
