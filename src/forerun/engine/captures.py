"""CaptureTurns: when an engine captures the graphs that were left for later (`CapturesLater`).

While it is idle: one after another, and requests that come wait for one at most. Before a batch that somebody waits for
as a whole, if it takes long: all that the batch needs. Beside texts under way: one now and then, so that they take a
small share of the time; the texts go on without the drafts that need them. Where no thread runs an idle engine, all
that one sequence needs is captured before its first round. No capture lies in a round, so none is booked as drafting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from forerun.engine.stats import drafts_awaited
from forerun.models.base import CapturesLater, Target

log = logging.getLogger(__name__)
SHARE, FIRST_SHARE = 0.05, 0.25  # of the time of texts under way, at most; the latter while nothing can be drafted
WORTH_CAPTURES = 2048  # rounds of a batch that a caller waits for: seconds, as captures of one batch size take


class CaptureTurns:
    def __init__(self, target: Target, settle: Callable[[], None], now: Callable[[], float]) -> None:
        """`settle` finishes the rounds that were launched: captures run in the same buffers."""
        self._later = target.later if isinstance(target, CapturesLater) else None
        self._settle, self._now, self._due = settle, now, 0.0
        self.has_thread = False  # does somebody run the engine while it is idle?

    @property
    def waiting(self) -> int:
        """Captures that were left for later."""
        return 0 if self._later is None else len(self._later)

    @property
    def missing(self) -> int:
        """Of these, the captures for one sequence."""
        return 0 if self._later is None else self._later.left(1)

    def leave_to_thread(self) -> None:
        """A thread runs the engine from now on, until `has_thread` is taken back."""
        self.has_thread = True
        if self.missing:
            log.info("%s", drafts_awaited(self.missing))

    def when_idle(self) -> bool:
        """Make one; False = there is nothing to do now."""
        return self._later is not None and bool(len(self._later)) and self._one(None, waits=False)

    def before(self, batch: int) -> None:
        """Make all that a batch of this size needs, and wait for its kernels."""
        while self._later is not None and self._later.wants(batch):
            self._one(batch, waits=True)

    def up_to(self, batch: int) -> None:
        """Make all that batches up to this size need: of what is timed, the last texts are alone."""
        for size in range(1, batch + 1):
            self.before(size)

    def beside(self, batch: int) -> None:
        """Make one for a batch that is being written, if one is due."""
        if self._later is None or not len(self._later):
            return
        if not self.has_thread:
            self.before(1)
        if not batch:
            return
        if self._now() >= self._due and self._later.wants(batch, waits=False):
            self._one(batch, waits=False)

    def _one(self, batch: int | None, waits: bool) -> bool:
        assert self._later is not None, "asked before"
        self._settle()
        started, share = self._now(), FIRST_SHARE if self._later.is_first(batch) else SHARE
        made = self._later.next(batch, waits)
        ended = self._now()
        self._due = ended + (ended - started) / share
        return made
