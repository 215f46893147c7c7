"""What all replicas are doing together, and each of them alone: for `/stats`, `/metrics` and admission."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import zip_longest
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from forerun.server.backends.base import Load


@dataclass(frozen=True, slots=True)
class Report:
    replica: str
    node: str
    pid: int
    model: str
    drafter: str  # of requests that name none, as is the verifier
    verifier: str
    vocab_size: int
    max_length: int
    max_batch: int
    has_encoder: bool
    problem: str | None
    load: Load


NOTHING = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, (), (), {})


def added(first: Any, second: Any) -> Any:
    """Two engines as one: numbers, and what sequences and mappings hold, are added up; None and anything is None."""
    if first is None or second is None:
        return None
    if isinstance(first, Load):
        return Load(*(added(getattr(first, each.name), getattr(second, each.name)) for each in fields(Load)))
    if isinstance(first, Mapping):
        return {key: added(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}
    if isinstance(first, Sequence) or isinstance(second, Sequence):
        return [added(*pair) for pair in zip_longest(first or (), second or (), fillvalue=0)]
    return first + second


class Loads:
    """The last report of each replica; what replicas that are gone had counted stays counted."""

    def __init__(self) -> None:
        self.reports: dict[str, Report] = {}
        self._gone = NOTHING

    def update(self, reports: Iterable[Report]) -> None:
        there = {report.replica: report for report in reports}
        for name, last in self.reports.items():
            if name not in there:
                counted = replace(last.load, running=0, waiting=0, used_slots=0, cached_slots=0, slots=0, captures=0)
                self._gone = added(self._gone, counted)
        self.reports = there

    def total(self) -> Load:
        """All replicas as one engine."""
        return reduce(added, (report.load for report in self.reports.values()), self._gone)

    def usable(self) -> list[Report]:
        return [report for report in self.reports.values() if report.problem is None]


class ReplicaGauges:
    """Prometheus collects these: one row a replica."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        reports = list(self._loads.reports.values())
        there = GaugeMetricFamily("forerun:replicas", "Replicas that answer")
        there.add_metric([], float(len(self._loads.usable())))
        yield there
        for name, says in (
            ("running", "Sequences in the batch of a replica"),
            ("waiting", "Requests that wait in a replica"),
            ("used_slots", "Tokens that the KV cache of a replica has slots for in use"),
            ("tokens", "Tokens that a replica has written"),
        ):
            gauge = GaugeMetricFamily(f"forerun:replica_{name}", says, labels=["replica", "node"])
            for report in reports:
                value = {"running": report.load.running, "waiting": report.load.waiting,
                         "used_slots": report.load.used_slots, "tokens": report.load.tokens}[name]  # fmt: skip
                gauge.add_metric([report.replica, report.node], float(value))
            yield gauge
