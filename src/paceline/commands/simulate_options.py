"""The options of ``paceline simulate``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import EngineOptions, SpeculationOptions, argument, option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SimulateOptions(EngineOptions, SpeculationOptions):
    """Options of ``paceline simulate``."""

    traces: Annotated[str, argument("TRACES", help="Folder that paceline trace has written.")]
    model: Annotated[
        str | None,
        option(
            "--model",
            help="The model that was traced: folder, GGUF file, name or hub id (default: the "
            "embedded model).",
        ),
    ] = None
    cost: Annotated[
        str | None,
        option(
            "--cost",
            help="What its steps cost: the file of a profile, or the name of an imported curve "
            "(default: its profile on this machine).",
        ),
    ] = None
    draft_cost: Annotated[
        str | None,
        option(
            "--draft-cost",
            help="What a draft model's steps cost: likewise, or milliseconds of each (default: its "
            "profile on this machine).",
        ),
    ] = None
    max_num_seqs: Annotated[int, option("--concurrency", help="Requests at a time.")] = 1
    estimators: Annotated[
        bool,
        option(
            "--estimators",
            help="Also compare ways to estimate what will be accepted, by log-loss, and show how "
            "reliable the planner's estimates are.",
        ),
    ] = False
    plot: Annotated[
        str | None,
        option(
            "--plot",
            help="With --estimators: draw reliability diagrams into a .png, .svg or .pdf file.",
        ),
    ] = None
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False
