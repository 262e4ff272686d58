"""The planners by name, as engines and replays make them."""

from __future__ import annotations

from collections.abc import Callable

from paceline.objective import Objective
from paceline.policy.choice import choose_nodes
from paceline.policy.cost import CostModel
from paceline.policy.cost_aware import CostAwarePlanner
from paceline.policy.drafting_cost import DraftingCost
from paceline.policy.planner import FixedPlanner, Planner
from paceline.runtime.native import kernels

MakePlanner = Callable[[CostModel, DraftingCost | None, Objective], Planner]
_CHOOSE = kernels.choose_nodes if kernels is not None else choose_nodes
PLANNERS: dict[str, MakePlanner] = {
    "auto": lambda cost, drafting, objective: CostAwarePlanner(cost, objective, drafting, _CHOOSE),
    "fixed": lambda cost, drafting, objective: FixedPlanner(),
}
