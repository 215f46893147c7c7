"""One replica: an engine in a process of its own, which Ray Serve starts, asks for its health, and drains."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from forerun.api.completion import Completion
from forerun.core import registry
from forerun.core.errors import ForerunError, InvalidInput
from forerun.core.types import Event
from forerun.server.backends.thread import LocalBackend
from forerun.server.cluster.loads import Report
from forerun.server.settings import ClusterSettings


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

        from forerun.api.async_llm import AsyncLLM
        from forerun.api.llm import LLM
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
