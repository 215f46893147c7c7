"""Rest: when a drafter that reads the rows of every pass stops reading them, and when it tries again.

The likeliest tokens after every node lie on the device. To read them the host must wait for each pass, so no round can
be launched before the last one was read: on a GPU such rounds take about a quarter longer than plain ones that overlap.
A drafter that does not bring so much rests: it offers nothing (`NEVER`), so that rounds are plain and overlap, and it
learns from what was committed alone. It wakes for a few rounds now and then; while these bring nothing, rests double.

Greedy texts and sampled ones are told apart, because drafts of the latter are accepted far less often. What one text
has shown holds for the next.
"""

from __future__ import annotations

from forerun.core.types import Seq

BREAK_EVEN = 1.3  # tokens per round, below which plain rounds that overlap are faster
FIRST, TRIAL, MOST = 2.0, 1.5, 4.0  # tokens that may be lost: at the start, after a rest, and at most
SHORTEST, LONGEST = 32, 512  # rounds of a rest


class _State:
    __slots__ = ("credit", "left", "length")

    def __init__(self) -> None:
        self.credit, self.left, self.length = FIRST, 0, SHORTEST


class Rest:
    """Of all sequences of one drafter."""

    def __init__(self) -> None:
        self._states = {True: _State(), False: _State()}

    def holds(self, seq: Seq) -> bool:
        return self._states[seq.params.is_greedy].left > 0

    def note(self, seq: Seq, tokens: int) -> None:
        """A round of this sequence brought so many tokens."""
        state = self._states[seq.params.is_greedy]
        if state.left:
            state.left -= 1
            state.credit = TRIAL
            return
        state.credit = min(MOST, state.credit + tokens - BREAK_EVEN)
        if state.credit < 0:
            state.left, state.length = state.length, min(2 * state.length, LONGEST)
        elif state.credit == MOST:
            state.length = SHORTEST
