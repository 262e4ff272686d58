"""Targets and tables of ``acceptance.py``, from its results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proposer_sets import MERGED, NODES, SINGLE, SIZED, SIZES
from report import Target, number, table

Row = Mapping[str, Any]
LENGTH = "mean_acceptance_length"
LOOKUP, SUFFIX = "prompt_lookup", "suffix of the request"
MAX_ERROR = 0.05


def by_cell(results: Sequence[Row]) -> dict[tuple[str, float], dict[str, Row]]:
    """The rows of each set and temperature at equal nodes, by proposer."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in results:
        if "temperature" in row and row.get("nodes") == NODES:
            found.setdefault((row["set"], row["temperature"]), {})[row["proposer"]] = row
    return found


def gains(results: Sequence[Row], arm: str, others: Sequence[str]) -> list[float] | None:
    """Acceptance length of an arm over that of the best of others, for each cell."""
    found = []
    for rows in by_cell(results).values():
        lengths = {name: row.get(LENGTH) for name, row in rows.items()}
        if not lengths.get(arm) or not all(lengths.get(name) for name in others):
            return None
        found.append(lengths[arm] / max(lengths[name] for name in others))
    return found


def targets(results: Sequence[Row]) -> list[Target]:
    found = []
    merged = gains(results, MERGED, SINGLE)
    best = "merged tree / best single proposer of each set"
    mean = sum(merged) / len(merged) if merged else None
    found.append(Target(f"{best}: mean over the sets", mean, 1.10, "at least"))
    found.append(Target(f"{best}: least", min(merged) if merged else None, 0.98, "at least"))
    suffix = gains(results, SUFFIX, [LOOKUP])
    least = min(suffix) if suffix else None
    found.append(Target("suffix of the request / prompt lookup: least", least, 1.0, "at least"))
    found += [
        Target(
            f"expected calibration error: {row['proposer']}",
            row["reliability"].get("calibration_error"),
            MAX_ERROR,
        )
        for row in results
        if row["set"] == "all"
    ]
    engine = [row for row in results if "identical" in row]
    total = sum(row["prompts"] for row in engine)
    share = sum(row["identical"] for row in engine) / total if total else None
    if any("error" in row for row in engine):
        share = None
    name = "share of outputs identical to plain decoding"
    return [*found, Target(name, share, 1.0, "at least")]


def tables(results: Sequence[Row]) -> list[str]:
    cells = by_cell(results)
    arms = list(dict.fromkeys(name for rows in cells.values() for name in rows))
    lengths, shares = [], []
    for (name, temperature), rows in cells.items():
        head = [name, temperature]
        lengths.append([*head, *(number(rows.get(arm, {}).get(LENGTH)) for arm in arms)])
        lengths[-1].append(number(_gain(rows)))
        share = (number(rows.get(arm, {}).get("accepted_per_node")) for arm in arms)
        shares.append([*head, *share])
    columns = [str(at) for at in range(1, len(arms) + 1)]
    best = f"{arms.index(MERGED) + 1} / best of 1 to {len(SINGLE)}" if MERGED in arms else ""
    return [
        "\n".join(f"{at}: {arm}" for at, arm in enumerate(arms, start=1)),
        table(["acceptance length", "temperature", *columns, best], lengths),
        table(["accepted per node", "temperature", *columns], shares),
        table(["length, mean of the sets", "temperature", *map(str, SIZES)], _sizes(results)),
        table(
            ["calibration", "labels", "error", "log-loss", "of its parts"], _reliability(results)
        ),
        table(["in the engine", "identical to plain decoding"], _identity(results)),
    ]


def _gain(rows: Mapping[str, Row]) -> float | None:
    found = gains(list(rows.values()), MERGED, SINGLE)
    return found[0] if found else None


def _sizes(results: Sequence[Row]) -> list[list[str]]:
    """Of proposers with several numbers of nodes: a line per temperature."""
    lines = []
    for name in SIZED:
        rows = [row for row in results if row.get("proposer") == name and LENGTH in row]
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            line = [name, number(temperature, 1)]
            for nodes in SIZES:
                here = [
                    row[LENGTH]
                    for row in rows
                    if row["nodes"] == nodes and row["temperature"] == temperature
                ]
                line.append(number(sum(here) / len(here) if here else None))
            lines.append(line)
    return lines


def _reliability(results: Sequence[Row]) -> list[list[str]]:
    lines = []
    for row in results:
        if row["set"] != "all":
            continue
        found, parts = row["reliability"], row["parts"]
        own = "  ".join(
            f"{name} {number(parts[name].get('calibration_error'), 3)}" for name in parts
        )
        error, loss = (number(found.get(key), 3) for key in ("calibration_error", "log_loss"))
        lines.append([row["proposer"], str(found["labels"]), error, loss, own])
    return lines


def _identity(results: Sequence[Row]) -> list[list[str]]:
    """Per arm over all sets; a failure is shown in place of a count."""
    lines = []
    rows = [row for row in results if "identical" in row]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        errors = [row["error"] for row in own if "error" in row]
        count = f"{sum(row['identical'] for row in own)}/{sum(row['prompts'] for row in own)}"
        lines.append([arm, errors[0] if errors else count])
    return lines
