"""The model behind a server: texts as they grow, how busy its engine is, and whether it still works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic, process_time, thread_time
from typing import Any

from forerun import registry
from forerun.async_llm import AsyncLLM
from forerun.completion import Completion
from forerun.engine.head_swap import HeadSwap
from forerun.engine.metrics import Form
from forerun.engine.progress import prompt_progress
from forerun.errors import ForerunError
from forerun.heads import heads_in_the_box
from forerun.models.base import ServedByProcesses
from forerun.models.load.tokenizer import Tokenizer
from forerun.types import Event

log = logging.getLogger(__name__)
CLOSING = 2.0  # seconds that a round may still take when its engine is to end


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing now, and what it has done since it was started."""

    running: int
    waiting: int
    used_slots: int
    cached_slots: int
    slots: int | None  # that there can be; None = no limit
    read: int  # tokens of prompts
    reused: int  # of these, found in the prefix cache
    preemptions: int
    rounds: int  # of the engine; `forms` has those of its sequences
    tokens: int
    drafted: int
    accepted: int
    forms: Mapping[Form, int]
    reached: Sequence[int]  # rounds of sequences whose draft reached depth 1, 2, ...
    kept: Sequence[int]  # of these, those whose accepted path did
    seconds: Mapping[str, float]  # by part of a round

    @property
    def sequence_rounds(self) -> int:
        return sum(self.forms.values())

    @property
    def accepted_per_position(self) -> list[float]:
        return [kept / reached for kept, reached in zip(self.kept, self.reached, strict=False) if reached]


class EngineHangs(ForerunError):
    """There was work, and the engine made no progress."""


class Backend:
    """An AsyncLLM, with what a server wants to know of it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self._engine = llm, llm.llm.engine
        self.tokenizer: Tokenizer = llm.llm.tokenizer
        self._seen, self._since, self._had_work = (-1, 0), monotonic(), False

    @property
    def vocab_size(self) -> int:
        return self._engine.target.vocab_size

    @property
    def max_length(self) -> int:
        return self._engine.max_length

    @property
    def has_encoder(self) -> bool:
        """Is a prompt what an encoder reads? Then it takes no room in the context of the text."""
        return self._engine.target.source_rules is not None

    @property
    def max_batch(self) -> int:
        return self._engine.max_batch

    @property
    def drafter(self) -> str:
        return self._engine.default_drafter

    @cached_property
    def drafters(self) -> list[str]:
        """What a request may name without a checkpoint of its own: the server's first."""
        plain = [spec.name for spec in registry.drafters.specs() if spec.needs == "nothing"]
        heads = [head.drafter for head in heads_in_the_box() if head.vocab_size in (None, self.vocab_size)]
        return list(dict.fromkeys([self.drafter, *heads, *plain]))

    def stream(self, prompt: tuple[int, ...], **options: Any) -> AsyncGenerator[Event | Completion]:
        return self._llm.stream(prompt, **options)

    def load(self) -> Load:
        engine = self._engine
        stats = engine.stats
        return Load(
            len(engine.running) + len(engine.reading), len(engine.waiting), engine.target.used_slots,
            engine.target.cached_slots, engine.target.slots, stats.read, stats.reused, stats.preemptions,
            stats.rounds, stats.tokens, stats.drafted, stats.accepted, dict(stats.forms), list(stats.reached),
            list(stats.kept), dict(stats.seconds),
        )  # fmt: skip

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, by thread; asked by the front's."""
        engine, front = self._llm.cpu_seconds, thread_time()
        return {"engine": engine, "front": front, "others": max(0.0, process_time() - engine - front)}

    @property
    def failure(self) -> BaseException | None:
        return self._llm.failure

    @property
    def problem(self) -> str | None:
        """Why the engine cannot answer; None while it can."""
        failure = self._llm.failure
        if failure is None:
            return self.lost_process
        said = str(failure) if isinstance(failure, EngineHangs) else type(failure).__name__
        return f"the engine ended: {said}"

    @property
    def lost_process(self) -> str | None:
        """Which of the processes that the model is split over has ended; None where all run, or there is but one."""
        target = self._engine.target
        return target.problem if isinstance(target, ServedByProcesses) else None

    def looks_hung(self, patience: float) -> bool:
        """Was there work, and neither a round nor a prompt that was read on, for so many seconds? Asked often."""
        now, has_work = (self._engine.stats.rounds, prompt_progress(self._engine)[0]), self._engine.busy
        if now != self._seen or not (has_work and self._had_work) or self.failure is not None:
            self._seen, self._since = now, monotonic()
        self._had_work = has_work
        return monotonic() - self._since > patience

    def give_up(self) -> None:
        """Whoever waits gets an error, and nobody else is served: the engine's thread cannot be ended from outside."""
        self._llm.fail(EngineHangs("the engine makes no progress; the request was given up"))

    async def swap_head(self, folder: Path) -> None:
        """Draft with the head in this folder from now on; raises, and changes nothing, where it cannot be used."""
        order = HeadSwap(folder)
        self._llm.llm.driver.post(order, at_once=False)
        while not order.done.is_set():
            await asyncio.sleep(0.005)
        order.raise_error()

    async def restart(self) -> bool:
        """Start a new engine thread where the old one has ended; False where it has not, and hangs."""
        if not await self._llm.close(CLOSING):
            return False
        for seq in [*self._engine.running, *self._engine.reading, *self._engine.waiting]:
            self._engine.abort(seq.id)
        self._llm = AsyncLLM(self._llm.llm, max_requests=self._llm.max_requests)
        return True

    async def close(self) -> None:
        """End its thread; one that hangs is left behind."""
        if not await self._llm.close(CLOSING):
            log.error("the engine hangs: its thread is left behind")
