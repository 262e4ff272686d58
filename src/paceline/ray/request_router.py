"""The policy as Serve asks it: one router for each process that sends requests to the replicas.

Owns the count of each replica's unfinished requests, as far as they were sent from here.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.ray.calls import Call
from paceline.ray.routing import THRESHOLD, Affinity

_SENDING_SECONDS = 5.0
"""After which a request that was given to a replica, and not taken by it, was given up."""


class AffinityRouter(RequestRouter):
    """Serve's interface of request routers over :class:`~paceline.ray.routing.Affinity`."""

    def initialize_state(self, threshold: int = THRESHOLD) -> None:
        self._policy = Affinity(threshold)
        self._sending: dict[str, tuple[ReplicaID, float]] = {}
        self._running: dict[ReplicaID, set[str]] = defaultdict(set)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each: the policy's choice, then the others by their load."""
        call = pending_request.args[0] if pending_request and pending_request.args else None
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is None or not isinstance(call, Call) or not by_name:
            return [candidate_replicas]
        all_loads = self._loads(by_name)
        loads = {n: load for n, load in all_loads.items() if n not in call.avoid} or all_loads
        chosen = self._policy.choose(call.traits, loads)
        sent_to = by_name[chosen].replica_id, time.monotonic()
        self._sending[pending_request.metadata.internal_request_id] = sent_to
        others = sorted(loads.keys() - {chosen}, key=loads.__getitem__)
        return [[by_name[name]] for name in (chosen, *others)]

    def _loads(self, by_name: dict[str, RunningReplica]) -> dict[str, int]:
        given_up = time.monotonic() - _SENDING_SECONDS
        self._sending = {k: v for k, v in self._sending.items() if v[1] > given_up}
        sending = Counter(replica_id for replica_id, _ in self._sending.values())
        ids = {name: each.replica_id for name, each in by_name.items()}
        return {name: sending[i] + len(self._running[i]) for name, i in ids.items()}

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        name = pending_request.metadata.internal_request_id
        self._sending.pop(name, None)
        self._running[replica_id].add(name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id].discard(internal_request_id)
        for gone in self._running.keys() - self.curr_replicas.keys():
            del self._running[gone]
