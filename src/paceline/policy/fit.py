"""What one text does to a proposer's estimates: a slope and an offset of their log-odds, followed.

Knows no drafts and no cells.
"""

from __future__ import annotations

# Chosen on the prompts that the priors are fitted to. Around these values the log-loss is flat, so
# haste is as large as it may be without a loss: a change of text is followed within 32 tokens.
OFFSET_RATE = 0.1
SLOPE_RATE = 0.03
DRIFT_RATE = 0.08
"""The drift is a mean over about the inverse of this, in labelled nodes."""
HASTE = 6.0
"""How much faster the offset moves per squared unit of drift: chance alone drifts by a tenth."""
MAX_OFFSET = 8.0
SLOPES = (0.0, 4.0)
"""Limits that hardly a text reaches: a surer proposer is never the less likely one."""
CURVATURE = 0.25
"""The most that the log-loss of one label bends, over its log-odds."""


class Fit:
    """Logistic regression on one proposer's log-odds within one request.

    A draft's labels arrive together, under estimates made before any of them. So each step goes to
    the minimum of a parabola that lies above the log-loss: ``rate * gradient / (1 + rate *
    curvature)``, which many labels cannot overshoot.
    """

    __slots__ = ("drift", "offset", "slope")

    def __init__(self) -> None:
        self.offset, self.slope, self.drift = 0.0, 1.0, 0.0

    def learn(self, count: float, error: float, tilt: float, spread: float) -> None:
        """Take in sums over labelled nodes.

        Args:
            count: nodes.
            error: outcomes less estimates.
            tilt: errors times log-odds.
            spread: squared log-odds.
        """
        # Errors that keep one sign are no accident: the text has changed.
        self.drift = (self.drift + DRIFT_RATE * error) / (1.0 + DRIFT_RATE * count)
        rate = OFFSET_RATE + HASTE * (self.drift * self.drift)
        offset = self.offset + rate * error / (1.0 + rate * CURVATURE * count)
        self.offset = min(max(offset, -MAX_OFFSET), MAX_OFFSET)
        slope = self.slope + SLOPE_RATE * tilt / (1.0 + SLOPE_RATE * CURVATURE * spread)
        self.slope = min(max(slope, SLOPES[0]), SLOPES[1])
