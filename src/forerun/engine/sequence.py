"""One text being written: its tokens, its rules for ending, and what was counted on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.engine.detokenize import Detokenizer
from forerun.engine.metrics import SequenceStats
from forerun.params import SamplingParams
from forerun.types import FinishReason, Request


@dataclass(slots=True, eq=False)
class SequenceState:
    """The engine's own view of a request; others see it as `forerun.types.Seq`."""

    id: int
    request: Request
    seed: int
    max_length: int
    stop_ids: frozenset[int]
    drafter: str
    verifier: str
    shares_noise: bool
    detokenizer: Detokenizer
    tokens: list[int]
    prompt_length: int
    stats: SequenceStats = field(default_factory=SequenceStats)
    finished: FinishReason | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def room(self) -> int:
        """Tokens it may still write."""
        return self.max_length - len(self.tokens)

    def append(self, tokens: list[int]) -> int:
        """Take committed tokens up to the one that ends the text; returns how many were taken."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            self.finished = self._end_at(token)
            if self.finished:
                return count
        return len(tokens)

    def _end_at(self, token: int) -> FinishReason | None:
        written = len(self.tokens) - self.prompt_length
        may_stop = written >= self.params.min_tokens
        if may_stop and token in self.stop_ids:
            return "stop"
        if self.detokenizer.push(token, may_stop):
            return "stop"
        return "length" if self.room <= 0 else None
