"""WholeDraft: a draft of one sequence in one native call, its new rows and all levels of its tree.

The struct of the call is filled once and changed in place: from one round to the next a few numbers differ.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import torch

from forerun.drafters.eagle.native_head import NativeHead
from forerun.drafters.head_drafter import Calibration
from forerun.drafters.tree_growth import Tree
from forerun.models.native.head_library import Draft, HeadPass, draft_tree
from forerun.types import Budget


@dataclass(frozen=True, slots=True)
class WholeDraft:
    """A tree, and what its levels took."""

    tree: Tree
    expected: float  # tokens of it that should be accepted
    levels: int
    first: float  # share of the first level in the seconds of all


@dataclass(slots=True)
class NewRows:
    """Rows that the head has not read: tokens, where their features lie, and room for their outputs [N, D]."""

    tokens: list[int]
    features: list[int]
    out: int
    base: int  # the sequence's first slot
    length: int  # rows that it has there already


class DraftCall:
    """The struct, and what it points to."""

    def __init__(self, head: NativeHead) -> None:
        self.head, self._draft = head, Draft(vocabulary=len(head.ids))
        self._ids = None if head.vocabulary.is_whole else head.int32_ids
        self._draft.ids = None if self._ids is None else self._ids.data_ptr()
        self._logits, self._tree = torch.empty(0), array("q")
        self._price: tuple[float, ...] | None = None
        self._prices = array("d")
        self._calibration: Calibration | None = None

    def run(
        self, like: HeadPass, rows: NewRows, root: int, budget: Budget, calibration: Calibration, scale: float
    ) -> WholeDraft:
        """Run the new rows and grow a tree within the budget, on the slots that `like` points to."""
        draft, width = self._draft, min(budget.width, budget.nodes)
        if width > len(self._logits):
            self._logits = torch.empty(width, len(self.head.ids))
            draft.logits = self._logits.data_ptr()
        if 2 * budget.nodes > len(self._tree):
            self._tree = array("q", [0] * (2 * budget.nodes))
            draft.tree = self._tree.buffer_info()[0]
        if budget.price is not self._price:
            self._price, self._prices = budget.price, array("d", budget.price or ())
            draft.price = None if budget.price is None else self._prices.buffer_info()[0]
            draft.prices = len(self._prices)
        if calibration is not self._calibration:
            self._calibration, draft.power = calibration, calibration.power
            draft.shift = math.log(calibration.scale)
        tokens, features = array("q", rows.tokens), array("Q", rows.features)
        draft.fresh, draft.tokens = len(tokens), tokens.buffer_info()[0]
        draft.features, draft.out = features.buffer_info()[0], rows.out
        draft.base, draft.length, draft.scale = rows.base, rows.length, scale
        draft.nodes, draft.depth, draft.width = budget.nodes, budget.depth, budget.width
        draft.frontier, draft.branch, draft.level = width, min(width, len(self.head.ids)), budget.level
        draft_tree(self.head.struct, like, draft)
        count, first = draft.count, draft.first
        below = self._tree[:count].tolist(), self._tree[budget.nodes : budget.nodes + count].tolist()
        tree = [root, *below[0]], [-1, *below[1]]
        return WholeDraft(tree, draft.expected, draft.levels, first / max(first + draft.further, 1e-9))
