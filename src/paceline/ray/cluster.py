"""A Ray cluster for as long as it is needed: one that is joined, or one that is started here."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from paceline.core.errors import ConfigError
from paceline.models.threads import cores

_OBJECT_STORE_BYTES = 100 << 20
"""What passes through it is small: requests, and pieces of answers."""

_START_ATTEMPTS = 3
"""Ray's node ends if its agents take longer than 15 s to start, as they do on a busy machine; the
second time their files are in memory."""
_JOIN_ATTEMPTS = "3"
"""By default Ray tries an address for two minutes, also with a token that was refused."""


@contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[None]:
    """
    Args:
        address: of a cluster to join; None starts one on this machine, which ends with this.
        cpus: that a cluster which is started here has at least.

    Raises:
        ConfigError: the cluster cannot be joined or started, or wants another token.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings: dict[str, Any] = {"logging_level": logging.WARNING}
    if address is None:
        settings |= {
            "num_cpus": max(cpus, cores()),
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    else:
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", _JOIN_ATTEMPTS)
    before = _children()
    for left in reversed(range(_START_ATTEMPTS if address is None else 1)):
        try:
            ray.init(address or "local", **settings)
            break
        except Exception as error:  # Ray raises bare ones, too
            ray.shutdown()
            for process in _children() - before:  # Ray lets them live as long as this one
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not left:
                raise ConfigError(_problem(address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _children() -> set[int]:
    import psutil  # comes with Ray, where the import of that finds it

    return {child.pid for child in psutil.Process().children()}


def forget_program() -> None:
    """Spare processes that a worker of Ray starts the import of Ray's own program.

    multiprocessing would run it in each of them, for a second, in case they need what it defines.
    """
    vars(sys.modules["__main__"]).pop("__file__", None)


def _problem(address: str | None, error: Exception) -> str:
    """Ray tells of a wrong token in the traceback that it gives as a cause's text."""
    if address is None:
        return f"Ray cannot be started on this machine: {error}"
    causes = f"{error!r} {error.__cause__}"
    if AuthenticationError.__name__ in causes:
        return (
            f"--ray-address {address}: this cluster asks for a token, and none or another one was "
            "sent. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-auth-token` prints "
            "on the cluster's head (or RAY_AUTH_TOKEN_PATH to a file with it; default: "
            "~/.ray/auth_token)"
        )
    return (
        f"--ray-address {address}: cannot join this cluster ({error}); `ray status` says whether "
        "it is there"
    )
