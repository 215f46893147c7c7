"""What is counted, per sequence and for the engine as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class SequenceStats:
    """Counts of one sequence, never changed but replaced. Tokens per round = committed tokens / target passes."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0  # nodes below the roots
    accepted: int = 0
    reached: list[int] = field(default_factory=list)  # [depth-1] rounds whose tree reached that depth
    kept: list[int] = field(default_factory=list)  # [depth-1] rounds whose path reached that depth
    seconds: float = 0.0  # of the engine's steps that it took part in, the one that read its prompt included
    prompt_seconds: float = 0.0  # of these, reading its prompt, beside those that were read with it

    def after(
        self, tokens: int, drafted: int, depth: int, accepted: int, seconds: float = 0.0
    ) -> SequenceStats:
        """One round more: what was committed, the tree's nodes and depth, the length of the path, and the time."""
        reached, kept = self.reached, self.kept
        if depth:
            reached, kept = _raised(reached, depth, depth), _raised(kept, depth, accepted)
        return SequenceStats(
            self.rounds + 1,
            self.tokens + tokens,
            self.drafted + drafted,
            self.accepted + accepted,
            reached,
            kept,
            self.seconds + seconds,
            self.prompt_seconds,
        )

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Of the rounds whose tree reached depth 1, 2, ...: the share whose path did."""
        return [kept / reached for kept, reached in zip(self.kept, self.reached, strict=True) if reached]


def _raised(counts: list[int], size: int, first: int) -> list[int]:
    """The first so many counts one higher, in a list of at least `size`."""
    padded = counts + [0] * (size - len(counts))
    return [*(count + 1 for count in padded[:first]), *padded[first:]]


@dataclass(slots=True)
class EngineStats:
    """Where the time went, in seconds, over all rounds."""

    rounds: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

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
        """Book so much of one part, as far as it has it, under another."""
        seconds = min(seconds, self.seconds[part])
        self.seconds[part] -= seconds
        self.seconds[other] += seconds
