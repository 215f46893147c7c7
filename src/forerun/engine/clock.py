"""RoundClock: seconds of a round by part, the same parts on a CPU and on a GPU.

prompt: prefill. draft:
proposing trees. pass: the target's pass over the trees. verdict: laws, verification and reading the result. host:
planning, launching, committing and emitting. Together the parts are what the round took. On a GPU work is only
launched, and the host waits once, for the verdict. What the host waited for (prefill, draft, pass) is known from
events on the device (`Scores.seconds`) and is booked under its own part; the time of launching a pass is the host's.
A round that overlaps the one before it takes the device's time: only the time in which the device was idle is the
host's. Where a target runs the passes of several rounds in one call (`Scores.ahead`), each round is booked its share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.core.clock import Clock
    from forerun.core.tree import Seconds
    from forerun.core.types import Scores, TreeBatch


PARTS = ("prompt", "draft", "pass", "verdict", "host")


class RoundClock:
    """Seconds by part, lap by lap."""

    def __init__(
        self, launched: list[Seconds], now: Clock, ahead: list[float] | None = None, behind: RoundClock | None = None
    ) -> None:
        """`behind`: the clock of the round before, where this one begins as that ends."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last: float = now() if behind is None else behind._last
        self.started = self._last
        self._launched, self._now = launched, now  # passes over prompts that were launched and not waited for
        self._ahead = [] if ahead is None else ahead  # seconds of passes that were run for rounds to come
        self._owed: list[tuple[float, str]] = []  # seconds of a device at work, beyond what was booked so far
        self._prompt_share = 0.0  # of the pass

    @property
    def ahead(self) -> int:
        """Passes that were run for rounds to come."""
        return len(self._ahead)

    def lap(self, part: str) -> None:
        """Book the time since the last lap under a part."""
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now

    def move(self, seconds: float, part: str, other: str) -> float:
        """Move so many seconds from one part to another, at most what it has; returns how many."""
        seconds = min(seconds, self.seconds[part])
        self.seconds[part] -= seconds
        self.seconds[other] += seconds
        return seconds

    def settle(self, trees: TreeBatch, scores: Scores) -> None:
        """The verdict was read: book what the host waited for."""
        if scores.ahead or self._ahead:
            self._share_ahead(scores.ahead, scores.own)
        taken = None if scores.seconds is None else scores.seconds()
        if taken is not None:
            self.move(self.seconds["pass"], "pass", "host")
            waited = self.move(taken, "verdict", "pass")
            waited += self.move(taken - waited, "host", "pass")  # the device was at work before the host waited
            self._owed.append((taken - waited, "pass"))
        elif _waits(scores):
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

    def _share_ahead(self, ahead: int, own: float) -> None:
        """Book rounds whose passes were run in one call their shares of it; the host, what was run in vain."""
        if ahead < 0 and self._ahead:
            self._charge("pass", self._ahead.pop())
            return
        if self._ahead:
            self._charge("host", sum(self._ahead))
            self._ahead.clear()
        if ahead > 0:
            each = self.seconds["pass"] * (1.0 - own) / ahead
            self._ahead += [each] * ahead
            self._charge("pass", -each * ahead)

    def _charge(self, part: str, seconds: float) -> None:
        """As if the round had begun so much earlier."""
        self.seconds[part] += seconds
        self.started -= seconds


def _waits(scores: Scores) -> bool:
    """Does reading the verdict wait for a device? Asking a tensor where it lies takes long, so it comes last."""
    if scores.greedy is not None and scores.greedy.argmax is not None:
        return False
    return scores.logits is not None and scores.logits.device.type != "cpu"
