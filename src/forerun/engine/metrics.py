"""Statistics: counts per round, per sequence and for the engine, and a stopwatch for the parts of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple


class RoundCounts(NamedTuple):
    """The counts of one round for one sequence."""

    tokens: int
    drafted: int  # nodes below the root
    depth: int  # of the deepest
    accepted: int
    seconds: float  # of the whole round


@dataclass(slots=True)
class SequenceStats:
    """Counts of one sequence. Tokens per round = committed tokens / target passes, bonus included."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0  # nodes below the roots
    accepted: int = 0
    reached: list[int] = field(default_factory=list)  # [depth-1] rounds whose tree reached that depth
    kept: list[int] = field(default_factory=list)  # [depth-1] rounds whose path reached that depth
    seconds: float = 0.0  # of the engine's steps that it took part in, those that read its prompt included
    prompt_seconds: float = 0.0  # of these, reading its prompt, beside those that were read with it

    @classmethod
    def of(cls, rounds: Sequence[RoundCounts], prompt_seconds: float = 0.0) -> SequenceStats:
        """Add up rounds."""
        depths = range(1, max((one.depth for one in rounds), default=0) + 1)
        return cls(
            len(rounds),
            sum(one.tokens for one in rounds),
            sum(one.drafted for one in rounds),
            sum(one.accepted for one in rounds),
            [sum(one.depth >= depth for one in rounds) for depth in depths],
            [sum(one.accepted >= depth for one in rounds) for depth in depths],
            prompt_seconds + sum(one.seconds for one in rounds),
            prompt_seconds,
        )

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Of the rounds whose tree reached depth 1, 2, ...: the share whose path did."""
        return [kept / reached for kept, reached in zip(self.kept, self.reached, strict=True) if reached]


@dataclass(slots=True)
class EngineStats:
    """Where the time went, in seconds, over all rounds."""

    rounds: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    read: int = 0  # tokens of sequences that were prefilled
    reused: int = 0  # of these, tokens that were found in the prefix cache
    preemptions: int = 0  # sequences that gave their slots to others and were read again later

    def count_prompt(self, tokens: int, reused: int) -> None:
        self.read += tokens
        self.reused += reused

    def count(self, tokens: int, seconds: dict[str, float]) -> None:
        self.rounds += 1
        self.tokens += tokens
        for part, spent in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + spent


class Stopwatch:
    """Seconds per part of a round."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now, self._last = now, now()

    def lap(self, part: str) -> None:
        """Book the time since the last lap under a name."""
        now = self._now()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def move(self, seconds: float, part: str, other: str) -> None:
        """Move so many seconds from one part to another, at most what it has."""
        seconds = min(seconds, self.seconds[part])
        self.seconds[part] -= seconds
        self.seconds[other] += seconds
