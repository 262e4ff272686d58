"""The life of an application of replicas: join or start Ray, deploy, serve, drain, end.

Owns signals. The first one drains as a server of one process does: new requests get a 503, those in
flight have ``drain_timeout``; the second ends everything at once.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from ray import serve
from ray.exceptions import RayError

from paceline.errors import ConfigError, EngineDeadError
from paceline.ray.cluster import cluster
from paceline.ray.deployments import NAME, REPLICAS
from paceline.server.config import ServerConfig
from paceline.server.run import address, bind, start_line

_KEEP_ALIVE_SECONDS = 75
_POLL_SECONDS = 0.2


def run(
    app: serve.Application,
    config: ServerConfig,
    cpus: int,
    ray_address: str | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal ends it.

    Args:
        cpus: that all replicas ask for.
        ray_address: of a cluster to join; None starts one on this machine, which ends with this.
        announce: told one line when requests are answered.

    Raises:
        ConfigError: the address cannot be listened on; the cluster cannot be joined, or runs Serve.
        EngineDeadError: the replicas cannot be started.
    """
    with bind(config) as listener:
        where, port = address(listener), listener.getsockname()[1]
    ends = Event(), Event()
    with cluster(ray_address, cpus), _signals(*ends):
        if serve.status().proxies:
            raise ConfigError(
                f"--ray-address {ray_address}: Serve runs there already, at an address of its own; "
                "deploy paceline.ray:build_app with `serve deploy`"
            )
        try:
            replicas = _deployed(app, config.host, port)
            info, names = replicas.info.remote().result()
            announce(start_line(info, names, where))
            while not ends[0].wait(_POLL_SECONDS):
                pass
            _drain(replicas, time.monotonic() + config.drain_timeout, ends[1])
        finally:
            serve.shutdown()


def _deployed(app: serve.Application, host: str, port: int) -> Any:
    """A handle of the replicas, which are ready."""
    http = {"host": host, "port": port, "keep_alive_timeout_s": _KEEP_ALIVE_SECONDS}
    quiet = {"log_level": "WARNING"}
    try:
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.run(app, name=NAME, route_prefix="/")
    except (RuntimeError, RayError) as error:
        raise EngineDeadError(f"the replicas did not start: {error}") from error
    return serve.get_deployment_handle(REPLICAS, NAME)


def _drain(replicas: Any, deadline: float, is_hurried: Event) -> None:
    replicas.broadcast("drain").results(timeout_s=10.0)
    while time.monotonic() < deadline and not is_hurried.wait(_POLL_SECONDS):
        if not sum(replicas.broadcast("num_unfinished").results(timeout_s=10.0)):
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
