"""RoundTimes: seconds of a round = pass + draft + around, where `around` is the host's work that nothing hides.

The pass is known by rows and batch (cost.py), the draft by drafter and shape. What else a round takes depends on its
kind, on the size of the batch, and on whether it was launched before the last one was read: then most of the host's
work is hidden. A kind that was not seen yet takes what other kinds take. Only pass and host are shared by drafters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.control.acceptance import DrafterState
from forerun.control.cost import CostModel
from forerun.core.offer import Form, Kind, Menu

PRIOR_ROUNDS = 3.0  # rounds that a less specific estimate counts for
NEWEST = 0.1  # weight of the last round at least
MOST_TIMES = 3.0  # of what is expected: a pause of the machine counts for no more
PRESUMED_GAP = 5e-4  # seconds that reading a round first takes, before any was seen
MOST_PRESUMED = 0.25  # of a plain pass: the same at most
LOOKUP_SECONDS = 3e-5  # of one look-up before any was timed
DRAFTED_SECONDS = 1e-4  # that a round of look-ups takes the host longer than a plain one, before any was timed


KINDS: tuple[Kind, ...] = ("trees", "lookup")


@dataclass(slots=True)
class Average:
    """A moving average that a pause moves little."""

    mean: float = 0.0
    seen: int = 0

    def add(self, value: float, expected: float) -> None:
        if expected > 0.0:
            value = min(value, MOST_TIMES * expected)
        self.seen += 1
        self.mean += max(NEWEST, 1.0 / self.seen) * (value - self.mean)

    def after(self, prior: float) -> float:
        return (self.mean * self.seen + PRIOR_ROUNDS * prior) / (self.seen + PRIOR_ROUNDS)


def bucket(batch: int) -> int:
    """Batches that take the host equally long."""
    return (batch - 1).bit_length()


@dataclass(slots=True)
class RoundTimes:
    """Of all drafters together, but for their drafts."""

    cost: CostModel
    follows: bool  # does the target launch rounds before the last one is read?
    _around: dict[tuple[Kind, bool, int], Average] = field(default_factory=dict)
    _drafts: dict[tuple[int, Form, int], Average] = field(default_factory=dict)
    _asking: Average = field(default_factory=Average)  # seconds of one look-up

    @property
    def asking(self) -> float:
        """Seconds of one look-up."""
        return self._asking.after(LOOKUP_SECONDS)

    def observe_asking(self, seconds: float) -> None:
        self._asking.add(seconds, self.asking)

    def plain(self, batch: int) -> float:
        """Seconds of a plain round in a row of them."""
        return self.cost.pass_seconds(batch, batch) + self.around("plain", self.follows, batch)

    def trees(self, drafter: DrafterState, menu: Menu, shape: Form, drafting: int, batch: int) -> float:
        """Seconds of a round of trees in a row of them; the others of the batch draft nothing."""
        rows = menu.rows(shape, drafting) + batch - drafting
        return (
            self.cost.pass_seconds(rows, batch)
            + self.draft(drafter, menu, shape, drafting)
            + self.around("trees", self.follows, batch)
        )

    def draft(self, drafter: DrafterState, menu: Menu, shape: Form, drafting: int) -> float:
        said = menu.seconds(shape, drafting)
        known = self._drafts.get((id(drafter), shape, bucket(drafting)))
        return said if known is None else said * known.after(1.0)

    def lookup(self, nodes: int, batch: int) -> float:
        """Seconds of a round that drafts so many nodes from look-ups; it is read first."""
        return self.cost.pass_seconds(batch + nodes, batch) + self.around("lookup", False, batch)

    def gap(self, batch: int) -> float:
        """Seconds that a round takes longer if the last one is read first."""
        if not self.follows:
            return 0.0
        return max(0.0, self.around("plain", False, batch) - self.around("plain", True, batch))

    def around(self, kind: Kind, followed: bool, batch: int) -> float:
        """Seconds beside pass and draft."""
        known = self._around.get((kind, followed, bucket(batch)))
        if known is not None and known.seen > 2 * PRIOR_ROUNDS:
            return known.mean
        if kind == "lookup":
            prior = self.around("plain", False, batch) + DRAFTED_SECONDS
        elif kind != "plain":
            prior = self.around("plain", followed, batch)
        else:
            prior = self._presumed(followed, batch)
        return prior if known is None else known.after(prior)

    def _presumed(self, followed: bool, batch: int) -> float:
        """Of a plain round, by what other rounds showed."""
        group, kinds = bucket(batch), KINDS
        gap = min(PRESUMED_GAP, MOST_PRESUMED * self.cost.pass_seconds(batch, batch)) if self.follows else 0.0
        same = [one.mean for kind in kinds if (one := self._around.get((kind, followed, group))) is not None]
        if same:
            return min(same)
        other = self._around.get(("plain", not followed, group))
        if other is None:
            return 0.0 if followed else gap
        return max(0.0, other.mean - gap) if followed else other.mean + gap

    def observe(self, kind: Kind, followed: bool, batch: int, seconds: float) -> None:
        """A round took so much beside pass and draft."""
        known = self._around.setdefault((kind, followed, bucket(batch)), Average())
        known.add(seconds, self.around(kind, followed, batch))

    def observe_draft(self, drafter: DrafterState, menu: Menu, shape: Form, drafting: int, seconds: float) -> None:
        said = menu.seconds(shape, drafting)
        if 0.0 < said < float("inf"):
            self._drafts.setdefault((id(drafter), shape, bucket(drafting)), Average()).add(seconds / said, 1.0)
