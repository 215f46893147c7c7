"""The seam of control: how much to draft, per sequence, per round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forerun.types import Budget, Round, Seq


class Controller(Protocol):
    """Plans budgets before anything is drawn, from what earlier rounds showed.

    It never sees the tokens of the round it plans, so it cannot bias them. 0 nodes = do not draft.
    """

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        """One budget per sequence that shares the coming pass."""
        ...

    def observe(self, outcome: Round) -> None:
        """What the round came to, and what it cost."""
        ...

    def forget(self, seq: Seq) -> None:
        """The sequence is finished."""
        ...
