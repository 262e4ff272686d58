"""What ``paceline tune`` found, as options of other commands: for a file, and on a command line."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from paceline.cli.options.options import EngineOptions
from paceline.cli.speed_up.tune_setup import TuneOptions
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.workbench.tune import Tuning

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
    found: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in fields(EngineOptions)
        if field.name not in NOT_WRITTEN and getattr(options, field.name) != field.default
    }
    found["model"] = options.model
    if best is None:
        return found | {"no_speculation": True}
    if best is tuning.default:
        return found
    assert best.candidate is not None
    proposers = [_said(config) for config in best.candidate.configs]
    return found | {"speculative_config": proposers, "planner": best.candidate.planner}


def _said(config: SpeculativeConfig) -> dict[str, Any]:
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


def how_to_use(found: Mapping[str, Any], output: str | None) -> str:
    """The command that runs what was found.

    Args:
        found: as :func:`configuration` returns it.
        output: the file that it was written to.
    """
    if output is not None:
        return shlex.join(["paceline", "run", "--config", _near(output)])
    arguments = [_near(found["model"])] if "model" in found else []
    for name, value in found.items():
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
