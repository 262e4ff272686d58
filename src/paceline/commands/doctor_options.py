"""The options of ``paceline doctor``. Imports nothing slow: its ``--help`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import EngineOptions, argument, option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DoctorOptions(EngineOptions):
    """Options of ``paceline doctor``."""

    model: Annotated[
        str | None,
        argument("MODEL", help="Folder, GGUF file, name or hub id (default: the embedded model)."),
    ] = None
    json: Annotated[bool, option("--json", help="Print one line of JSON instead.")] = False
