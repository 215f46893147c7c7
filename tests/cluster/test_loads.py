"""All replicas as one engine: sums, and counters that do not fall when a replica is gone."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from forerun.server.backends.base import Load
from forerun.server.cluster.replica import Loads, ReplicaGauges, Report


def report(name: str, tokens: int, running: int = 1, problem: str | None = None) -> Report:
    load = Load(
        running, 2, 30, 40, 100, 5, 3, 1, 7, tokens, 11, 6, {"plain": 4}, [5, 1], [3], {"pass": 0.5}, 0,
        {"shared": (4, 9, 8, 5), name: (1, 2, 0, 0)},
    )  # fmt: skip
    return Report(name, "node", 1, "m", "ngram", "auto", 10, 64, 4, False, problem, load)


def test_sums() -> None:
    loads = Loads()
    loads.update([report("a", 100), report("b", 50)])
    total = loads.total()
    assert (total.running, total.waiting, total.used_slots, total.slots, total.tokens) == (2, 4, 60, 200, 150)
    assert list(total.reached) == [10, 2]
    assert total.forms == {"plain": 8}
    assert total.seconds == {"pass": 1.0}
    assert total.adapters == {"shared": [8, 18, 16, 10], "a": [1, 2, 0, 0], "b": [1, 2, 0, 0]}


def test_counters_do_not_fall_when_a_replica_is_gone() -> None:
    loads = Loads()
    loads.update([report("a", 100), report("b", 50)])
    loads.update([report("b", 60)])
    assert loads.total().tokens == 160
    assert loads.total().running == 1  # what is going on is only what is there
    loads.update([report("b", 60), report("c", 5)])
    assert loads.total().tokens == 165


def test_one_row_for_each_replica_and_only_usable_ones_count() -> None:
    loads = Loads()
    loads.update([report("a", 100), report("b", 50, problem="the engine ended")])
    rows = {metric.name: metric.samples for metric in ReplicaGauges(loads).collect()}
    assert rows["forerun:replicas"][0].value == 1.0
    assert {sample.labels["replica"]: sample.value for sample in rows["forerun:replica_tokens"]} == {
        "a": 100.0,
        "b": 50.0,
    }
