"""RoundClock: seconds of a round by part, the same parts on a CPU and on a GPU.

prompt: reading prompts. draft: proposing trees. pass: the target's pass over them. verdict: laws, verification and
reading its result. host: planning, launching, committing and emitting. Together they are what the round took.

On a GPU work is only launched, and the host waits once, for the verdict. What it waited for, passes over prompts, a
draft, the pass, is known from events on the device (`Scores.seconds`) that have passed by then, and is booked where it
belongs; what the host spent launching a pass is its own.

Where a target runs passes of coming rounds in one call (`Scores.ahead`), each round is booked its share of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.trees import Seconds
    from forerun.types import Scores, TreeBatch


PARTS = ("prompt", "draft", "pass", "verdict", "host")


class RoundClock:
    """Seconds by part, lap by lap."""

    def __init__(
        self,
        launched: list[Seconds],
        now: Callable[[], float] = perf_counter,
        ahead: list[float] | None = None,
    ) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.started = self._last = now()
        self._launched, self._now = launched, now  # passes over prompts that were launched and not waited for
        self._ahead = [] if ahead is None else ahead  # seconds of passes that were run for rounds to come

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
            self.move(taken - waited, "host", "pass")  # the device was at work before the host waited
        elif _waits(scores):
            self.move(self.seconds["verdict"], "verdict", "pass")  # the wait for a device that is not timed
        if self._launched:
            for earlier in self._launched:
                self.move(earlier() or 0.0, "verdict", "prompt")
            self._launched.clear()
        if drafting := trees.drafting():
            moved = self.move(drafting, "verdict", "draft")  # drafted while the host did other work
            if trees.follows is not None:  # the device was never idle: the draft lies in this round's time
                self.move(drafting - moved, "host", "draft")
        if scores.read is not None and (rows := scores.read[0].nodes):
            self.move(self.seconds["pass"] * rows / (rows + trees.nodes), "pass", "prompt")

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
