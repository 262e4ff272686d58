"""How many replicas there should be, by what their engines say: a policy for Serve's autoscaler.

Knows no Ray: Serve calls the policy with its context, and each replica for :func:`load_of`.
"""

from __future__ import annotations

from typing import Any

from paceline.core.checks import check_number
from paceline.request.engine_stats import EngineInfo, EngineStats

LOAD = "load"
"""Name of what a replica reports."""


def load_of(stats: EngineStats, info: EngineInfo) -> float:
    """How full an engine is: by places in its batch, beyond 1 where requests wait, or by KV."""
    places = (stats.num_running + stats.num_waiting) / info.max_num_seqs
    return max(places, stats.kv_blocks_used / max(1, stats.kv_blocks_total))


class ByLoad:
    """As many replicas as would each be ``target`` full.

    Serve smooths the loads over ``look_back_period_s``, and keeps the delays and bounds of
    ``autoscaling_config``.

    Args:
        target: above 0; above 1 requests wait.

    Raises:
        ConfigError: the target is not such a number.
    """

    def __init__(self, target: float = 0.8) -> None:
        check_number("target", target, 0.01, 100.0, float)
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas, and nothing to be remembered."""
        loads = (context.aggregated_metrics or {}).get(LOAD)
        if not loads:  # no replica has reported yet
            return context.target_num_replicas, {}
        return sum(loads.values()) / self._target, {}
