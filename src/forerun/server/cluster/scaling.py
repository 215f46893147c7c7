"""How many replicas there should be, from what waits and how full KV caches are.

Ray Serve copies this module by value into its controller: it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any


def wanted_replicas(
    running: int, waiting: float, kv_shares: Sequence[float], *, target_queue: float, target_kv: float
) -> int:
    """One more for every `target_queue` texts that wait per replica, and as many as bring KV use to its target.

    Fewer only when what is left would be within both limits; the caller keeps it within its least and most.
    """
    running = max(1, running)
    by_queue = running + ceil(waiting / target_queue) if waiting > target_queue * running else running
    used = sum(kv_shares)
    by_kv = ceil(used / target_kv - 1e-9)
    grown = max(by_queue, by_kv)
    if grown > running or waiting >= 1.0:
        return max(grown, running)
    # none waits: one fewer would do if its share of the caches fits well into the others
    return running - 1 if running > 1 and used / (running - 1) <= 0.5 * target_kv else running


class QueueAndKV:
    """Ray Serve's autoscaling policy of the replicas."""

    def __init__(self, target_queue: float = 2.0, target_kv: float = 0.8) -> None:
        self.target_queue, self.target_kv = target_queue, target_kv

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state to keep: none. Serve holds it to its least, most and delays."""
        found = context.aggregated_metrics or {}
        waiting = sum(found.get("waiting", {}).values()) + float(context.total_queued_requests or 0.0)
        wanted = wanted_replicas(
            len(context.running_replicas), waiting, list(found.get("kv_share", {}).values()),
            target_queue=self.target_queue, target_kv=self.target_kv,
        )  # fmt: skip
        most, least = context.capacity_adjusted_max_replicas, context.capacity_adjusted_min_replicas
        return max(least, min(most, wanted)), {}
