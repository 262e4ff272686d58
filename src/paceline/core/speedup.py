"""What may be claimed of two arms, one plain and one speculative, measured in turns. Pure.

In a round both arms answer the same prompts, one right after the other, so that what slows the
machine down for long slows both. A step that checks drafts does all that a plain one does, so the
steps that were saved bound what speculation can have brought; what a clock shows beyond is noise.
How far rounds of the same prompt differ in what they make of that bound says how large the noise
is. Knows no model, no clock and no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import fmean

from paceline.core.machine import Load

MIN_ROUNDS = 3
"""From which on their spread is measured; before, :data:`ASSUMED_NOISE` stands for it."""
ASSUMED_NOISE = 0.10
"""Of a single round, as a share of the speed-up."""
NARROW = 0.03
"""Half the interval, as a share of the speed-up, from which on more rounds tell nothing new."""
MOST_NOISE = 0.5
"""Half the interval, as a share of the speed-up, from which on none can be told."""
MOST_OVER = 1.25
"""By which factor the allowed speed-up may be exceeded: more is no measurement."""
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for two-sided 95 %, by degrees of freedom from 1 up; more are close to 1.96."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What one arm did in a round.

    Attributes:
        seconds: of wall time.
        steps: that made tokens, summed over the requests.
        longest: of the request that took the most of them; they run at once.
        drafted: tokens.
    """

    seconds: float
    steps: int
    longest: int
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """Both arms on the same prompts."""

    plain: Arm
    speculative: Arm

    @property
    def is_measured(self) -> bool:
        return all(arm.seconds > 0 and arm.steps for arm in (self.plain, self.speculative))

    @property
    def allowed(self) -> float:
        """The largest speed-up that the saved steps allow; 1 where nothing was drafted.

        Of requests that run at once it is that of their steps in all, where the time of a step
        grows with its rows, or that of the longest ones, where rows are free.
        """
        if not self.speculative.drafted:
            return 1.0
        plain, drafted = self.plain, self.speculative
        return max(1.0, plain.steps / drafted.steps, plain.longest / max(1, drafted.longest))

    @property
    def share(self) -> float:
        """Of the allowed speed-up, what was measured, as a logarithm."""
        return log(self.plain.seconds / self.speculative.seconds / self.allowed)


@dataclass(frozen=True, slots=True)
class Claim:
    """A speed-up as far as it can be told.

    Attributes:
        value: no more than the steps allow.
        low, high: its 95 % interval, cut off where the steps end it.
        allowed: by the steps that were saved.
        rounds: that were measured.
        drafted: tokens.
        untold: why no speed-up can be told; None where one can.
    """

    value: float = 1.0
    low: float = 0.0
    high: float = inf
    allowed: float = 1.0
    rounds: int = 0
    drafted: int = 0
    untold: str | None = None

    @property
    def is_certain(self) -> bool:
        """Whether further rounds would tell nothing new."""
        if self.rounds < MIN_ROUNDS or self.untold is not None:
            return False
        return not self.drafted or self.high <= self.low * (1 + NARROW) ** 2

    def sentence(self, load: Load | None = None) -> str:
        """A part of a sentence on the speculative arm, without a full stop; ``load`` is that of the
        machine before it was measured.
        """
        busy = f"; the machine was already busy ({load}): measure again when it is idle"
        remark = busy if load is not None and load.is_busy else ""
        if self.untold is not None:
            return f"the speed-up could not be measured: {self.untold}{remark or '; measure again'}"
        return self._comparison() + remark

    def _comparison(self) -> str:
        between = f"{self.low:.2f}x to {self.high:.2f}x"
        if not self.drafted:
            return "about as fast as plain decoding: nothing was drafted"
        if f"{self.value:.2f}" == "1.00" or self.low <= 1.0 <= self.high:
            return f"about as fast as plain decoding ({between})"
        if self.value > 1.0:
            return f"{self.value:.2f}x faster ({between})"
        return f"slower: {self.value:.2f}x the speed of plain decoding ({between})"


def claim(prompts: Sequence[Sequence[Round]]) -> Claim:
    """What the rounds of each prompt, or of each group of prompts that ran at once, tell."""
    groups = [[each for each in rounds if each.is_measured] for rounds in prompts]
    rounds = [each for group in groups for each in group]
    if not rounds:
        return Claim(untold="nothing was measured")
    weights = [each.speculative.seconds for each in rounds]
    allowed = fmean([each.allowed for each in rounds], weights)
    measured = sum(each.plain.seconds for each in rounds) / sum(weights)
    noise = _noise(groups, weights)
    value = min(measured, allowed)
    return Claim(
        value=value,
        low=value / (1 + noise),
        high=min(value * (1 + noise), allowed),
        allowed=allowed,
        rounds=len(rounds),
        drafted=sum(each.speculative.drafted for each in rounds),
        untold=_why_untold(measured / allowed, noise),
    )


def _noise(groups: Sequence[Sequence[Round]], weights: Sequence[float]) -> float:
    """Half the 95 % interval of the speed-up over all rounds, as a share of it."""
    shares = [each.share for group in groups for each in group]
    if len(shares) < MIN_ROUNDS:
        return max(ASSUMED_NOISE, exp(max(shares) - min(shares)) - 1)
    off, freedom = _deviations(groups)
    deviation = sqrt(sum(each * each for each in off) / freedom)
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.7 / freedom
    total = sum(weights)
    together = sqrt(sum((weight / total) ** 2 for weight in weights))
    return exp(min(student * deviation * together, 100.0)) - 1


def _deviations(groups: Sequence[Sequence[Round]]) -> tuple[list[float], int]:
    """How far rounds are from those of their own prompt, and the degrees of freedom of that.

    With too few repetitions they are compared over all prompts, which differ in what checking
    their drafts takes: the noise is then overstated, never understated.
    """
    shares = [[each.share for each in group] for group in groups if group]
    freedom = sum(len(group) - 1 for group in shares)
    if freedom < MIN_ROUNDS - 1:
        shares = [[each for group in shares for each in group]]
        freedom = len(shares[0]) - 1
    return [each - fmean(group) for group in shares for each in group], freedom


def _why_untold(share: float, noise: float) -> str | None:
    if share > MOST_OVER:
        return (
            f"a plain step took {share:.1f} times as long as a speculative one, which does more "
            "work, so the machine must have been busy"
        )
    if noise > MOST_NOISE:
        return f"equal rounds differ by {noise:.0%} or more, so the machine must have been busy"
    return None
