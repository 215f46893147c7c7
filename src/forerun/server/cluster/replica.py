"""One replica: an engine in a process of its own, which Ray Serve starts, asks for its health, and drains.

`Loads` adds up what all replicas report, for `/stats`, `/metrics` and admission.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import zip_longest
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from forerun.api.completion import Completion
from forerun.core import registry
from forerun.core.errors import ForerunError, InvalidInput
from forerun.core.types import Event
from forerun.server.backends.base import Load
from forerun.server.backends.thread import LocalBackend
from forerun.server.settings import ClusterSettings


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
                gauge.add_metric([report.replica, report.node], float(getattr(report.load, name)))
            yield gauge


@dataclass(frozen=True, slots=True)
class Begun:
    """The first item of a text: which replica writes it."""

    replica: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of a text that was not written to its end."""

    error: Exception
    engine_failed: bool  # another replica may well write it


Item = Begun | Ended | Event | Completion


class Replica:
    """Writes texts. Its methods are called through a Ray Serve handle."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        import ray
        from ray import serve

        from forerun.api.llm import LLM, AsyncLLM
        from forerun.build.load import load_engine

        self._settings = ClusterSettings.from_dict(args)
        model = self._settings.model
        llm = LLM(*load_engine(model, self._settings.load), model)
        self._llm, self._backend = llm, LocalBackend(AsyncLLM(llm, max_requests=1 << 16))
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._node = str(ray.get_runtime_context().get_node_id())
        self._drafter: str | None = None

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Ray Serve calls this when `user_config` has changed: texts from now on are drafted so, others go on."""
        named = config.get("drafter")
        if named is not None:
            spec = registry.drafters.spec(named)
            if spec.needs != "nothing" and spec.name not in self._backend.drafters:
                raise InvalidInput(f"the drafter {named!r} needs a checkpoint; change `load`, not `drafter`")
        self._drafter = named

    async def write(
        self,
        prompt: Sequence[int],
        options: Mapping[str, Any],
        *,
        every_round: bool = True,
        session: str | None = None,  # these two are for the router
        avoid: Sequence[str] = (),
    ) -> AsyncGenerator[Item]:
        """One text as it grows; a caller that leaves ends it. What is wrong with the request comes as an item."""
        yield Begun(self._name)
        given = dict(options)
        if self._drafter is not None:
            given.setdefault("drafter", self._drafter)
        try:
            stream = self._backend.stream(tuple(prompt), every_round=every_round, **given)
            async with aclosing(stream) as items:
                async for item in items:
                    yield item
        except (ForerunError, TypeError, ValueError) as error:
            yield Ended(error, self._backend.failure is not None)
        except Exception as error:
            yield Ended(ForerunError(f"{type(error).__name__}: {error}"), True)

    async def report(self) -> Report:
        backend = self._backend
        return Report(
            self._name, self._node, os.getpid(), self._settings.model, self._drafter or backend.drafter,
            self._llm.engine.default_verifier, backend.vocab_size, backend.max_length, backend.max_batch,
            backend.has_encoder, backend.problem, backend.load(),
        )  # fmt: skip

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For `scaling.QueueAndKV`."""
        load = self._backend.load()
        share = load.used_slots / load.slots if load.slots else 0.0
        return {"waiting": float(load.waiting), "kv_share": share}

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises here."""
        hangs = self._backend.looks_hung(self._settings.server_settings(with_keys=False).hang_seconds)
        if hangs:
            self._backend.give_up()
        if self._backend.problem is not None:
            raise ForerunError(self._backend.problem)
