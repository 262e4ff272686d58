"""The policy as Serve asks it: one router for each process that sends requests to the replicas.

Owns the work of each replica's unfinished requests, as far as they were sent from here.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.ray.calls import Call
from paceline.ray.routing import ANSWER, Affinity

_SENDING_SECONDS = 5.0
"""After which a request that was given to a replica, and not taken by it, was given up."""


class AffinityRouter(RequestRouter):
    """Serve's interface of request routers over :class:`~paceline.ray.routing.Affinity`."""

    def initialize_state(self) -> None:
        self._policy = Affinity()
        self._sending: dict[str, tuple[ReplicaID, int, float]] = {}
        self._running: dict[ReplicaID, dict[str, int]] = defaultdict(dict)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each: the policy's choice, then the others by their work."""
        call = pending_request.args[0] if pending_request and pending_request.args else None
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is None or not isinstance(call, Call) or not by_name:
            return [candidate_replicas]
        all_work = self._work(by_name)
        work = {n: each for n, each in all_work.items() if n not in call.avoid} or all_work
        chosen = self._policy.choose(call.traits, work)
        sent = by_name[chosen.name].replica_id, chosen.work, time.monotonic()
        self._sending[pending_request.metadata.internal_request_id] = sent
        others = sorted(work.keys() - {chosen.name}, key=work.__getitem__)
        return [[by_name[name]] for name in (chosen.name, *others)]

    def _work(self, by_name: dict[str, RunningReplica]) -> dict[str, int]:
        given_up = time.monotonic() - _SENDING_SECONDS
        self._sending = {k: sent for k, sent in self._sending.items() if sent[-1] > given_up}
        sending = Counter[ReplicaID]()
        for replica_id, work, _ in self._sending.values():
            sending[replica_id] += work
        ids = {name: each.replica_id for name, each in by_name.items()}
        return {name: sending[i] + sum(self._running[i].values()) for name, i in ids.items()}

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        name = pending_request.metadata.internal_request_id
        _, work, _ = self._sending.pop(name, (None, ANSWER, 0.0))
        self._running[replica_id][name] = work

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id].pop(internal_request_id, None)
        for gone in self._running.keys() - self.curr_replicas.keys():
            del self._running[gone]
