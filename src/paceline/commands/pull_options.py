"""The options of ``paceline pull`` and ``paceline models``. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.commands.options import argument, option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PullOptions:
    """Options of ``paceline pull``."""

    name: Annotated[str, argument("NAME", help="One that paceline models lists.")]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelsOptions:
    """Options of ``paceline models``."""

    json: Annotated[bool, option("--json", help="Print one line of JSON instead.")] = False
