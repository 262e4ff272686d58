"""The policy behind Serve's interface: what is counted of requests that come and end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'paceline[ray]'")

from ray.serve.request_router import ReplicaID

from paceline.ray.calls import Call
from paceline.ray.prompts import Traits
from paceline.ray.request_router import AffinityRouter

REPLICAS: list[Any] = [
    SimpleNamespace(replica_id=ReplicaID.from_full_id_str(f"SERVE_REPLICA::paceline#engine#{name}"))
    for name in ("a", "b")
]
CALL = Call({}, b"", True, Traits((1, 2, 3)))


def pending(name: str, call: Call = CALL) -> Any:
    metadata = SimpleNamespace(internal_request_id=name)
    return SimpleNamespace(args=(call,), metadata=metadata)


def asked(router: AffinityRouter, request: Any) -> list[str]:
    """The replicas in the order in which they are tried."""
    ranks = asyncio.run(router.choose_replicas(REPLICAS, request))
    return [replica.replica_id.unique_id for rank in ranks for replica in rank]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> AffinityRouter:
    """One that no deployment has made."""
    made = AffinityRouter.__new__(AffinityRouter)
    made.initialize_state()
    known = {each.replica_id: each for each in REPLICAS}
    monkeypatch.setattr(AffinityRouter, "curr_replicas", property(lambda _: known))
    return made


def test_a_request_counts_from_its_choice_to_its_end(router: AffinityRouter) -> None:
    first, second = pending("1"), pending("2")
    assert asked(router, first) == ["a", "b"]
    assert asked(router, second) == ["b", "a"]  # what is being sent to the other one counts
    router.on_request_routed(first, REPLICAS[0].replica_id, None)
    router.on_request_routed(second, REPLICAS[1].replica_id, None)
    router.on_request_completed(REPLICAS[1].replica_id, "2")
    assert asked(router, pending("3")) == ["b", "a"]


def test_a_replica_that_refused_is_not_asked_again(router: AffinityRouter) -> None:
    refused = Call({}, b"", True, Traits((1, 2, 3)), frozenset("a"))
    assert asked(router, pending("1", refused)) == ["b"]
    everywhere = Call({}, b"", True, Traits((1, 2, 3)), frozenset("ab"))
    assert sorted(asked(router, pending("2", everywhere))) == ["a", "b"]
