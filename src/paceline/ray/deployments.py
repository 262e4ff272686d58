"""The replicas with what each asks of the cluster, and the ingress where Serve's proxies listen."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from paceline.ray.ingress import Ingress
from paceline.ray.replica import Replica, Served

NAME = "paceline"
INGRESS, REPLICAS = "ingress", "engine"
_DIRECTORY = "paceline.ray.request_router.Directory"
_MAX_ONGOING = 1 << 16
"""Requests to the ingress: more than there can be, as the server's own queue is the one that
refuses."""


def replicas(served: Served, count: int, threads: int) -> serve.Application:
    """
    Args:
        served: by each replica.
        threads: of each replica, for which it asks as many of the cluster's CPUs.
    """
    replica = serve.deployment(
        Replica,
        name=REPLICAS,
        num_replicas=count,
        ray_actor_options={"num_cpus": threads},
        request_router_config=RequestRouterConfig(request_router_class=_DIRECTORY),
        **_common(served),
    )
    return replica.bind(served)


def application(served: Served, count: int, threads: int) -> serve.Application:
    """Replicas as :func:`replicas` has them, behind an ingress."""
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_ONGOING,
        **_common(served),
    )
    return ingress.bind(replicas(served, count, threads), served.config)


def _common(served: Served) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": served.config.drain_timeout,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "health_check_period_s": 1.0,
    }
