"""Where the running replicas are, as Serve tells each process that has a handle of them."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from paceline.ray import links


class Directory(RequestRouter):
    """Serve's interface of request routers; what goes through Serve itself goes to anyone.

    Serve copies this module with all that it owns, and no other one: what it hears is kept there.
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
