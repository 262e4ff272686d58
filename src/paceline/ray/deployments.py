"""The application: one ingress, and the replicas with what each asks of the cluster."""

from __future__ import annotations

from ray import serve
from ray.serve.config import RequestRouterConfig

from paceline.ray.ingress import Ingress
from paceline.ray.replica import Replica, Served

NAME = "paceline"
INGRESS, REPLICAS = "ingress", "engine"
_ROUTER = "paceline.ray.request_router.AffinityRouter"
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_CHECK_SECONDS = 1.0
_MAX_ONGOING = 1 << 16
"""Requests to a replica or the ingress: more than there can be, as the server's own queue is the
one that refuses."""


def application(served: Served, replicas: int, threads: int) -> serve.Application:
    """
    Args:
        served: by each replica.
        threads: of each replica, for which it asks as many of the cluster's CPUs.
    """
    config, grace = served.config, served.config.drain_timeout
    replica = serve.deployment(
        Replica,
        name=REPLICAS,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": threads},
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=grace,
        logging_config=_LOGGING,
        health_check_period_s=_CHECK_SECONDS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    ).bind(served)
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=grace,
        logging_config=_LOGGING,
        health_check_period_s=_CHECK_SECONDS,
    )
    return ingress.bind(replica, config)
