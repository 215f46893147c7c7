"""The model behind a server: texts as they grow, how busy its engine is, and whether it still works."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

from forerun import registry
from forerun.async_llm import AsyncLLM
from forerun.completion import Completion
from forerun.heads import heads_in_the_box
from forerun.models.load.tokenizer import Tokenizer
from forerun.types import Event


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing now, and what it has done since it was started."""

    running: int
    waiting: int
    used_slots: int
    cached_slots: int
    read: int  # tokens of prompts
    reused: int  # of these, found in the prefix cache
    preemptions: int
    rounds: int
    tokens: int
    seconds: Mapping[str, float]  # by part of a round


class Backend:
    """An AsyncLLM, with what a server wants to know of it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self._engine = llm, llm.llm.engine
        self.tokenizer: Tokenizer = llm.llm.tokenizer
        self._seen, self._since = -1, monotonic()

    @property
    def vocab_size(self) -> int:
        return self._engine.target.vocab_size

    @property
    def max_length(self) -> int:
        return self._engine.max_length

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
            engine.target.cached_slots, stats.read, stats.reused, stats.preemptions, stats.rounds, stats.tokens,
            dict(stats.seconds),
        )  # fmt: skip

    def problem(self, patience: float) -> str | None:
        """Why the engine cannot answer: it has ended, or there was work and no round for so many seconds."""
        if self._llm.failure is not None:
            return f"the engine ended: {type(self._llm.failure).__name__}"
        rounds = self._engine.stats.rounds
        if rounds != self._seen or not self._engine.busy:
            self._seen, self._since = rounds, monotonic()
        elif monotonic() - self._since > patience:
            return f"there was work, and no round for {patience:.0f} s"
        return None

    async def restart(self) -> bool:
        """Start a new engine thread where the old one has ended; was there need?"""
        if self._llm.failure is None:
            return False
        await self._llm.close()
        for seq in [*self._engine.running, *self._engine.reading, *self._engine.waiting]:
            self._engine.abort(seq.id)
        self._llm = AsyncLLM(self._llm.llm, max_requests=self._llm.max_requests)
        return True

    async def close(self) -> None:
        await self._llm.close()
