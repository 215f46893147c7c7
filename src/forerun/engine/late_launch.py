"""LateLaunch: how long the next round may wait for requests before it is launched behind the one under way.

A round that follows an unread one could be launched as soon as that one starts. But a client who has its answer asks
again a moment later, and whoever comes behind the launch waits for a whole round more. The device needs the next round
only when it has done the one under way: until shortly before that requests can still come. When that is, rounds of the
same kind without prompts have shown, by the device's own clock, the shortest of late counting: what is launched too
early costs a request a round, what is launched too late costs everybody. Where nobody has come or left for some rounds,
or the host was late itself, nothing waits.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.engine.engine import Engine
    from forerun.engine.pending import Launched
    from forerun.engine.sequence import SequenceState

SPARE = 1e-3  # seconds between the end of a launch and the end of the round before it, at least
LAUNCHES = 2.0  # times what launching takes on average, kept for the next launch
SMOOTH = 0.1  # weight of the last launch in that average
LONGER = 1.02  # from round to round, what the shortest is taken for
LATE = 2e-4  # seconds: a host that waits less for the device was late itself
QUIET = 16  # rounds without change, from which on nobody is waited for


class LateLaunch:
    """Learns from rounds when the next one must be launched."""

    def __init__(self) -> None:
        self._shortest: dict[Hashable, float] = {}  # seconds of rounds on the device, by kind
        self._launching = 0.0  # seconds of a launch
        self._began = 0.0  # when the round under way did
        self._kind: Hashable = None  # of that
        self._quiet = QUIET
        self._seqs: list[SequenceState] = []

    def note_launch(self, seconds: float) -> None:
        known = self._launching or seconds
        self._launching = known + SMOOTH * (seconds - known)

    def note_start(self, launched: Launched, now: float) -> None:
        """A round was launched behind nothing: it begins now, or later."""
        self._note_seqs(launched.seqs)
        self._began, self._kind = now, _kind_of(launched)

    def note_read(self, done: Launched, following: Launched | None, waited: float, now: float) -> None:
        """A round was read, for which the host waited so long: the one launched behind it begins, if there is one."""
        kind, scores = _kind_of(done), done.scores
        taken = None if scores.seconds is None else scores.seconds()
        if taken is not None and scores.read is None:
            taken += done.trees.drafting()
            self._shortest[kind] = min(taken, LONGER * self._shortest.get(kind, taken))
        self._kind = None
        if following is not None:
            self._note_seqs(following.seqs)
            if waited > LATE:  # else nobody knows when it began
                self._began, self._kind = now, _kind_of(following)

    def _note_seqs(self, seqs: list[SequenceState]) -> None:
        self._quiet = self._quiet + 1 if seqs == self._seqs else 0
        self._seqs = seqs

    def left(self, engine: Engine) -> float:
        """Seconds for which the next step of an engine may wait for requests; 0 or less = it should not."""
        shortest = None if self._kind is None else self._shortest.get(self._kind)
        if shortest is None or self._quiet >= QUIET:
            return 0.0
        if not (engine.follows_unread and engine.scheduler.has_places):
            return 0.0
        return self._began + shortest - SPARE - LAUNCHES * self._launching - engine.stats.now()


def _kind_of(one: Launched) -> Hashable:
    """Rounds of one kind take as long, but for prompts that they read."""
    return one.trees.form or len(one.seqs) // 8
