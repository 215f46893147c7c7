"""UsualNodes: how many nodes each sequence drafts on average, which tells what others of a batch leave of a pass."""

from __future__ import annotations

from collections.abc import Iterable

NEWEST = 0.2  # weight of the last round in the average


class UsualNodes:
    """Averages by sequence."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}

    def note(self, seq_id: int, drafted: int) -> None:
        usual = self._usual.get(seq_id, 0.0)
        self._usual[seq_id] = usual + NEWEST * (drafted - usual)

    def rest(self, seq_id: int, rounds: int) -> None:
        """So many rounds in which it drafted nothing."""
        if seq_id in self._usual:
            self._usual[seq_id] *= (1.0 - NEWEST) ** rounds

    def beside(self, seq_ids: Iterable[int], batch: int) -> int:
        """What the others of a batch usually draft, in steps, so that few price lists are made."""
        if batch == 1:
            return 0
        usual = sum(self._usual.get(seq_id, 0.0) for seq_id in seq_ids)
        step = max(1, batch // 2)
        return step * round(usual * (batch - 1) / batch / step)

    def forget(self, seq_id: int) -> None:
        self._usual.pop(seq_id, None)
