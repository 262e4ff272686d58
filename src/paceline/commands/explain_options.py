"""The options of ``paceline explain``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import (
    TRACE_HELP,
    EngineOptions,
    SamplingOptions,
    SpeculationOptions,
    argument,
    option,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(EngineOptions, SpeculationOptions, SamplingOptions):
    """Options of ``paceline explain``."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    prompt: Annotated[str, option("-p", "--prompt", help="The prompt's text.")]
    chat: Annotated[
        bool | None,
        option("--chat/--no-chat", help="Use the chat template (default: if there is one)."),
    ] = None
    no_thinking: Annotated[
        bool, option("--no-thinking", help="Ask the chat template for no thoughts.")
    ] = False
    max_tokens: Annotated[int, option("--max-tokens", help="Most tokens of the answer.")] = 64
    steps: Annotated[
        str | None, option("--steps", help="Show these steps only, e.g. 3-10 (default: all).")
    ] = None
    plot: Annotated[
        str | None,
        option("--plot", help="Draw costs, reliability and widths into a .png, .svg or .pdf file."),
    ] = None
    trace: Annotated[str | None, option("--trace", help=TRACE_HELP)] = None
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False
