"""What the planner aims at. Owns the names and their check; knows no planner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.checks import check_number
from paceline.core.errors import ConfigError

OBJECTIVES = ("throughput", "latency", "tpot")
_ALLOWED = 'allowed: throughput, latency and {"tpot_ms": milliseconds per token}'


@dataclass(frozen=True, slots=True)
class Objective:
    """What the nodes of a step are chosen for.

    Attributes:
        kind: ``throughput``: most tokens per second over all requests; ``latency``: least time
            per token of each request; ``tpot``: most tokens per second, where a request may be
            held up by the drafts of others as long as it keeps ``tpot_ms``.
        tpot_ms: wanted milliseconds per output token; with ``tpot`` only.

    Raises:
        ConfigError: an unknown kind, or a time that is missing, out of place or out of range.
    """

    kind: str = "throughput"
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise ConfigError(f"objective is {self.kind!r}; {_ALLOWED}")
        if (self.kind == "tpot") != (self.tpot_ms is not None):
            raise ConfigError(f"objective {self.kind} has tpot_ms {self.tpot_ms}; {_ALLOWED}")
        if self.tpot_ms is not None:
            check_number("tpot_ms", self.tpot_ms, 0.001, 1e9, float)


def parse_objective(source: str | Mapping[str, Any] | Objective) -> Objective:
    """Read an objective: a name, ``{"tpot_ms": 20}``, or that as JSON text.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(source, Objective):
        return source
    value: Any = source
    if isinstance(source, str) and source.lstrip().startswith("{"):
        try:
            value = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"objective {source[:60]!r} is not valid JSON: {error}; {_ALLOWED}"
            ) from error
    if isinstance(value, Mapping):
        if set(value) != {"tpot_ms"}:
            raise ConfigError(f"objective is {dict(value)}; {_ALLOWED}")
        return Objective("tpot", value["tpot_ms"])
    return Objective(value)
