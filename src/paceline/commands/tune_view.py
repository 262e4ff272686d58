"""How a tuning looks on a terminal: the ranking, and the drafts."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.commands.display import printable, table
from paceline.commands.simulate import figures
from paceline.workbench.draft_quality import TEMPERATURE, TOP, DraftQuality
from paceline.workbench.simulate_setup import FOOTNOTE, MARK, num_learnt
from paceline.workbench.tune import LEAST_ANSWERS, Drafts, Row, SpeedUp, Tuning, is_worthwhile

SHOWN = 12
"""Rows of the ranking, beside the best of each family and planner."""


def ranking(tuning: Tuning, is_relative: bool, learnt: Mapping[str, int]) -> str:
    """The best candidates, the best of every family and planner, plain decoding and hindsight.

    Settings that took the same steps are one line, which names the smallest.

    Args:
        is_relative: times are no milliseconds, so that there are no tokens per second.
        learnt: answers to how many of the prompts the n-gram model of a file has learnt; rows with
            such a model are marked.
    """
    seen: set[tuple[str, str]] = set()
    groups = []
    for place, (row, *others) in enumerate(tuning.distinct()):
        assert row.candidate is not None
        kind = row.candidate.family, row.candidate.planner
        if place < SHOWN or kind not in seen:
            groups.append((row, len(others)))
        seen.add(kind)
    shown = sorted([*groups, (tuning.plain, 0)], key=lambda group: -group[0].speedup.value)
    hindsight = [(row, 0) for row in tuning.oracles]
    marks = [MARK if num_learnt(row.configs, learnt) else "" for row, _ in [*shown, *hindsight]]
    cells = [
        _cells(*group, is_relative, mark)
        for group, mark in zip([*shown, *hindsight], marks, strict=True)
    ]
    return "\n".join([table(cells), *([FOOTNOTE] if any(marks) else [])])


def _cells(row: Row, num_larger: int, is_relative: bool, mark: str) -> dict[str, str]:
    counted, larger = figures(row.result), f" (and {num_larger} larger)" if num_larger else ""
    return {
        "": printable(row.name) + larger + mark,
        "planner": row.candidate.planner if row.candidate else "-",
        "speed-up": f"{row.speedup.value:.3f}",
        "95 % interval": _interval(row.speedup) or "-",
        "tok/s": "-" if is_relative else f"{counted.tokens_per_second:.1f}",
        "accepted length": f"{counted.mean_acceptance_length:.2f}",
        "nodes/step": f"{nodes_per_step(row):.2f}",
    }


def nodes_per_step(row: Row) -> float:
    """Draft nodes that were verified in a step, those without any included."""
    return row.result.total("num_draft_tokens") / row.result.total("num_steps")


def _interval(found: SpeedUp) -> str:
    """Empty where there is none."""
    return "" if found.low is None else f"{found.low:.3f} to {found.high:.3f}"


def doubt(tuning: Tuning) -> str | None:
    """What to say where there are too few answers for an interval."""
    if tuning.is_sure:
        return None
    count, tokens = len(tuning.plain.result.traces), tuning.plain.result.total("num_emitted_tokens")
    return (
        f"too few answers ({count} of {tokens} tokens) to be sure of any speed-up: there are no "
        f"intervals; tune with at least {LEAST_ANSWERS} prompts, better with dozens"
    )


def verdict(tuning: Tuning, drafts: Drafts) -> list[str]:
    """What to do, in plain words; and which drafts bring nothing."""
    best, lines = tuning.best, []
    if best is None:
        said = f", not even {printable(tuning.rows[0].name)}: {_said(tuning.rows[0])}"
        lines.append("nothing beats plain decoding" + said)
    else:
        assert best.candidate is not None
        planner = best.candidate.planner
        lines.append(f"best: {printable(best.name)}, planner {planner}: {_said(best)}")
    for name in drafts:
        alone = tuning.best_of(name)
        if alone is not None and not is_worthwhile(alone):
            lines.append(
                f"no setting of {printable(name)} alone beats plain decoding; the best: "
                f"{_said(alone)}"
            )
    if (few := doubt(tuning)) is not None:
        lines.append(few)
    if tuning.num_left_out:
        lines.append(
            f"{tuning.num_left_out} replays were left out for lack of time: raise --budget"
        )
    return lines


def _said(row: Row) -> str:
    found = row.speedup
    interval = _interval(found) or "no interval"
    return f"{found.value:.3f} times plain decoding ({interval})"


def quality_table(qualities: Mapping[str, DraftQuality | None], tuning: Tuning) -> str:
    """How close each draft is to the target, where that can be said, and what it brings alone."""
    columns = list(dict.fromkeys(name for each in qualities.values() for name in _figures(each)))
    rows = []
    for name, each in qualities.items():
        alone, found = tuning.best_of(name), _figures(each)
        rows.append(
            {
                "draft": printable(name),
                **{column: found.get(column, "-") for column in columns},
                "speed-up alone": "-" if alone is None else f"{alone.speedup.value:.3f}",
            }
        )
    return table(rows)


def _figures(found: DraftQuality | None) -> dict[str, str]:
    if found is None:
        return {}
    return {
        "tokens": str(found.num_tokens),
        "KL (nats)": f"{found.kl:.3f}",
        **{f"top {k}": f"{found.agreement[k]:.1%}" for k in TOP},
        f"accepted at {TEMPERATURE:g}": f"{found.coupled_acceptance:.1%}",
    }
