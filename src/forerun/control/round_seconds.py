"""RoundSeconds: what rounds of one text take with all their parts, as they were seen, and not the pass alone.

A round that drafts takes the host longer, and ends a row of plain passes that run in one native call. Beside a pass of
4 ms that is as much as the pass over one more node. So a draft must promise more than its nodes cost, and what it has
lost is counted from the seconds of its round against those of plain rounds in a row, wherever they went.
"""

from __future__ import annotations

from collections.abc import Mapping

from forerun.core.offer import Offer
from forerun.core.types import Round

PRESUMED_SECONDS = 3e-4  # seconds that a round with a draft takes longer beside its pass, before any was seen
# plain rounds that are timed together: as many as run in one native call, of which the first is slow
IN_A_ROW = 4
NEWEST = 0.1  # weight of the last rounds in a moving average
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
