"""What is said where a cluster can be neither joined nor started, without one."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("ray", reason="replicas need the extra ray")

import ray

from paceline.core.errors import ConfigError
from paceline.ray.cluster import cluster


def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo afterwards what is set for Ray."""
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_a_node_whose_agents_were_late_is_started_again(
    num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception | None] = [*[Exception("its agents are late")] * num_failures, None]

    def start(*words: Any, **settings: Any) -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    keep_environment(monkeypatch)
    monkeypatch.setattr(ray, "init", start)
    with cluster(None, 1):
        assert errors == []


def test_what_a_failed_start_leaves_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(command)]

    def start(*words: Any, **settings: Any) -> None:
        if len(processes) == 1:
            processes.append(subprocess.Popen(command))
            raise Exception("its agents are late")

    keep_environment(monkeypatch)
    monkeypatch.setattr(ray, "init", start)
    try:
        with cluster(None, 1):
            assert processes[1].wait(60) == -signal.SIGKILL
            assert processes[0].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (None, Exception("timed out"), "cannot be started on this machine: timed out"),
        ("host:1", ConnectionError("nobody"), r"--ray-address host:1: cannot join .*nobody"),
        ("host:1", ConnectionError("AuthenticationError: no"), "ray get-auth-token"),
    ],
)
def test_failures_of_ray_are_told(
    address: str | None, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: Any, **settings: Any) -> None:
        raise error

    keep_environment(monkeypatch)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match=message), cluster(address, 1):
        pass
