"""The options of ``paceline demo``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import option
from paceline.config import BACKENDS, DTYPES


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DemoOptions:
    """Options of ``paceline demo``."""

    quick: Annotated[bool, option("--quick", help="One prompt of each kind, shorter.")] = False
    max_tokens: Annotated[
        int | None,
        option(
            "--max-tokens",
            help="Tokens per prompt (default: 128, quick: 64; of the embedded model 96 and 48).",
        ),
    ] = None
    embedded: Annotated[
        bool, option("--embedded", help="Ask the embedded model, and fetch nothing.")
    ] = False
    dtype: Annotated[str, option("--dtype", help=f"Arithmetic: {', '.join(DTYPES)}.")] = "auto"
    threads: Annotated[int | None, option("--threads", help="Threads that compute.")] = None
    backend: Annotated[
        str, option("--backend", help=f"Kernels of the CPU: {', '.join(BACKENDS)}.")
    ] = "auto"
    json: Annotated[bool, option("--json", help="End stdout with a line of JSON.")] = False
