"""Recovery: what an engine has under way, and how that is completed or undone where it was interrupted or failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from forerun.control.base import Controller
from forerun.engine.metrics import EngineStats
from forerun.engine.pending import Launched, Pending
from forerun.engine.queues import Queues
from forerun.engine.routing import DrafterPool
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Advance, SequenceState
from forerun.models.base import Target
from forerun.types import Event

log = logging.getLogger(__name__)


class Recovery(Queues):
    """The state of rounds; a change of it can be repeated where it was interrupted."""

    target: Target
    drafters: DrafterPool
    controller: Controller
    stats: EngineStats

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._pending: Pending | None = None
        self._ahead: Launched | None = None  # the next round
        self._following: Launched | None = None  # the one behind it
        self._unread: list[Event] = []  # of what was completed and not returned yet

    def _send_back(self, seq: SequenceState) -> None:
        self._roll_back([seq])
        self._pending = Pending(self.running)
        self.stats.preemptions += 1

    def _end(self, advance: Advance) -> None:
        """End a sequence, wherever it is."""
        self._pending = Pending([advance.seq], [advance])
        self._recover()

    def _recover(self) -> None:
        """Complete or undo a change of state that was interrupted. Can itself be interrupted, and repeated."""
        pending = self._pending
        if pending is None:
            return
        if pending.advances is None:
            self._roll_back(pending.members())
            return
        for advance in pending.advances:
            advance.seq.take(advance)
        self._complete(pending.advances)

    def _complete(self, advances: Sequence[Advance]) -> None:
        """After a round was written: free the sequences that have ended, and return their events."""
        unread, ended = self._unread.copy(), False
        for advance in advances:
            if advance.finished is not None:
                self._forget(advance.seq)
                ended = True
            if advance.event is not None:
                unread.append(advance.event)
        if ended:
            self.scheduler.drop_finished()
        self._unread, self._pending = unread, None

    def _roll_back(self, seqs: Sequence[SequenceState]) -> None:
        """Free what these sequences hold and queue them again, in front: their prompts now include what they wrote."""
        for seq in seqs:
            self._forget(seq)
        self.scheduler.queue_again(seqs)
        self._pending = self._ahead = self._following = None

    def _after_failure(self, error: Exception) -> None:
        """Try again with half as many at once; a sequence that fails twice, alone, ends with the error."""
        pending = self._pending
        if pending is None:
            raise error  # no round was under way: trying again would fail again
        self._following = None
        if pending.advances is not None:
            log.warning("a round was completed, but an observer of it failed: %r", error)
            self._recover()
            return
        seqs = pending.members()
        for seq in seqs:
            seq.note_failure()
        self._recover()
        self.scheduler.limit = max(1, len(seqs) // 2)
        if len(seqs) == 1 and seqs[0].failures > 1:
            self._end(seqs[0].ended("error", error))
        else:
            log.warning("a round of %d sequences failed and is repeated: %r", len(seqs), error)

    def _forget(self, seq: SequenceState) -> None:
        self.target.release(seq)
        self.drafters.forget(seq)
        self.controller.forget(seq)
