"""What is counted, per sequence and for the engine as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceStats:
    """Counts of one sequence. Tokens per round = committed tokens / target passes, bonus included."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0  # nodes below the roots
    accepted: int = 0
    reached: list[int] = field(default_factory=list)  # [depth-1] rounds whose tree reached that depth
    kept: list[int] = field(default_factory=list)  # [depth-1] rounds whose path reached that depth

    def count(self, tokens: int, drafted: int, depth: int, accepted: int) -> None:
        """Add one round: what was committed, the tree's nodes and depth, and the length of the path."""
        self.rounds += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        for counts, length in ((self.reached, depth), (self.kept, accepted)):
            counts.extend([0] * (depth - len(counts)))
            for i in range(length):
                counts[i] += 1

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

    def count(self, tokens: int, seconds: dict[str, float]) -> None:
        self.rounds += 1
        self.tokens += tokens
        for part, spent in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + spent
