"""Statistics: seconds and counts per round, per sequence and for the engine; a trace of all rounds; CPU time."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from forerun.core.clock import WALL, Clock
from forerun.core.errors import InvalidInput

if TYPE_CHECKING:
    from forerun.core.tree import Seconds
    from forerun.core.types import Round, Scores, TreeBatch


def captures_awaited(captures: int) -> str:
    """What to say of an engine that writes already, while so many graphs for one sequence are missing."""
    return f"ready; graphs for one sequence are still being captured ({captures} left)"


PARTS = ("prompt", "draft", "pass", "verdict", "host")


class RoundClock:
    """Seconds of a round by part, lap by lap: the same parts on a CPU and on a GPU, and together what the round took.

    prompt: prefill. draft: proposing trees. pass: the target's pass over them. verdict: laws, verification and reading
    the result. host: planning, launching, committing and emitting. On a GPU the host waits once, for the verdict; what
    it waited for is known from events on the device (`Scores.seconds`) and booked under its own part. A round that
    overlaps the one before it takes the device's time: only time in which the device was idle is the host's. Where
    a target runs the passes of several rounds in one call (`Scores.ahead`), each round is booked its share.
    """

    def __init__(
        self,
        launched: list[Seconds],
        now: Clock,
        ahead: list[float] | None = None,
        behind: RoundClock | None = None,
        awaited: bool = False,
    ) -> None:
        """`behind`: the clock of the round before, where this one begins as that ends; `awaited`: see `Abilities`."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last: float = now() if behind is None else behind._last
        self.started = self._last
        self._awaited = awaited
        self._launched, self._now = launched, now  # passes over prompts that were launched and not waited for
        self._to_come = [] if ahead is None else ahead  # seconds of passes that were run for rounds to come
        self._owed: list[tuple[float, str]] = []  # seconds of a device at work, beyond what was booked so far
        self._prompt_share = 0.0  # of the pass

    @property
    def ahead(self) -> int:
        """Passes that were run for rounds to come."""
        return len(self._to_come)

    def lap(self, part: str) -> None:
        """Book the time since the last lap under a part."""
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now

    def move(self, seconds: float, part: str, other: str) -> float:
        """Move `seconds` from one part to another, at most what `part` has; returns how many were moved."""
        seconds = min(seconds, self.seconds[part])
        self.seconds[part] -= seconds
        self.seconds[other] += seconds
        return seconds

    def settle(self, trees: TreeBatch, scores: Scores) -> None:
        """The verdict was read: book what the host waited for."""
        if scores.ahead or self._to_come:
            self._share_passes(scores.ahead, scores.own)
        taken = None if scores.seconds is None else scores.seconds()
        if taken is not None:
            self.move(self.seconds["pass"], "pass", "host")
            waited = self.move(taken, "verdict", "pass")
            waited += self.move(taken - waited, "host", "pass")  # the device was at work before the host waited
            self._owed.append((taken - waited, "pass"))
        elif self._awaited and scores.logits is not None and (scores.greedy is None or scores.greedy.argmax is None):
            self.move(self.seconds["verdict"], "verdict", "pass")  # the wait for a device that is not timed
        if self._launched:
            for earlier in self._launched:
                self.move(earlier() or 0.0, "verdict", "prompt")
            self._launched.clear()
        if drafting := trees.draft_seconds:
            moved = self.move(drafting, "verdict", "draft")  # drafted while the host did other work
            if trees.follows is not None:  # the device was never idle: the draft lies in this round's time
                moved += self.move(drafting - moved, "host", "draft")
                self._owed.append((drafting - moved, "draft"))
        if trees.follows is None:
            self._owed.clear()
        if scores.read is not None and (rows := scores.read[0].nodes):
            self._prompt_share = rows / (rows + trees.nodes)
            self.move(self.seconds["pass"] * self._prompt_share, "pass", "prompt")

    def end(self) -> None:
        """The round was written: what the host did since, it did beside the device where a round follows another."""
        self.lap("host")
        for seconds, part in self._owed:
            moved = self.move(seconds, "host", part)
            if part == "pass":
                self.move(moved * self._prompt_share, "pass", "prompt")

    def _share_passes(self, ahead: int, own: float) -> None:
        """Book rounds whose passes were run in one call their shares of it; the host, what was run in vain."""
        if ahead < 0 and self._to_come:
            self._charge("pass", self._to_come.pop())
            return
        if self._to_come:
            self._charge("host", sum(self._to_come))
            self._to_come.clear()
        if ahead > 0:
            each = self.seconds["pass"] * (1.0 - own) / ahead
            self._to_come += [each] * ahead
            self._charge("pass", -each * ahead)

    def _charge(self, part: str, seconds: float) -> None:
        """As if the round had begun so much earlier."""
        self.seconds[part] += seconds
        self.started -= seconds


Form = Literal["plain", "chain", "tree"]
TRACKS = {"rounds": 1, **{part: 2 + i for i, part in enumerate(PARTS)}}


class RoundCounts(NamedTuple):
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
    seconds: float = 0.0  # of the engine's steps that it took part in, prefill included
    prompt_seconds: float = 0.0  # of these seconds, prefill of its prompt and of prompts in the same passes

    @classmethod
    def of(cls, rounds: Sequence[RoundCounts], prompt_seconds: float = 0.0) -> SequenceStats:
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


class Trace:
    """Every round as a JSON file for chrome://tracing or ui.perfetto.dev.

    One track has the rounds, with their batch, draft and accepted tokens; one track per part has the time of each
    round in it. On a GPU parts overlap; they are drawn one behind the other, as they are booked, and add up to the
    round. Events are written as they come: the file is readable at any time, and complete JSON once it is closed.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._file: TextIO | None = file.open("w", encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot write the trace {str(file)!r}: {error.strerror}; choose another file") from None
        self._first: float | None = None
        self._ended = float("-inf")  # the last round
        self._rounds = 0
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
            for name, track in TRACKS.items()
        ]
        self._file.write("[\n" + ",\n".join(json.dumps(one) for one in names))

    def add_round(self, started: float, seconds: Mapping[str, float], outcome: Round, tokens: int) -> None:
        """A round that began then, and what it spent by part."""
        self._rounds += 1
        drafted = {
            "batch": len(outcome.seqs), "nodes": sum(outcome.drafted), "most_nodes": max(outcome.drafted),
            "depth": max(outcome.depths), "accepted": sum(outcome.accepted), "tokens": tokens,
            "prompt_rows": outcome.prompt_rows,
        }  # fmt: skip
        # rounds whose passes were run ahead in one call each have their share of it: none begins before the last ends
        started = max(started, self._ended)
        self._ended = started + sum(seconds.values())
        self._add("rounds", f"round {self._rounds}", started, sum(seconds.values()), drafted)
        at = started
        for part in PARTS:
            if seconds[part] > 0.0:
                self._add(part, part, at, seconds[part], {"round": self._rounds})
            at += seconds[part]

    def add_prompts(self, started: float, seconds: float, rows: int) -> None:
        """A pass over prompts alone; on a GPU its launch, while the pass itself is shown with the next round."""
        self._add("prompt", "prompts", started, seconds, {"prompt_rows": rows})

    def close(self) -> None:
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None

    def _add(self, track: str, name: str, started: float, seconds: float, args: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        self._first = started if self._first is None else self._first
        event = {
            "name": name, "ph": "X", "pid": 1, "tid": TRACKS[track], "args": args,
            "ts": round(1e6 * (started - self._first), 3), "dur": round(1e6 * seconds, 3),
        }  # fmt: skip
        self._file.write(",\n" + json.dumps(event))


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
    # by LoRA adapter: rounds of single sequences, tokens, drafted and accepted ones
    adapters: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    trace: Trace | None = None  # where to write every round
    by_round: list[Mapping[str, float]] | None = None  # seconds of each round by part, while somebody asks for them
    now: Clock = WALL  # the target's clock, which all rounds are timed by
    awaited: bool = False  # does who reads a verdict wait for the target's pass?
    # passes over prompts that no round has waited for yet
    _launched: list[Seconds] = field(default_factory=list)
    _to_come: list[float] = field(default_factory=list)  # seconds of passes that were run for rounds to come

    def count_prompt(self, tokens: int, reused: int) -> None:
        self.read += tokens
        self.reused += reused

    def clock(self, behind: RoundClock | None = None) -> RoundClock:
        """The clock of a round, or of a pass over prompts, that starts now, or when the round before it ended."""
        return RoundClock(self._launched, self.now, self._to_come, behind, self.awaited)

    def count(self, outcome: Round, tokens: int, clock: RoundClock) -> None:
        self.rounds += 1
        self.tokens += tokens
        if any(outcome.drafted):
            each = Counter(zip(outcome.drafted, outcome.depths, outcome.accepted, strict=True))
            for counts, sequences in each.items():  # in a large batch many are alike
                self._add_drafts(sequences, *counts)
        else:
            self.forms["plain"] = self.forms.get("plain", 0) + len(outcome.drafted)
        self._add(clock)
        if self.by_round is not None:
            self.by_round.append(dict(clock.seconds))
        if self.trace is not None:
            self.trace.add_round(clock.started, clock.seconds, outcome, tokens)

    def count_adapter(self, name: str, counts: RoundCounts) -> None:
        """One sequence with this adapter has had a round."""
        rounds, tokens, drafted, accepted = self.adapters.get(name, (0, 0, 0, 0))
        more = tokens + counts.tokens, drafted + counts.drafted, accepted + counts.accepted
        self.adapters[name] = rounds + 1, *more

    def count_prompts(self, scores: Scores, rows: int, clock: RoundClock) -> None:
        """A pass over prompts alone was launched; what it takes on a device shows in the next round."""
        clock.lap("prompt")
        if scores.seconds is not None:
            self._launched.append(scores.seconds)
        self._add(clock)
        if self.trace is not None:
            self.trace.add_prompts(clock.started, clock.seconds["prompt"], rows)

    def _add_drafts(self, sequences: int, drafted: int, depth: int, accepted: int) -> None:
        """What a round came to for each of `sequences` sequences."""
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


def seconds_of(thread: Thread) -> float:
    """CPU time of a thread so far; 0 once it has ended, or where the system does not say."""
    if thread.ident is None or not thread.is_alive():
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except (AttributeError, OSError):
        return 0.0
