"""What a cost table says about drafts: what it costs to check them, and which of them pay.

Knows no proposer. Times of the host are counted, those of drafting are not.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.planner.cost_table import CostTable

MOST_TOKENS = 32
"""Of a draft: no proposer drafts longer paths by default."""
EXAMPLE_TOKENS = 4
"""Of the draft whose cost is told."""


class PayingDrafts(NamedTuple):
    """Drafts that pay for being checked.

    Attributes:
        longest: their most tokens.
        needed: how many of these have to be right. With fewer, no draft of any length pays.
    """

    longest: int
    needed: int


def checking_cost(table: CostTable, num_tokens: int) -> float:
    """Time of a step that checks a draft of so many tokens, in plain steps, at the least context.

    A plain step decodes one token.
    """
    context, host = table.contexts[0], table.host
    plain = table.milliseconds(1, context) + host.of(1, 0)
    drafted = table.milliseconds(1 + num_tokens, context)
    return (drafted + host.of(1, 1, num_tokens, asked=True)) / plain


def paying_drafts(table: CostTable) -> PayingDrafts | None:
    """The longest drafts that pay with as few right tokens as possible; None where none does.

    A step that checks a draft brings a token more than are right of it.
    """
    costs = [checking_cost(table, count) for count in range(1, _most(table) + 1)]
    for needed in range(1, len(costs) + 1):
        paying = 0
        for cost in costs[needed - 1 :]:
            if cost >= 1 + needed:
                break
            paying += 1
        if paying:
            return PayingDrafts(needed - 1 + paying, needed)
    return None


def draft_sentences(table: CostTable) -> list[str]:
    """What checking a draft costs, and which drafts pay; nothing of a table of plain steps only."""
    count = min(EXAMPLE_TOKENS, _most(table))
    if not count:
        return []
    found, cost = paying_drafts(table), checking_cost(table, count)
    what = "1 token" if count == 1 else f"{count} tokens"
    first = f"Checking {what} costs {cost:.2f} plain steps here."
    if found is None:
        return [first, "No draft pays here, even if all of it is right."]
    pays = "a draft of 1 token pays" if found.longest == 1 else _up_to(found.longest)
    right = "1 of them is right" if found.needed == 1 else f"{found.needed} of them are right"
    right = "it is right" if found.longest == 1 else right
    return [first, f"{pays[0].upper()}{pays[1:]} when {right}."]


def _up_to(longest: int) -> str:
    return f"drafts of up to {longest} tokens pay"


def _most(table: CostTable) -> int:
    """Tokens of the longest draft whose check was measured, up to :data:`MOST_TOKENS`."""
    return min(MOST_TOKENS, table.base_points(table.contexts[0])[-1].width - 1)
