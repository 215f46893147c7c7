"""What all replicas are doing together, and each of them alone: for `/stats`, `/metrics` and admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

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


def added(first: Load, second: Load) -> Load:
    """Two engines as one."""
    return Load(
        first.running + second.running, first.waiting + second.waiting, first.used_slots + second.used_slots,
        first.cached_slots + second.cached_slots,
        None if first.slots is None or second.slots is None else first.slots + second.slots,
        first.read + second.read, first.reused + second.reused, first.preemptions + second.preemptions,
        first.rounds + second.rounds, first.tokens + second.tokens, first.drafted + second.drafted,
        first.accepted + second.accepted, dict(Counter(first.forms) + Counter(second.forms)),
        _each(first.reached, second.reached), _each(first.kept, second.kept), _parts(first.seconds, second.seconds),
        first.aged + second.aged,
        {name: _each(first.adapters.get(name, ()), second.adapters.get(name, ()))
         for name in {**first.adapters, **second.adapters}},
        first.captures + second.captures,
    )  # fmt: skip


def _each(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip_longest(first, second, fillvalue=0)]


def _parts(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


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
        sum_ = self._gone
        for report in self.reports.values():
            sum_ = added(sum_, report.load)
        return sum_

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
