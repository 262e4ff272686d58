"""Whether other programs compute on this machine, as far as Linux tells. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.control_groups import read

BUSY_SHARE = 0.5
"""Load per core from which on the machine counts as busy."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much there was to compute.

    Attributes:
        average: processes that wanted to run, on average over the last minute.
        cores: that this process may use.
    """

    average: float
    cores: int

    @property
    def is_busy(self) -> bool:
        return self.average > BUSY_SHARE * self.cores

    def __str__(self) -> str:
        return f"load {self.average:.1f} on {self.cores} cores"


def current_load(cores: int, root: Path = Path("/")) -> Load | None:
    """None where the system does not say.

    Args:
        root: folder in which ``proc`` is.
    """
    average = load_average(root)
    return None if average is None else Load(average, cores)


def load_average(root: Path = Path("/")) -> float | None:
    """Processes that wanted to run, on average over the last minute; None where not told."""
    try:
        return float(read(root / "proc/loadavg").split()[0])
    except (IndexError, ValueError):
        return None
