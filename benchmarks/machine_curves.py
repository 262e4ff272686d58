"""Published cost curves of machines, for replays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.planner.cost_table import CostTable
from paceline.profiling.profile_import import import_tables


@dataclass(frozen=True, slots=True)
class Curve:
    """What a machine's steps cost. Without ``draft`` nothing is known of a draft model there."""

    name: str
    target: CostTable
    draft: CostTable | None


def published(path: Path) -> list[Curve]:
    """The curves of a file, each with its draft model's."""
    tables = {found.name: found for found in import_tables(path)}
    drafts = {name: tables.pop(f"{name}: draft", None) for name in list(tables)}
    return [Curve(name, found, drafts[name]) for name, found in tables.items()]
