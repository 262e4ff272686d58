"""Targets and tables of ``calibration.py``, from its results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report import Target, number, table
from research.estimators import ALL

from paceline.workbench.estimators_report import (
    AS_PROPOSED,
    KEPT,
    MAX_CALIBRATION_ERROR,
)

EVERY_ARM = "all"


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    whole = [row for row in results if "estimator" in row and "text" not in row]
    found = [
        Target(
            f"calibration error of {KEPT}: {row['arm']}",
            row["calibration_error"],
            MAX_CALIBRATION_ERROR,
        )
        for row in whole
        if row["estimator"] == KEPT and row["arm"] != EVERY_ARM
    ]
    losses = {row["estimator"]: row["log_loss"] for row in whole if row["arm"] == EVERY_ARM}
    kept = losses.pop(KEPT, None)
    ratio = kept / min(losses.values()) if kept is not None else None
    return [*found, Target(f"log-loss of {KEPT} over that of the next best", ratio, 1.0)]


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    texts = table(["text", "labels", "proposed", "estimate", "accepted"], text_lines(results))
    *others, priors = page_tables(results)
    return [*others, texts, priors]


def page_tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The scores, the reliability diagrams and the fit, without a line for every kind of text."""
    whole = [row for row in results if "estimator" in row and "text" not in row]
    arms = list(dict.fromkeys(row["arm"] for row in whole))
    least = {arm: min(row["log_loss"] for row in whole if row["arm"] == arm) for arm in arms}
    lines = []
    for name in ALL:
        cells = {row["arm"]: row for row in whole if row["estimator"] == name}
        lines.append([name, *(cell(cells.get(arm), least[arm]) for arm in arms)])
    kept = [row for row in whole if row["estimator"] == KEPT]
    bins = [
        [row["arm"], *(f"{estimate:.2f} {share:.2f}" for _, estimate, share in row["bins"])]
        for row in kept
    ]
    width = max((len(line) for line in bins), default=1)
    padded = [line + [""] * (width - len(line)) for line in bins]
    return [
        table(["log-loss (* best) / Brier / ECE", *arms], lines),
        table([f"{KEPT}: estimate, accepted", *map(str, range(1, width))], padded),
        table(["prior", "slope and intercept per range of depths"], prior_lines(results)),
    ]


def cell(row: Mapping[str, Any] | None, least: float) -> str:
    """An estimator's scores in one arm, marked where its log-loss is the least."""
    if row is None:
        return "-"
    mark = "* " if row["log_loss"] == least else ""
    return f"{mark}{row['log_loss']:.4f} {row['brier']:.4f} {row['calibration_error']:.3f}"


def text_lines(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Per arm and text: what proposers and the kept estimator expect, and what came."""
    means: dict[tuple[str, str], dict[str, tuple[int, float, float]]] = {}
    for row in results:
        if "text" in row:
            count = row["count"]
            estimate = sum(number * mean for number, mean, _ in row["bins"]) / count
            accepted = sum(number * share for number, _, share in row["bins"]) / count
            at = means.setdefault((row["arm"], row["text"]), {})
            at[row["estimator"]] = count, estimate, accepted
    return [
        [
            f"{arm}: {text}",
            str(found[KEPT][0]),
            number(found[AS_PROPOSED][1]),
            number(found[KEPT][1]),
            number(found[KEPT][2]),
        ]
        for (arm, text), found in means.items()
    ]


def prior_lines(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [row["origin"], "  ".join(f"{slope:.2f} {shift:+.2f}" for slope, shift in row["prior"])]
        for row in results
        if "prior" in row
    ]
