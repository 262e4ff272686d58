"""How a tuning looks on a terminal: the ranking, the drafts, and options that repeat the best."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from paceline.cli.options import EngineOptions
from paceline.cli.terminal import printable, table
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline_lab.simulate.command import figures
from paceline_lab.simulate.setup import FOOTNOTE, MARK
from paceline_lab.tune.draft_quality import TEMPERATURE, TOP, DraftQuality
from paceline_lab.tune.setup import TuneOptions
from paceline_lab.tune.tuning import (
    LEAST_ANSWERS,
    Drafts,
    SpeedUp,
    Tuning,
    TuningRow,
    is_worthwhile,
)

SHOWN = 12
"""Rows of the ranking, beside the best of each family and planner."""


def ranking(tuning: Tuning, is_relative: bool) -> str:
    """The best candidates and those of every family and planner, the default, plain decoding, and
    hindsight.

    Settings that took the same steps are one line, which names the smallest. Rows whose n-grams
    were learnt from these prompts are marked.

    Args:
        is_relative: times are no milliseconds, so that there are no tokens per second.
    """
    seen: set[tuple[str, str]] = set()
    groups = []
    for place, (row, *others) in enumerate(tuning.distinct()):
        assert row.candidate is not None
        kind = row.candidate.family, row.candidate.planner
        if place < SHOWN or kind not in seen:
            groups.append((row, len(others)))
        seen.add(kind)
    usual = [(row, 0) for row in (tuning.default, tuning.plain) if row is not None]
    shown = sorted([*groups, *usual], key=lambda group: -group[0].speedup.value)
    shown += [(row, 0) for row in tuning.oracles]
    marked = any(row.num_learnt for row, _ in shown)
    cells = [_cells(*group, is_relative) for group in shown]
    return "\n".join([table(cells), *([FOOTNOTE] if marked else [])])


def _cells(row: TuningRow, num_larger: int, is_relative: bool) -> dict[str, str]:
    counted, larger = figures(row.result), f" (and {num_larger} larger)" if num_larger else ""
    return {
        "": printable(row.name) + larger + (MARK if row.num_learnt else ""),
        "planner": row.candidate.planner if row.candidate else "-",
        "speed-up": f"{row.speedup.value:.3f}",
        "95 % interval": _interval(row.speedup) or "-",
        "tok/s": "-" if is_relative else f"{counted.tokens_per_second:.1f}",
        "accepted length": f"{counted.mean_acceptance_length:.2f}",
        "nodes/step": f"{nodes_per_step(row):.2f}",
    }


def nodes_per_step(row: TuningRow) -> float:
    """Draft nodes that were verified in a step, those without any included."""
    return row.result.total("num_draft_tokens") / row.result.total("num_steps")


def _interval(speedup: SpeedUp) -> str:
    """Empty where there is none."""
    return "" if speedup.low is None else f"{speedup.low:.3f} to {speedup.high:.3f}"


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
    lines = [_recommended(tuning)]
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


def _recommended(tuning: Tuning) -> str:
    best, default = tuning.best, tuning.default
    if best is None:
        fair = [row for row in tuning.rows if not row.num_learnt] or tuning.rows
        return f"nothing beats plain decoding, not even {printable(fair[0].name)}: {_said(fair[0])}"
    assert best.candidate is not None
    said = f"{printable(best.name)}, planner {best.candidate.planner}: {_said(best)}"
    if best is default:
        return f"best: keep the {said}; no other setting is clearly faster"
    gain = tuning.gain(best)
    return f"best: {said}" + ("" if gain is None else f", {_times(gain, 'the default')}")


def _said(row: TuningRow) -> str:
    return _times(row.speedup, "plain decoding")


def _times(speedup: SpeedUp, other: str) -> str:
    return f"{speedup.value:.3f} times {other} ({_interval(speedup) or 'no interval'})"


def quality_table(qualities: Mapping[str, DraftQuality | None], tuning: Tuning) -> str:
    """How close each draft is to the target, where that can be said, and what it brings alone."""
    columns = list(dict.fromkeys(name for each in qualities.values() for name in _figures(each)))
    rows = []
    for name, each in qualities.items():
        alone, shown = tuning.best_of(name), _figures(each)
        rows.append(
            {
                "draft": printable(name),
                **{column: shown.get(column, "-") for column in columns},
                "speed-up alone": "-" if alone is None else f"{alone.speedup.value:.3f}",
            }
        )
    return table(rows)


def _figures(quality: DraftQuality | None) -> dict[str, str]:
    if quality is None:
        return {}
    return {
        "tokens": str(quality.num_tokens),
        "KL (nats)": f"{quality.kl:.3f}",
        **{f"top {k}": f"{quality.agreement[k]:.1%}" for k in TOP},
        f"accepted at {TEMPERATURE:g}": f"{quality.coupled_acceptance:.1%}",
    }


WHO = ("model", "draft_layers", "dtype", "use_heterogeneous_vocab")
"""What says who drafts, beside the method."""
NOT_WRITTEN = ("config", "max_num_seqs", "planner")
"""Options of the engine that are no part of what was tuned, or are written by themselves."""


def configuration(options: TuneOptions, tuning: Tuning) -> dict[str, Any]:
    """Options of ``paceline run`` for the best that was found.

    They name no proposers where the default is the best, and turn speculation off where nothing
    pays.
    """
    best = tuning.best
    run_options: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in fields(EngineOptions)
        if field.name not in NOT_WRITTEN and getattr(options, field.name) != field.default
    }
    run_options["model"] = options.model
    if best is None:
        return run_options | {"no_speculation": True}
    if best is tuning.default:
        return run_options
    assert best.candidate is not None
    proposers = [_option_values(config) for config in best.candidate.configs]
    return run_options | {"speculative_config": proposers, "planner": best.candidate.planner}


def _option_values(config: SpeculativeConfig) -> dict[str, Any]:
    """A configuration without what it would have anyway, and without what only the search wants."""
    values = asdict(config)
    said = {
        field.name: values[field.name]
        for field in fields(config)
        if field.name in WHO and values[field.name] != field.default
    }
    said["method"] = config.method
    (usual,) = parse_speculative_config(said)
    kept = (*said, "num_speculative_tokens")
    return {
        name: value
        for name, value in values.items()
        if name != "suffix_decoding_max_cached_requests"
        and (name in kept or value != getattr(usual, name))
    }


def how_to_use(best_options: Mapping[str, Any], output: str | None) -> str:
    """The command that runs what was found.

    Args:
        best_options: as :func:`configuration` returns them.
        output: the file that it was written to.
    """
    if output is not None:
        return shlex.join(["paceline", "run", "--config", _near(output)])
    arguments = [_near(best_options["model"])] if "model" in best_options else []
    for name, value in best_options.items():
        if name != "model":
            arguments += _flags(f"--{name.replace('_', '-')}", value)
    return shlex.join(["paceline", "run", *arguments])


def _flags(flag: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, Sequence) and all(isinstance(each, dict) for each in value):
        proposers = [
            {name: _near(part) if name == "model" else part for name, part in each.items()}
            for each in value
        ]
        yield from (flag, json.dumps(proposers[0] if len(proposers) == 1 else proposers))
    else:
        for each in value if isinstance(value, list) else [value]:
            yield from (flag, str(each))


def _near(place: str) -> str:
    """A path as it is called from this folder; names and relative paths as they are."""
    return os.path.relpath(place) if os.path.isabs(place) else place
