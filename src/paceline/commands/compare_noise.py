"""Whether the rounds of a comparison agree well enough for a speed-up to be told. Knows no model.

In a round both arms answer the same prompts, one right after the other, so that what slows the
machine down for long slows both. What does so for a moment meets one of them. It shows in how long
a plain step took beside a speculative one: steps compare across prompts that are drafted well and
badly, and a speculative step does all that a plain one does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import exp, log, sqrt

from paceline.commands.report import Figures

AT_MOST = 1.25
"""A plain step's time over a speculative one's, all rounds together: more is noise alone."""
MOST_ERROR = 1.5
"""Factor by which the typical round may be uncertain: the standard error of a median."""
MOST_OFF = 2.0
"""Factor by which all rounds together may differ from the typical one, unless rounds scatter."""
MOST_SPREADS = 3.0
"""By how many of their spreads they may where rounds scatter more."""
NORMAL_MAD, NORMAL_MEDIAN = 1.4826, 1.2533
"""Standard deviations per median absolute deviation, and a median's error in those of a mean."""


Round = tuple[Figures, Figures]
"""What the plain and the speculative arm did on the same prompts."""


def _ratio(plain: Figures, speculative: Figures) -> float:
    """Of a plain step's time over a speculative one's."""
    step = plain.seconds / plain.num_steps
    return step * speculative.num_steps / speculative.seconds


def why_disturbed(rounds: Sequence[Round]) -> str | None:
    """Why no speed-up can be told from these rounds; None where one can.

    Of a single round only an impossible speed-up is noticed. The spread of rounds is their median
    absolute deviation, of logarithms, so that a few disturbed rounds do not hide themselves.
    """
    rounds = [each for each in rounds if all(arm.seconds and arm.num_steps for arm in each)]
    if not rounds:
        return None
    ratios = [log(_ratio(*each)) for each in rounds]
    typical = statistics.median(ratios)
    spread = NORMAL_MAD * statistics.median(abs(ratio - typical) for ratio in ratios)
    seconds = [speculative.seconds for _, speculative in rounds]
    together = log(statistics.fmean([_ratio(*each) for each in rounds], seconds))
    if max(together, typical) > log(AT_MOST):
        factor = exp(max(together, typical))
        return f"a plain step took {factor:.1f} times as long as a speculative one, which does more"
    error, off = NORMAL_MEDIAN * spread / sqrt(len(ratios)), abs(together - typical)
    if error > log(MOST_ERROR) or off > max(log(MOST_OFF), MOST_SPREADS * spread):
        low, high = exp(min(ratios)), exp(max(ratios))
        return (
            f"a plain step took {low:.2f} to {high:.2f} times as long as a speculative one, from "
            "round to round"
        )
    return None
