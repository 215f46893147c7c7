"""Ray Serve's request router for the replicas: prefix, then session, then load (see `placement`).

It runs in the process of each front. `write` is called with a prompt, its options and where it should not go; whatever
else is called on a replica goes to the least loaded one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.cluster.placement import Placement, blocks_of


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that holds its prompt, else to the least loaded one."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once by Ray Serve."""
        self._placement = Placement(**kwargs)
        self._there: Counter[ReplicaID] = Counter()  # texts sent from here and not ended

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of one, best first: Serve takes the first that has a place."""
        by_id: dict[Hashable, RunningReplica] = {each.replica_id: each for each in candidate_replicas}
        self._placement.keep_only(by_id)
        loads = {name: float(self._there[each.replica_id]) for name, each in by_id.items()}
        blocks, session, avoid = _asked(pending_request)
        best_first = self._placement.ranked(loads, blocks, session)
        fine = [name for name in best_first if str(by_id[name].replica_id.unique_id) not in avoid]
        return [[by_id[name]] for name in fine or best_first]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The request has gone there."""
        self._there[replica_id] += 1
        blocks, session, _ = _asked(pending_request)
        self._placement.note(replica_id, blocks, session)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended there, in whatever way."""
        self._there[replica_id] -= 1
        if self._there[replica_id] <= 0:
            del self._there[replica_id]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its cache is gone with it."""
        super().on_replica_actor_died(replica_id)
        self._placement.forget(replica_id)
        self._there.pop(replica_id, None)


def _asked(pending: PendingRequest | None) -> tuple[list[int], str | None, tuple[str, ...]]:
    """Blocks of the prompt, session, and replicas to avoid, of a call of `Replica.write`."""
    if pending is None or pending.metadata.call_method != "write":
        return [], None, ()
    prompt, options = pending.args
    given = pending.kwargs
    return (
        blocks_of(prompt, str(options.get("cache_salt", ""))),
        given.get("session"),
        given.get("avoid", ()),
    )
