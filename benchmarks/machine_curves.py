"""Cost curves for replays: published ones, and those of pairs of models on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import note

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.policy.cost_table import CostTable
from paceline.workbench.profile import ProfileSettings, measure_profiles
from paceline.workbench.profile_import import import_tables

WIDTHS = (*range(1, 18), 20, 24, 28, 33, 64, 128, 256)
CONTEXT = 256


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


def measured(
    name: str, target: str, draft: str, device: str, seconds: float, widths: Sequence[int] = WIDTHS
) -> Curve:
    """A pair's curve on this machine, for one request at a time."""
    config = EngineConfig(device=device, max_num_seqs=1)
    settings = ProfileSettings(widths, (CONTEXT,), seconds)
    note(f"measuring {name}")
    model = SpeculativeConfig("draft_model", draft)
    profiles, remarks = measure_profiles(target, config, model, settings)
    for remark in remarks:
        if "beyond the limits" not in remark:
            note(remark)
    return Curve(name, *(profile.table for profile in profiles))


def describe(curve: Curve) -> dict[str, Any]:
    """Cost ratios of widths 1 to 33, and a draft step over a plain step."""
    context = curve.target.contexts[0]
    plain = curve.target.milliseconds(1, context)
    draft = None if curve.draft is None else curve.draft.milliseconds(1, context) / plain
    ratios = [round(curve.target.cost_ratio(width, context), 4) for width in range(1, 34)]
    return {"cost_ratio": ratios, "draft_step_ratio": draft, "plain_ms": plain}
