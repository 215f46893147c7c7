"""FixedController: the same budget for every sequence and round."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import ControlParts
from forerun.core.request import ALWAYS as ALWAYS
from forerun.core.request import Budget
from forerun.core.request import budget_of as budget_of
from forerun.core.types import Round, Seq

NODES = 8  # drafted every round, where no number was set


class FixedController:
    """Always the same."""

    def __init__(self, nodes: int, width: int = 1) -> None:
        self.budget = budget_of(nodes, width)

    @classmethod
    def build(cls, parts: ControlParts) -> FixedController:
        return cls(NODES if parts.nodes is None else parts.nodes, parts.width or 1)

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        return [self.budget] * len(seqs)

    def observe(self, outcome: Round) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass
