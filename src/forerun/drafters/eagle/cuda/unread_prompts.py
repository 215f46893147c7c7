"""UnreadPrompts: rows of prompts that a head has not read, because nothing is drafted yet.

A head needs keys and values of a prompt only when it drafts behind it. While many requests wait for their first token
nothing is drafted, and they would wait for the head's reading too: so rows of prompts are kept as the target's pass has
left them, in copies that nobody overwrites, and read before the first draft of their sequence. Of each sequence they
are one span, in the order of its tokens. What a sequence has is dropped where it ends or is sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.row_reader import Fill, RowReader
from forerun.drafters.eagle.cuda.row_state import RowState
from forerun.models.cuda.plan import MAX_ROWS

MOST_UNREAD = 8 * MAX_ROWS  # rows of all sequences together: 0.2 GB of a target of 8B

Part = tuple[Sequence[Tensor], int, int]  # layers of a pass, and the rows of them from one to before another


@dataclass(slots=True)
class UnreadPrompt:
    """Rows of one sequence that follow each other."""

    state: RowState
    first: int  # position
    after: list[int] = field(default_factory=list)  # the token after each row
    parts: list[Part] = field(default_factory=list)


class UnreadPrompts:
    """What a head has not read, by sequence."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._unread: dict[int, UnreadPrompt] = {}

    @property
    def rows(self) -> int:
        """Of all sequences."""
        return sum(len(one.after) for one in self._unread.values())

    def rows_of(self, seq_id: int) -> int:
        one = self._unread.get(seq_id)
        return 0 if one is None else len(one.after)

    def add(self, state: RowState, first: int, after: Sequence[int], part: Part) -> None:
        """Rows of a sequence from a position on, behind those that it has here; too many of all are read at once."""
        one = self._unread.setdefault(state.seq_id, UnreadPrompt(state, first))
        assert one.first + len(one.after) == first, "rows of a prompt follow each other"
        one.after += after
        one.parts.append(part)
        if self.rows > MOST_UNREAD:
            self.read([each.state for each in self._unread.values()])

    def forget(self, seq_id: int) -> None:
        self._unread.pop(seq_id, None)

    def read(self, states: Sequence[RowState]) -> None:
        """Read what there is of these sequences."""
        if not self._unread:
            return
        wanted = {state.seq_id for state in states}
        some = [one for seq_id, one in self._unread.items() if seq_id in wanted]
        if some:
            fill = self._fill_from([part for one in some for part in one.parts])
            self._reader.read([one.state.span(one.first, one.after) for one in some], fill)
            self._unread = {seq_id: one for seq_id, one in self._unread.items() if seq_id not in wanted}

    def _fill_from(self, parts: Sequence[Part]) -> Fill:
        """Brings rows of these parts, laid end to end, to the reader."""
        parts = _joined(parts)

        def fill(low: int, count: int) -> None:
            start = 0  # of a part among all rows
            for layers, first, end in parts:
                begin, stop = max(low, start), min(low + count, start + end - first)
                if begin < stop:
                    rows = slice(first + begin - start, first + stop - start)
                    into = self._reader.passing[begin - low : stop - low]
                    torch.cat([layer[rows] for layer in layers], -1, out=into)
                start += end - first

        return fill


def _joined(parts: Sequence[Part]) -> list[Part]:
    """The same rows, with those that follow each other in a pass as one part: each is a copy of its own."""
    found = list[Part]()
    for layers, first, end in parts:
        if found and found[-1][0] is layers and found[-1][2] == first:
            found[-1] = layers, found[-1][1], end
        else:
            found.append((layers, first, end))
    return found
