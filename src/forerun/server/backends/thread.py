"""An engine in this process as a server's Backend: on a thread of its own, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from time import process_time, thread_time
from typing import Any

from forerun.api.calls import as_token_list, make_request
from forerun.api.completion import Completion
from forerun.api.llm import LLM, AsyncLLM
from forerun.core.request import Event
from forerun.engine.driver import HeadSwap
from forerun.engine.engine import Engine
from forerun.models.base import ServedByProcesses
from forerun.server.backends.base import CLOSING, Backend, EngineHangs, Load, ProgressWatch, Restarted, why_ended

log = logging.getLogger(__name__)


def change_adapter(llm: LLM, name: str, folder: str | None) -> None:
    """Load an adapter, or unload it where no folder is given."""
    if folder is None:
        llm.unload_adapter(name)
    else:
        llm.load_adapter(name, folder)


def load_of(engine: Engine) -> Load:
    """What an engine is doing; any thread may ask."""
    stats = engine.stats
    return Load(
        len(engine.running) + len(engine.reading), len(engine.waiting), engine.target.used_slots,
        engine.target.cached_slots, engine.target.slots, stats.read, stats.reused, stats.preemptions,
        stats.rounds, stats.tokens, stats.drafted, stats.accepted, dict(stats.forms), list(stats.reached),
        list(stats.kept), dict(stats.seconds), engine.scheduler.aged, dict(stats.adapters),
        engine.captures.missing,
    )  # fmt: skip


def progress_of(engine: Engine) -> tuple[int, int]:
    """What changes whenever an engine gets on: rounds, and tokens of prompts that are cached."""
    return engine.stats.rounds, engine.scheduler.prefill_progress()[0]


def lost_process_of(engine: Engine) -> str | None:
    """Which of the processes that a model is split over has ended."""
    return engine.target.problem if isinstance(engine.target, ServedByProcesses) else None


class LocalBackend(Backend):
    """An AsyncLLM, with what a server wants to know of it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self._engine, self._progress = llm, llm.llm.engine, ProgressWatch()
        self._abandoned = False
        target = self._engine.target
        has_encoder = target.source_rules is not None
        super().__init__(llm.llm.tokenizer, target.vocab_size, self._engine.max_length, has_encoder)

    @property
    def max_batch(self) -> int:
        return self._engine.max_batch

    @property
    def drafter(self) -> str:
        return self._engine.default_drafter

    async def stream(
        self, prompt: tuple[int, ...], *, every_round: bool = True, **options: Any
    ) -> AsyncGenerator[Event | Completion]:
        request = make_request(prompt, None, options, as_token_list)
        async with aclosing(self._llm.items(request, every_round=every_round)) as items:
            async for item in items:
                yield item

    def load(self) -> Load:
        return load_of(self._engine)

    def cpu_seconds(self) -> dict[str, float]:
        engine, front = self._llm.cpu_seconds, thread_time()
        return {"engine": engine, "front": front, "others": max(0.0, process_time() - engine - front)}

    @property
    def failure(self) -> BaseException | None:
        return self._llm.failure

    @property
    def problem(self) -> str | None:
        return self.lost_process if self.failure is None else why_ended(self.failure)

    @property
    def lost_process(self) -> str | None:
        return lost_process_of(self._engine)

    def looks_hung(self, patience: float) -> bool:
        has_work = self._engine.busy and self.failure is None
        return self._progress.stands_still(progress_of(self._engine), has_work, patience)

    def give_up(self) -> None:
        """The engine's thread cannot be ended from outside."""
        self._llm.fail(EngineHangs())

    async def swap_head(self, folder: Path) -> None:
        order = HeadSwap(folder)
        self._llm.llm.driver.post(order, at_once=False)
        while not order.done.is_set():
            await asyncio.sleep(0.005)
        order.raise_error()

    async def change_adapter(self, name: str, folder: str | None) -> None:
        await asyncio.to_thread(change_adapter, self._llm.llm, name, folder)

    async def restart(self) -> Restarted:
        """Start a new engine thread where the old one has ended; one that hangs cannot be ended."""
        if not await self._llm.close(CLOSING):
            return "needs a new program"
        for seq in [*self._engine.running, *self._engine.reading, *self._engine.waiting]:
            self._engine.abort(seq.id)
        self._llm = AsyncLLM(self._llm.llm, max_requests=self._llm.max_requests)
        return "yes"

    async def close(self) -> None:
        """End its thread; one that hangs is left behind, and not waited for again: a server closes more than once."""
        if not self._abandoned and not await self._llm.close(CLOSING):
            self._abandoned = True
            log.error("the engine hangs: its thread is abandoned")
