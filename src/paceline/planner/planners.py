"""The planners by name, for engines and replays; their native parts where they are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.config import Objective
from paceline.planner import drafts
from paceline.planner.cost import CostModel
from paceline.planner.cost_aware import CostAwarePlanner
from paceline.planner.planner import FixedPlanner, Planner
from paceline.request.span import DraftTree
from paceline.sampling.native import kernels

MakePlanner = Callable[[CostModel, Objective], Planner]

new_drafts: Any = getattr(kernels, "Drafts", drafts.Drafts)
is_sound: Callable[[DraftTree, int], bool] = getattr(kernels, "is_sound", lambda tree, size: False)
"""Whether a tree over a vocabulary of this size is known to be valid, without a closer look."""


def cost_aware(cost: CostModel, objective: Objective) -> CostAwarePlanner:
    return CostAwarePlanner(cost, objective, new_drafts())


PLANNERS: dict[str, MakePlanner] = {
    "auto": cost_aware,
    "fixed": lambda cost, objective: FixedPlanner(new_drafts(calibrates=False)),
}
