"""What ``--cost`` and ``--draft-cost`` say of costs, and what a cost table leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from paceline.errors import ConfigError
from paceline.policy.cost_points import MAX_MS
from paceline.policy.cost_prior import prior_table
from paceline.policy.cost_table import CostTable
from paceline.policy.host_time import NO_DRAFTING_HOST_TIME, NO_HOST_TIME
from paceline.workbench.profile import Profile
from paceline.workbench.simulate import Simulator
from paceline.workbench.simulate_setup import draft_table_of, profile_named

NARROW = 32
"""Drafts make steps of so many rows; from one measured width below it to the next is a gap where
they are more than twice as many."""
FURTHER = 2
"""Traces longer than so many times the longest measured context are said to go beyond it."""


def costs_of(
    cost: str | None, draft_cost: str | None, told: Callable[[Profile], None] = lambda profile: None
) -> tuple[CostTable | None, CostTable | float | None]:
    """What the options say of the target's costs and of a draft model's; None is nothing.

    Args:
        told: of each profile that is named.

    Raises:
        ConfigError: the time of a draft model's step is not above 0.
        ProfileError: there is no such table, or it cannot be read.
    """

    def named(source: str) -> CostTable:
        profile = profile_named(source)
        told(profile)
        return profile.table

    table = None if cost is None else named(cost)
    if draft_cost is None:
        return table, None if cost is None else draft_table_of(cost)
    try:
        time = float(draft_cost)
    except ValueError:
        return table, named(draft_cost)
    if not 0.0 < time <= MAX_MS:
        raise ConfigError(
            f"--draft-cost is {draft_cost}; allowed are the milliseconds of a step, above "
            "0, the file of a profile, and the name of an imported curve"
        )
    return table, time


def cost_notes(simulator: Simulator) -> list[str]:
    """Where a step may cost what nobody measured, one remark each; not of an assumed table."""
    table = simulator.table
    notes = [
        f"{each.name}: {said}"
        for each in (table, *simulator.draft_tables.values())
        if each.name != prior_table().name and (said := _width_gaps(each))
    ]
    if table.host != NO_HOST_TIME:
        notes += [
            f"{each.name}: what the host takes for its drafts was not measured and counts as "
            "nothing; paceline profile measures it"
            for each in simulator.draft_tables.values()
            if each.host.drafting == NO_DRAFTING_HOST_TIME
        ]
    if table.name == prior_table().name:
        return notes
    if simulator.config.max_num_seqs > 1 and all(point.requests == 1 for point in table.points):
        notes.append(
            f"{table.name}: no step of several requests was measured; it is taken to cost what one "
            "request with as many rows does"
        )
    longest = max(len(trace.token_ids) for trace in simulator.traces)
    return [*notes, *_beyond(table, longest)]


def _width_gaps(table: CostTable) -> str:
    """Between which widths times are lines between far points; those of all contexts together."""
    gaps: dict[tuple[int, int], list[int]] = {}
    for context in table.contexts:
        for gap in pairwise(point.width for point in table.base_points(context)):
            if gap[0] < NARROW and gap[1] > 2 * gap[0]:
                gaps.setdefault(gap, []).append(context)
    if not gaps:
        return ""
    said = [f"{low} and {high}{_where(table, at)}" for (low, high), at in sorted(gaps.items())]
    return f"no step between these widths was measured, its cost is interpolated: {', '.join(said)}"


def _where(table: CostTable, contexts: Sequence[int]) -> str:
    if len(contexts) == len(table.contexts):
        return ""
    return f" (context {', '.join(map(str, contexts))})"


def _beyond(table: CostTable, longest: int) -> list[str]:
    """Remarks on steps wider, and on texts longer, than what was measured."""
    notes = []
    widest = min(table.base_points(context)[-1].width for context in table.contexts)
    if 1 < widest < NARROW:
        notes.append(
            f"{table.name}: nothing wider than {widest} rows was measured; beyond, the cost goes "
            "on to grow as between the last two widths"
        )
    last = table.contexts[-1]
    if longest > FURTHER * last:
        rule = "as between the last two" if len(table.contexts) > 1 else "not at all"
        notes.append(
            f"{table.name}: the longest context measured is {last}, that of the traces {longest}; "
            f"beyond, the cost grows with it {rule}"
        )
    return notes
