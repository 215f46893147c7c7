"""Ray Serve's request router for the replicas: prefix, then session, then load (see `placement`).

It runs in the process of each front. `write` is called with a prompt, its options and where it should not go; whatever
else is called on a replica goes to the least loaded one.
"""

from __future__ import annotations

from collections.abc import Hashable
from time import monotonic
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.server.cluster.placement import Placement, blocks_of


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that holds its prompt, else to the least loaded one."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once by Ray Serve."""
        self._placement = Placement(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of one, best first: Serve takes the first that has a place."""
        by_id: dict[Hashable, RunningReplica] = {each.replica_id: each for each in candidate_replicas}
        request = "" if pending_request is None else pending_request.metadata.internal_request_id
        now = monotonic()
        self._placement.keep_only(by_id)
        blocks, session, avoid = _asked(pending_request)
        best_first = self._placement.ranked(self._placement.loads(by_id, request, now), blocks, session)
        fine = [name for name in best_first if str(by_id[name].replica_id.unique_id) not in avoid]
        chosen = fine or best_first
        if chosen and request:
            self._placement.promise(request, chosen[0], now)
        return [[by_id[name]] for name in chosen]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The request has gone there."""
        self._placement.start(pending_request.metadata.internal_request_id, replica_id)
        blocks, session, _ = _asked(pending_request)
        self._placement.note(replica_id, blocks, session)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended there, in whatever way."""
        self._placement.end(internal_request_id, replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its cache is gone with it."""
        super().on_replica_actor_died(replica_id)
        self._placement.forget(replica_id)


def _asked(pending: PendingRequest | None) -> tuple[list[int], str | None, tuple[str, ...]]:
    """Blocks of the prompt, session, and replicas to avoid, of a call of `Replica.write`."""
    if pending is None or pending.metadata.call_method != "write":
        return [], None, ()
    prompt, options = pending.args
    given = pending.kwargs
    return (blocks_of(prompt, str(options.get("cache_salt", ""))), given.get("session"), given.get("avoid", ()))
