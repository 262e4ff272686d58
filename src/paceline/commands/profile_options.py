"""The options of ``paceline profile``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import EngineOptions, argument, option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProfileOptions(EngineOptions):
    """Options of ``paceline profile``."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    draft: Annotated[
        str | None,
        option("--draft", help="Draft model (default: with the embedded model its own)."),
    ] = None
    draft_layers: Annotated[
        int | None,
        option("--draft-layers", min=1, help="Draft with so many of the model's own first layers."),
    ] = None
    draft_dtype: Annotated[
        str | None, option("--draft-dtype", help="Draft with the model itself in fewer bits.")
    ] = None
    widths: Annotated[
        str | None,
        option("--widths", help="Rows per step, e.g. 1-16,32 (default: 1-33, coarser to 512)."),
    ] = None
    contexts: Annotated[
        str | None,
        option("--contexts", help="Tokens before the step (default: 64,512,2048)."),
    ] = None
    budget: Annotated[
        float, option("--budget", min=0.001, help="Seconds of measuring; a few rounds at least.")
    ] = 30.0
    import_file: Annotated[
        str | None,
        option(
            "--import",
            help="Measure nothing; take what llama-batched-bench --output-format jsonl wrote, or "
            "a JSON file of cost curves.",
        ),
    ] = None
    output: Annotated[
        str | None, option("-o", "--output", help="Also write the JSON document to this file.")
    ] = None
    plot: Annotated[
        str | None, option("--plot", help="Draw the curves into a .png, .svg or .pdf file.")
    ] = None
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False
