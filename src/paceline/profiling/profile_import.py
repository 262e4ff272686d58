"""Cost tables out of other people's measurements.

Two formats. ``llama-batched-bench --output-format jsonl`` (llama.cpp, tools/batched-bench): a line
per run, in which ``pl`` sequences with ``pp`` tokens each generate ``tg`` tokens each in ``t_tg``
seconds, one row per sequence and forward. So T(width = pl) = t_tg / tg, over a context of
pp + tg / 2 on average. And JSON with ``curves``: costs of widths 1, 2, 3, ... relative to width 1.

Files are untrusted: what is wrong is a :class:`ProfileError` that names the line, or the curve.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ProfileError
from paceline.planner.cost_table import CostPoint, CostTable
from paceline.profiling.profile_store import read_small

MAX_WIDTHS = 4096
MOST_IMPORTED = 1e9
_COUNTS = {"pp": 0, "tg": 1, "pl": 1}
"""Whole numbers of a run that matter, with their least values."""


def import_tables(path: str | Path) -> list[CostTable]:
    """The cost tables in a file; a curve with a draft model makes a second one, ``NAME: draft``."""
    file = Path(path)
    text = read_small(file)
    try:
        # No run of a benchmark has a key of this name.
        return _curves(text) if '"curves"' in text else [_batched_bench(text, file.stem)]
    except ProfileError as error:
        raise ProfileError(f"{file}, {error}") from error


# --- llama-batched-bench -------------------------------------------------------------------------


def _batched_bench(text: str, name: str) -> CostTable:
    """Runs of the same width and context are summed up by their median."""
    times: dict[tuple[int, int], list[float]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                width, context, ms = _run(line)
            except ProfileError as error:
                raise ProfileError(f"line {number}: {error}") from error
            times.setdefault((context, width), []).append(ms)
    contexts = {context for context, _ in times}
    lacking = sorted(context for context in contexts if (context, 1) not in times)
    if lacking or not times:
        at = f" at context {lacking[0]}" if lacking else ""
        raise ProfileError(f"line 1: no run with pl 1{at}; measure with -npl 1,2,3,4 and so on")
    points = [CostPoint(1, c, w, w, statistics.median(ms)) for (c, w), ms in times.items()]
    return CostTable(name, points)


def _run(line: str) -> tuple[int, int, float]:
    """Width, context and milliseconds of a step, from one line."""
    run = _json(line)
    if not isinstance(run, Mapping):
        raise ProfileError("a run must be a JSON object, as llama-batched-bench writes it")
    missing = [name for name in (*_COUNTS, "t_tg") if name not in run]
    if missing:
        raise ProfileError(f"{', '.join(missing)} is missing from what llama-batched-bench writes")
    for name, least in _COUNTS.items():
        if type(run[name]) is not int or not least <= run[name] <= MOST_IMPORTED:
            raise ProfileError(f"{name} is {run[name]!r}; it must be a whole number from {least}")
    if run.get("is_tg_separate"):
        raise ProfileError("is_tg_separate is set: no forward had more than one row")
    seconds = _positive("t_tg", run["t_tg"])
    return run["pl"], run["pp"] + run["tg"] // 2, seconds / run["tg"] * 1e3


# --- curves --------------------------------------------------------------------------------------


def _curves(text: str) -> list[CostTable]:
    document, tables = _json(text), dict[str, CostTable]()
    curves = document.get("curves") if isinstance(document, Mapping) else None
    if not isinstance(curves, list) or not curves:
        raise ProfileError("there is no curve")
    for number, curve in enumerate(curves, start=1):
        try:
            if not isinstance(curve, Mapping):
                raise ProfileError("a curve must be an object")
            for table in _curve_tables(curve):
                if table.name in tables:
                    raise ProfileError(f"there is a curve {table.name!r} before; names are keys")
                tables[table.name] = table
        except ProfileError as error:
            raise ProfileError(f"curve {number}: {error}") from error
    return list(tables.values())


def _curve_tables(curve: Mapping[str, Any]) -> list[CostTable]:
    name = curve.get("name")
    if not isinstance(name, str) or not name:
        raise ProfileError("the curve has no name")
    speed = curve.get("tokens_per_second_at_1")
    plain = 1.0 if speed is None else 1e3 / _positive("tokens_per_second_at_1", speed)
    tables = [CostTable(name, _points(curve, "cost_ratio", plain), speed is None)]
    if curve.get("draft_step_ratio") is not None:
        step = plain * _positive("draft_step_ratio", curve["draft_step_ratio"])
        has_curve = curve.get("draft_cost_ratio") is not None
        points = (
            _points(curve, "draft_cost_ratio", step) if has_curve else [CostPoint(1, 0, 1, 1, step)]
        )
        tables.append(CostTable(f"{name}: draft", points, speed is None))
    return tables


def _points(curve: Mapping[str, Any], key: str, plain: float) -> list[CostPoint]:
    """Points of context 0: the curves do not tell theirs."""
    ratios = curve.get(key)
    if not isinstance(ratios, list) or not 1 <= len(ratios) <= MAX_WIDTHS:
        raise ProfileError(f"{key} must be a list of 1 to {MAX_WIDTHS} numbers, for widths 1, 2, …")
    if ratios[0] != 1:
        raise ProfileError(f"{key} of width 1 is {ratios[0]!r}; it must be 1: ratios are to it")
    return [
        CostPoint(1, 0, width, width, _positive(f"{key} of width {width}", ratio) * plain)
        for width, ratio in enumerate(ratios, start=1)
    ]


def _positive(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= MOST_IMPORTED:  # type: ignore[operator]
        raise ProfileError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)  # type: ignore[arg-type]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        within = f"line {error.lineno}: " if "\n" in text else ""
        raise ProfileError(f"{within}not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"not readable JSON: {error}") from error
