"""The options of ``paceline tune``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import EngineOptions, argument, option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TuneOptions(EngineOptions):
    """Options of ``paceline tune``."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    draft: Annotated[
        list[str] | None,
        option(
            "--draft",
            metavar="<str>",
            help="A draft to try: a draft model, also one of another vocabulary or one that "
            "drafts in parallel, or a file of n-grams. Give it once for each (default: those "
            "that the model brings).",
        ),
    ] = None
    draft_layers: Annotated[
        int | None,
        option("--draft-layers", min=1, help="Also try so many of the model's own first layers."),
    ] = None
    draft_dtype: Annotated[
        str | None, option("--draft-dtype", help="Also try the model itself in fewer bits.")
    ] = None
    prompts: Annotated[
        str | None,
        option("--prompts", help="A JSONL file, as for paceline run: what is asked usually."),
    ] = None
    traces: Annotated[
        str | None,
        option(
            "--traces",
            help="Folder in which the answers are kept; without --prompts, those in it are taken.",
        ),
    ] = None
    max_tokens: Annotated[int, option("--max-tokens", help="Most tokens of one answer.")] = 128
    temperature: Annotated[float, option("--temperature", help="0 is greedy.")] = 0.0
    chat: Annotated[
        bool | None,
        option("--chat/--no-chat", help="Use the chat template (default: if there is one)."),
    ] = None
    no_thinking: Annotated[
        bool, option("--no-thinking", help="Ask the chat template for no thoughts.")
    ] = False
    cost: Annotated[
        str | None,
        option(
            "--cost",
            help="What a step costs: the file of a profile, or the name of an imported curve "
            "(default: its profile on this machine, which is measured if there is none).",
        ),
    ] = None
    draft_cost: Annotated[
        str | None,
        option("--draft-cost", help="Likewise of every draft model, or milliseconds of each step."),
    ] = None
    max_num_seqs: Annotated[int, option("--concurrency", help="Requests at a time.")] = 1
    planner: Annotated[
        str, option("--planner", help="auto tries both planners, fixed leaves auto out.")
    ] = "auto"
    budget: Annotated[
        float,
        option(
            "--budget",
            min=0.001,
            help="Seconds of searching; answers, profile and drafts take theirs before it.",
        ),
    ] = 120.0
    output: Annotated[
        str | None,
        option("-o", "--output", help="Write the best as options, for --config of paceline run."),
    ] = None
    plot: Annotated[
        str | None,
        option("--plot", help="Draw speed-up against node budget into a .png, .svg or .pdf file."),
    ] = None
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False
