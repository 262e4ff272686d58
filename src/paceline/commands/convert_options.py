"""The options of ``paceline convert``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import argument, option
from paceline.config import PACKED_DTYPES


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConvertOptions:
    """Options of ``paceline convert``."""

    model: Annotated[str, argument("MODEL", help="Folder, GGUF file, name or hub id.")]
    out: Annotated[str, argument("OUT", help="Folder to write; must not exist, or be empty.")]
    dtype: Annotated[
        str,
        option(
            "--dtype",
            help=f"auto, {', '.join(PACKED_DTYPES)}; auto is file, the formats in which the "
            "weights are stored, where they are quantised, otherwise int8.",
        ),
    ] = "auto"
    threads: Annotated[int | None, option("--threads", help="Threads that compute.")] = None
