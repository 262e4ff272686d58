"""What a step costs. Owns the prediction of its time from its rows; measures nothing itself."""

from __future__ import annotations

LEAST_SPREAD = 0.05
"""Variance of the rows over their squared mean below which the last known slope is kept."""


class StepCost:
    """Time of a step as ``base + slope * rows``, fitted online with exponential forgetting.

    Weighted least squares on (rows, milliseconds); the memory is about ``1 / (1 - decay)`` steps.
    """

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        self._weight = self._rows = self._ms = self._rows2 = self._cross = 0.0
        self._slope = 0.0

    def observe(self, rows: int, milliseconds: float) -> None:
        """Learn from one step that forwarded ``rows`` rows."""
        d = self._decay
        self._weight = self._weight * d + 1
        self._rows = self._rows * d + rows
        self._ms = self._ms * d + milliseconds
        self._rows2 = self._rows2 * d + rows * rows
        self._cross = self._cross * d + rows * milliseconds
        mean_rows, mean_ms = self._rows / self._weight, self._ms / self._weight
        variance = self._rows2 / self._weight - mean_rows**2
        if variance > LEAST_SPREAD * mean_rows**2:  # steps of one width say nothing of the slope
            covariance = self._cross / self._weight - mean_rows * mean_ms
            self._slope = max(0.0, covariance / variance)

    def _fit(self) -> tuple[float, float]:
        """Base and slope, both at least zero."""
        if not self._weight:
            return 0.0, 0.0
        base = (self._ms - self._slope * self._rows) / self._weight
        return max(0.0, base), self._slope

    def predict(self, rows: int) -> float:
        """Milliseconds of a step with ``rows`` rows; 0 before anything was observed."""
        base, slope = self._fit()
        return base + slope * rows

    def rows_within(self, milliseconds: float, limit: int) -> int:
        """Most rows, up to ``limit``, whose step is predicted to stay within the time."""
        base, slope = self._fit()
        if slope <= 0.0:
            return limit
        return max(0, min(limit, int((milliseconds - base) / slope)))
