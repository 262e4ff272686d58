"""When requests arrive: all at once, as a random process, or as a recorded trace says.

Times are seconds since the run began. Knows no request.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError, RequestError

_MICROSECONDS = 6


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a trace: when it came (seconds since the first), and its lengths in tokens."""

    time: float
    prompt_len: int
    output_len: int


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrivals with gamma-distributed gaps; a burstiness of 1 is a Poisson process.

    As in vLLM, the times are scaled so that the last request comes at ``count / rate``: otherwise
    the same rate would offer a few percent more or less load with every seed.

    Args:
        rate: requests per second; infinity means all at once.
        burstiness: the shape of the gamma distribution: lower is burstier, infinity is regular.

    Raises:
        ConfigError: the rate or the burstiness is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(
            f"--request-rate is {rate} and --burstiness {burstiness}; both must be above 0"
        )
    if math.isinf(rate) or not count:
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(gaps)
    scaled: list[float] = (times * (count / rate / times[-1])).tolist()
    return scaled


def read_trace(path: str | Path, count: int) -> list[TraceRow]:
    """The first rows of a CSV file: time (a date or seconds), prompt tokens, output tokens."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            rows = list(islice(_rows(csv.reader(lines), path), count))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise RequestError(f"the trace {path} holds no requests")
    first = min(row.time for row in rows)
    relative = [TraceRow(row.time - first, row.prompt_len, row.output_len) for row in rows]
    return sorted(relative, key=lambda row: row.time)


def _rows(lines: Iterable[list[str]], path: str | Path) -> Iterator[TraceRow]:
    for number, cells in enumerate(lines, start=1):
        if not cells or (number == 1 and not cells[-1].strip().isdecimal()):
            continue  # An empty line, or the names of the columns.
        try:
            time, prompt_len, output_len = cells
            yield TraceRow(_seconds(time), max(1, int(prompt_len)), max(1, int(output_len)))
        except ValueError as error:
            raise RequestError(
                f"{path}, line {number}: a row is a time, prompt tokens and output tokens, not "
                f"{','.join(cells)!r}"
            ) from error


def _seconds(text: str) -> float:
    """Seconds of a number or of a date; recorded dates have more decimals than Python reads."""
    try:
        return float(text)
    except ValueError:
        whole, point, decimals = text.strip().partition(".")
        date = datetime.fromisoformat(whole + point + decimals[:_MICROSECONDS])
        # Differences alone matter; without a zone they would depend on this machine's summer time.
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
