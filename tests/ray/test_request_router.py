"""What a process is told of the running replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="replicas need the extra ray")

from ray.serve.request_router import ReplicaID, RequestRouter

from paceline.ray.application import Directory
from paceline.ray.links import Address, addresses


def replica(name: str) -> Any:
    found = ReplicaID.from_full_id_str(f"SERVE_REPLICA::an-app#engine#{name}")
    address = Address("host", 1, f"token of {name}")
    return SimpleNamespace(replica_id=found, replica_metadata=address._asdict())


def test_addresses_are_those_of_the_replicas_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    monkeypatch.setattr(RequestRouter, "app_name", "an-app")
    directory = Directory.__new__(Directory)  # one that no deployment has made
    directory.update_replicas([replica("a"), replica("b")])
    directory.update_replicas([replica("b"), replica("c")])
    assert addresses.pop("an-app") == {
        "b": Address("host", 1, "token of b"),
        "c": Address("host", 1, "token of c"),
    }
