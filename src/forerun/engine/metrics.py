"""Statistics: counts per round, per sequence and for the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from forerun.engine.round_clock import PARTS, RoundClock
from forerun.engine.trace import Trace

if TYPE_CHECKING:
    from forerun.trees import Seconds
    from forerun.types import Round, Scores

Form = Literal["plain", "chain", "tree"]


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
    """Counts of all rounds, and where the time went: what prompts and each part of all rounds took, in seconds.

    One thread writes; others may read at any time.
    """

    rounds: int = 0  # of the engine: each takes in all sequences that run
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    forms: dict[Form, int] = field(default_factory=dict)  # rounds of single sequences
    # [depth-1] of these, those whose tree reached that depth
    reached: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # [depth-1] those whose accepted path did
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    read: int = 0  # tokens of sequences that were prefilled
    reused: int = 0  # of these, tokens that were found in the prefix cache
    preemptions: int = 0  # sequences that gave their slots to others and were read again later
    trace: Trace | None = None  # where to write every round
    now: Callable[[], float] = perf_counter  # the clock of all rounds: a simulation counts its own time
    # passes over prompts that no round has waited for yet
    _launched: list[Seconds] = field(default_factory=list)
    _ahead: list[float] = field(default_factory=list)  # seconds of passes that were run for rounds to come

    def count_prompt(self, tokens: int, reused: int) -> None:
        self.read += tokens
        self.reused += reused

    def clock(self, behind: RoundClock | None = None) -> RoundClock:
        """The clock of a round, or of a pass over prompts, that starts now, or when the round before it ended."""
        return RoundClock(self._launched, self.now, self._ahead, behind)

    def count(self, outcome: Round, tokens: int, clock: RoundClock) -> None:
        """A round has ended."""
        self.rounds += 1
        self.tokens += tokens
        if any(outcome.drafted):
            each = Counter(zip(outcome.drafted, outcome.depths, outcome.accepted, strict=True))
            for counts, sequences in each.items():  # in a large batch many are alike
                self._add_drafts(sequences, *counts)
        else:
            self.forms["plain"] = self.forms.get("plain", 0) + len(outcome.drafted)
        self._add(clock)
        if self.trace is not None:
            self.trace.add_round(clock.started, clock.seconds, outcome, tokens)

    def count_prompts(self, scores: Scores, rows: int, clock: RoundClock) -> None:
        """A pass over prompts alone was launched; what it takes on a device shows in the next round."""
        clock.lap("prompt")
        if scores.seconds is not None:
            self._launched.append(scores.seconds)
        self._add(clock)
        if self.trace is not None:
            self.trace.add_prompts(clock.started, clock.seconds["prompt"], rows)

    def _add_drafts(self, sequences: int, drafted: int, depth: int, accepted: int) -> None:
        """What a round came to for each of so many sequences."""
        form = form_of(drafted, depth)
        self.drafted += sequences * drafted
        self.accepted += sequences * accepted
        self.forms[form] = self.forms.get(form, 0) + sequences
        if not depth:
            return
        missing = [0] * (depth - len(self.reached))
        self.kept += missing
        self.reached += missing
        for i in range(depth):
            self.reached[i] += sequences
        for i in range(accepted):
            self.kept[i] += sequences

    def _add(self, clock: RoundClock) -> None:
        for part, spent in clock.seconds.items():
            self.seconds[part] += spent


def form_of(drafted: int, depth: int) -> Form:
    """What a round puts to the target: the last token alone, a chain of drafted tokens, or a tree of them."""
    if not drafted:
        return "plain"
    return "chain" if drafted == depth else "tree"


@contextmanager
def traced(stats: EngineStats, file: Path | None) -> Iterator[None]:
    """Write every round of an engine to a file meanwhile; None = to none."""
    if file is None:
        yield
        return
    stats.trace = Trace(file)
    try:
        yield
    finally:
        stats.trace.close()
        stats.trace = None
