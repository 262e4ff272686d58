"""An application of replicas: what it deploys, and its life: join or start Ray, serve, drain, end.

Owns what each replica asks of the cluster, where the running ones are, signals, and the address
that clients connect to. The first signal drains as a server of one process does, the second ends
everything at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationStatus

from paceline.core.errors import ConfigError, EngineDeadError
from paceline.ray import links
from paceline.ray.cluster import cluster
from paceline.ray.ingress import Ingress, relay
from paceline.ray.replica import Replica, Served
from paceline.server.http.config import ServerConfig
from paceline.server.http.tracing import TraceMiddleware
from paceline.server.run import Listener, address, bind, loop_factory, start_line

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 10.0
"""Between two questions to Serve whether it still starts replicas."""


def run(
    served: Served,
    count: int,
    threads: int,
    ray_address: str | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal ends it.

    Args:
        count: of replicas.
        threads: of each replica.
        ray_address: of a cluster to join; None starts one on this machine, which ends with this.
        announce: told one line when requests are answered.

    Raises:
        ConfigError: the address cannot be listened on; the cluster cannot be joined, or runs Serve.
        EngineDeadError: the replicas cannot be started, or not again.
    """
    config, ends = served.config, (Event(), Event())
    with bind(config) as listener, cluster(ray_address, count * threads), _signals(*ends):
        status = serve.status()
        if status.proxies or status.applications:
            raise ConfigError(
                f"--ray-address {ray_address}: Serve runs there already; deploy "
                "paceline.ray:build_app with `serve deploy`"
            )
        try:
            engines = _deployed(replicas(served, count, threads))
            info, names = engines.info.remote().result()
            with _listening(engines, config, listener) as listening:
                announce(start_line(info, names, address(listener)))
                look = time.monotonic() + _LOOK_SECONDS
                while not ends[0].wait(_POLL_SECONDS):
                    if listening.done():
                        listening.result()
                    if time.monotonic() > look:
                        _check_replicas()
                        look = time.monotonic() + _LOOK_SECONDS
                _drain(engines, time.monotonic() + config.drain_timeout, ends[1])
                serve.shutdown()
        finally:
            serve.shutdown()


def _deployed(app: serve.Application) -> Any:
    """A handle of the replicas, which are ready."""
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.run(app, name=NAME, route_prefix=None)
    except (RuntimeError, RayError) as error:
        raise EngineDeadError(f"the replicas did not start: {error}") from error
    return serve.get_deployment_handle(REPLICAS, NAME)


def _check_replicas() -> None:
    """Raises EngineDeadError: Serve has given the replicas up.

    It does so where several starts in a row fail before a single replica runs, as after a
    deployment, or after its controller was started again, which remembers nothing. A controller
    that does not answer is asked again later.
    """
    try:
        app = serve.status().applications.get(NAME)
    except (RayError, RayServeException):
        return
    if app is not None and app.status == ApplicationStatus.DEPLOY_FAILED:
        deployment = app.deployments.get(REPLICAS, app)
        cause = deployment.message.strip().rpartition("\n")[2]
        raise EngineDeadError(f"the replicas did not start again: {cause}")


@contextmanager
def _listening(
    engines: Any, config: ServerConfig, listener: socket.socket
) -> Iterator[Future[None]]:
    """Answer clients, in a thread of its own: signals and Ray's calls are this one's."""
    server = Listener(TraceMiddleware(relay(engines, config)), config)

    def listen() -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(server.serve([listener]))

    with ThreadPoolExecutor(1, "ingress") as pool:
        try:
            yield pool.submit(listen)
        finally:
            server.should_exit = True


def _drain(engines: Any, deadline: float, is_hurried: Event) -> None:
    engines.broadcast("drain").results(timeout_s=10.0)
    while time.monotonic() < deadline and not is_hurried.wait(_POLL_SECONDS):
        if not sum(engines.broadcast("num_unfinished").results(timeout_s=10.0)):
            break


@contextmanager
def _signals(*ends: Event) -> Iterator[None]:
    """Let each signal set the next of the events."""

    def note(number: int, frame: object) -> None:
        next((end for end in ends if not end.is_set()), ends[-1]).set()

    before = {each: signal.signal(each, note) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


NAME = "paceline"
INGRESS, REPLICAS = "ingress", "engine"
_DIRECTORY = "paceline.ray.application.Directory"
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


class Directory(RequestRouter):
    """Keeps where replicas are; what goes through Serve itself goes to any of them.

    Serve copies this module, so what is kept lies in another one.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        links.addresses[self.app_name] = {
            each.replica_id.unique_id: links.Address(**each.replica_metadata) for each in replicas
        }

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
