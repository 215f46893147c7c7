"""Around: seconds of a round beside its pass, by form and size of batch, as rounds have shown them.

A round that was launched before the last one was read hides the host's work; one that was read first shows it. The
seconds of a form are those of rounds that followed, once there were any, and what other rounds take on top of them
is kept apart, as the gap. The few plain rounds that a process starts with may be the slowest it ever sees: forms that
did not run yet can also be judged by drafts that followed.

What a process does for the first time is slow, and so is a round in which the machine pauses. A gap is only seen when a
round is read first, so that one of these could keep it from ever being seen again: the gap is the median of the last
few, what is presumed being one of them until there are enough, and old ones are forgotten while none is seen. Plain
rounds are what all else is compared with, so that a slow one must not speak for them alone.

RoundSeconds: what rounds of one text take with all their parts, as they were seen, and not the pass alone.

A round that drafts takes the host longer, and ends a row of plain passes that run in one native call. Beside a pass of
4 ms that is as much as the pass over one more node. So a draft must promise more than its nodes cost, and what it has
lost is counted from the seconds of its round against those of plain rounds in a row, wherever they went.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median_low

from forerun.core.offer import PLAIN, Form, Offer
from forerun.core.types import Round

FORGIVEN_SHARE = 0.0005  # of what a form takes beyond another, per round in which it is not run for that
NEWEST = 0.1  # weight of the newest round in a moving average of seconds
GAPS_KEPT = 7  # the last ones, whose median counts
STALE_ROUNDS = 128  # rounds that were not read first for the gap, after which the oldest is forgotten
FIRST_PLAIN = 3  # plain rounds at the start that may be slow by chance: the quickest of them counts
PRESUMED_GAP = 5e-4  # seconds, before any was seen
MOST_PRESUMED = 0.25  # of a round: the same at most


class Around:
    """Drafting, verdict and the host's work."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[Form, int], float] = {}
        self._rounds: dict[tuple[Form, int], int] = {}
        self._follow: set[tuple[Form, int]] = set()  # of which rounds followed
        self._gaps: dict[int, deque[float]] = {}  # the last ones
        self._avoided: dict[int, int] = {}  # rounds that were not read first for them, since the last
        self._beside: dict[int, float] = {}  # of drafted rounds that followed, without their drafts

    def seconds(self, form: Form, batch: int, drafting: float, follows: bool = False) -> float:
        """What rounds took, else what drafting is said to take on top of a plain round.

        `follows`: on top of a drafted round that followed, if there were any.
        """
        group = batch.bit_length()
        known = self._seconds.get((form, group))
        if known is None:
            plain = self._seconds.get((PLAIN, group), 0.0)
            known = drafting + (self._beside.get(group, plain) if form.nodes and follows else plain)
        return known

    def gap(self, batch: int, presumed: float | None = None) -> float:
        """Seconds that a round takes longer if the one before it is read first; 0 = that was not seen yet."""
        seen = self._gaps.get(batch.bit_length())
        if not seen:
            return 0.0
        return median_low(seen if presumed is None or len(seen) == GAPS_KEPT else [presumed, *seen])

    def follows(self, form: Form, batch: int) -> bool:
        """Were there rounds of this form that followed?"""
        return (form, batch.bit_length()) in self._follow

    def is_known(self, form: Form, batch: int) -> bool:
        return (form, batch.bit_length()) in self._seconds

    def knows_plain(self, batch: int, usual: float) -> bool:
        """Is it known what plain rounds take beside their pass? One round says so if it is no more than is usual."""
        key = PLAIN, batch.bit_length()
        if key not in self._seconds:
            return False
        return self._seconds[key] <= usual or key in self._follow or self._rounds[key] >= FIRST_PLAIN

    def observe(
        self, form: Form, batch: int, seconds: float, expected: float, followed: bool = False, drafting: float = 0.0
    ) -> None:
        """Learn from a round, of which `drafting` is what its draft is said to take.

        A pause of the machine counts little: at most for three times what was expected.
        """
        key = form, batch.bit_length()
        if followed and key not in self._follow:
            self._follow.add(key)
            self._rounds[key] = 0  # those before it were read first
        elif not followed and key in self._follow:
            self._note_gap(batch.bit_length(), seconds, self._seconds[key])
            return
        elif not followed and form.nodes:
            seconds = max(0.0, seconds - self.gap(batch))
        rounds = self._rounds[key] = self._rounds.get(key, 0) + 1
        known = self._seconds.get(key, expected)
        if form.kind == "plain" and not followed and 1 < rounds <= FIRST_PLAIN:
            seconds = min(seconds, known)
        elif known and isfinite(known):  # a menu may say that a form is not ready
            seconds = known + (min(seconds, 3.0 * known) - known) * max(NEWEST, 1.0 / rounds)
        self._seconds[key] = seconds
        if followed and form.nodes and isfinite(drafting):
            self._beside[batch.bit_length()] = max(0.0, seconds - drafting)

    def _note_gap(self, group: int, seconds: float, known: float) -> None:
        self._gaps.setdefault(group, deque(maxlen=GAPS_KEPT)).append(max(0.0, seconds - known))
        self._avoided[group] = 0

    def avoid_gap(self, batch: int) -> None:
        """A round was not read first because of what that took: in time it is tried again."""
        group = batch.bit_length()
        if not (seen := self._gaps.get(group)):
            return
        self._avoided[group] += 1
        if self._avoided[group] >= STALE_ROUNDS:
            seen.popleft()
            self._avoided[group] = 0

    def lower(self, form: Form, batch: int, least: float) -> None:
        """A form that is not run any more for what it once took: in time it may have become cheaper."""
        key = form, batch.bit_length()
        if key in self._seconds:
            self._seconds[key] += FORGIVEN_SHARE * (min(least, self._seconds[key]) - self._seconds[key])


def presumed_gap(seconds: float) -> float:
    """The gap before any was seen, of rounds that take so long: the host's work, which the device does not change."""
    return min(PRESUMED_GAP, MOST_PRESUMED * seconds)


PRESUMED_SECONDS = 3e-4  # seconds that a round with a draft takes longer beside its pass, before any was seen
# plain rounds that are timed together: as many as run in one native call, of which the first is slow
IN_A_ROW = 4
MOST_TIMES = 2.0  # times what was expected: a pause of the machine counts for no more


class RoundSeconds:
    """Of sequences that are alone in their rounds."""

    def __init__(self) -> None:
        self.plain = 0.0  # of a plain round in a row of them; 0 = none was seen
        self._beside = 0.0  # of that, what is not the pass
        self._drafted = 0.0  # the same of rounds that drafted; 0 = none was seen
        # the same of rounds in which a drafter that costs was asked, less what that took itself
        self._asked = 0.0
        self._row, self._row_beside, self._rounds = 0.0, 0.0, 0  # plain rounds since the last that drafted

    @property
    def more(self) -> float:
        """Seconds that a round takes longer, beside its pass, if it drafts."""
        if not self.plain:
            return PRESUMED_SECONDS
        return max(0.0, self._drafted - self._beside) if self._drafted else PRESUMED_SECONDS

    def note_plain(self, seconds: Mapping[str, float]) -> None:
        total = sum(seconds.values())
        self._row += total
        self._row_beside += total - seconds["pass"]
        self._rounds += 1
        if self._rounds == IN_A_ROW:
            self.plain = _moved(self.plain, self._row / IN_A_ROW)
            self._beside = _moved(self._beside, self._row_beside / IN_A_ROW)
            self._end_row()

    def note(self, seconds: Mapping[str, float], expected: float, nodes: int, cost: float) -> float:
        """A round that drafted so many nodes: what they cost in plain rounds, the host's work included.

        Its pass was expected to take so long. `cost`: by the pass alone, which counts until plain rounds were seen.
        """
        if nodes:
            return self._note_drafted(seconds, expected, cost)
        self.note_plain(seconds)
        return cost

    def note_asked(self, seconds: Mapping[str, float]) -> float:
        """A round of a drafter that had to run: what the host took longer, in plain rounds, beside the draft itself."""
        self._end_row()
        host = sum(seconds.values()) - seconds["pass"] - seconds.get("draft", 0.0)
        self._asked = _moved(self._asked, host)
        return max(0.0, min(host, MOST_TIMES * self._asked) - self._beside) / self.plain if self.plain else 0.0

    def _end_row(self) -> None:
        self._row = self._row_beside = 0.0
        self._rounds = 0

    def _note_drafted(self, seconds: Mapping[str, float], expected: float, cost: float) -> float:
        self._end_row()
        total = sum(seconds.values())
        self._drafted = _moved(self._drafted or self._beside + PRESUMED_SECONDS, total - seconds["pass"])
        if not self.plain:
            return cost
        return min(total, MOST_TIMES * (expected + self._drafted)) / self.plain - 1.0


def drafting_seconds(outcome: Round, offers: Mapping[int, Offer], asked: Mapping[int, int]) -> float:
    """What the drafters that were asked so deep took; a pause of the machine is not charged to them."""
    most = 0.0
    for seq, depth in zip(outcome.seqs, outcome.depths, strict=True):
        if seq.id in asked:
            offer = offers[seq.id]
            levels = max(1, depth) if offer.stops else asked[seq.id]  # drafted, accepted or not
            most = max(most, offer.start + 2 * offer.until(levels + 1))
    return min(outcome.seconds.get("draft", most / 2), most)


def _moved(mean: float, value: float) -> float:
    """A moving average, which a pause of the machine moves little; 0 = nothing was seen."""
    return mean + NEWEST * (min(value, MOST_TIMES * mean) - mean) if mean else value
