"""What ``--cost`` and ``--draft-cost`` say of costs, and what a cost table leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from paceline.core.errors import ConfigError
from paceline.planner.cost_points import MAX_MS
from paceline.planner.cost_prior import prior_table
from paceline.planner.cost_table import CostTable
from paceline.planner.host_time import NO_DRAFTING_HOST_TIME, NO_HOST_TIME
from paceline.workbench.simulate import Simulator
from paceline.workbench.simulate_setup import draft_table_of, table_named

NARROW = 32
"""Drafts make steps of so many rows; from one measured width below it to the next is a gap where
they are more than twice as many."""
FURTHER = 2
"""Traces longer than so many times the longest measured context are said to go beyond it."""


def costs_of(
    cost: str | None, draft_cost: str | None
) -> tuple[CostTable | None, CostTable | float | None]:
    """What the options say of the target's costs and of a draft model's; None is nothing.

    Raises:
        ConfigError: the time of a draft model's step is not above 0.
        ProfileError: there is no such table, or it cannot be read.
    """
    table = None if cost is None else table_named(cost)
    if draft_cost is None:
        return table, None if cost is None else draft_table_of(cost)
    try:
        time = float(draft_cost)
    except ValueError:
        return table, table_named(draft_cost)
    if not 0.0 < time <= MAX_MS:
        raise ConfigError(
            f"--draft-cost is {draft_cost}; allowed: the milliseconds of a step, above "
            "0, the file of a profile, and the name of an imported curve"
        )
    return table, time


def cost_notes(simulator: Simulator) -> list[str]:
    """Where a step may cost what nobody measured, one remark each; not of an assumed table."""
    table, config = simulator.table, simulator.config
    longest = max(len(trace.token_ids) for trace in simulator.traces)
    drafts, assumed = simulator.draft_tables.values(), prior_table().name
    said = [(table, _beyond(table, longest, config.max_num_seqs))]
    said += [(each, _gaps(each)) for each in (table, *drafts)]
    if table.host != NO_HOST_TIME:
        said += [(each, _host(each)) for each in drafts]
    return [f"{each.name}: {note}" for each, ns in said if each.name != assumed for note in ns]


def _host(draft: CostTable) -> Iterator[str]:
    if draft.host.drafting == NO_DRAFTING_HOST_TIME:
        yield (
            "what the host takes for its drafts was not measured and counts as nothing; paceline "
            "profile measures it"
        )


def _gaps(table: CostTable) -> Iterator[str]:
    """Between which widths times are lines between far points."""
    gaps = {
        gap
        for context in table.contexts
        for gap in pairwise(point.width for point in table.base_points(context))
        if gap[0] < NARROW and gap[1] > 2 * gap[0]
    }
    if gaps:
        shown = ", ".join(f"{low} and {high}" for low, high in sorted(gaps))
        yield f"no step between these widths was measured, its cost is interpolated: {shown}"


def _beyond(table: CostTable, longest: int, most_requests: int) -> Iterator[str]:
    """Which steps lie beyond all that were measured."""
    widest = min(table.base_points(context)[-1].width for context in table.contexts)
    if 1 < widest < NARROW:
        yield f"nothing wider than {widest} rows was measured; the cost of wider steps is a guess"
    if most_requests > 1 and all(point.requests == 1 for point in table.points):
        yield (
            "no step of several requests was measured; it is taken to cost what one request with "
            "as many rows does"
        )
    last = table.contexts[-1]
    if longest > FURTHER * last:
        yield f"the longest context measured is {last}, that of the traces {longest}"
