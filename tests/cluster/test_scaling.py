"""How many replicas queue and KV use ask for, and the policy as Ray Serve calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun.server.cluster.scaling import QueueAndKV, wanted_replicas


@pytest.mark.parametrize(
    ("running", "waiting", "shares", "wanted"),
    [
        (1, 0.0, [0.0], 1),
        (2, 3.0, [0.5, 0.5], 2),  # fewer than two wait for each
        (2, 5.0, [0.5, 0.5], 5),  # three more, for five that wait
        (2, 0.0, [0.9, 0.9], 3),  # caches above their target
        (2, 0.0, [0.8, 0.8], 2),
        (3, 0.0, [0.1, 0.1, 0.1], 2),  # one fewer would do
        (3, 1.0, [0.1, 0.1, 0.1], 3),  # but somebody waits
        (3, 0.0, [0.5, 0.5, 0.5], 3),  # two would be too full
        (1, 0.0, [], 1),
    ],
)
def test_wanted(running: int, waiting: float, shares: list[float], wanted: int) -> None:
    assert wanted_replicas(running, waiting, shares, target_queue=2.0, target_kv=0.8) == wanted


def context(**values: Any) -> Any:
    plain = {
        "aggregated_metrics": {"waiting": {"r": 0.0}, "kv_share": {"r": 0.0}},
        "total_queued_requests": 0.0,
        "running_replicas": ["r"],
        "capacity_adjusted_max_replicas": 4,
        "capacity_adjusted_min_replicas": 1,
    }
    return SimpleNamespace(**{**plain, **values})


def test_policy_counts_what_waits_in_replicas_and_in_handles_and_keeps_its_limits() -> None:
    policy = QueueAndKV(target_queue=2.0)
    assert policy(context())[0] == 1
    assert policy(context(total_queued_requests=3.0))[0] == 3
    assert policy(context(aggregated_metrics={"waiting": {"r": 3.0}}))[0] == 3
    assert policy(context(total_queued_requests=100.0))[0] == 4
    assert policy(context(aggregated_metrics=None, capacity_adjusted_min_replicas=2))[0] == 2
