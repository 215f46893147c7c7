"""Placing: where the rows of a pass go, behind committed tokens or behind a round that the host has not read.

Behind an unread plain round every sequence is one token longer. Behind unread trees only the device knows how much
longer: it adds root and path to the lengths that the host sends (grown.py for trees, `complete_roots` for lone roots).
The host sees to it that there are pages for as much as could be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.types import Seq, TreeForm, Verdict
from forerun.models.cuda.grown import Place
from forerun.models.cuda.last_round import LastRound
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import Root, Size, splits_at
from forerun.models.paged import Extent, PagedKV
from forerun.models.pages import PAGE, TREE_MARGIN


@dataclass(slots=True, eq=False)
class TreesPass:
    """A pass over grown trees that was launched."""

    form: TreeForm
    read: Callable[[], Verdict]  # waits for it
    verdict: Verdict | None = None  # once it was read

    def decided(self) -> Verdict:
        if self.verdict is None:
            self.verdict = self.read()
        return self.verdict


class Placing:
    """Places of trees and roots, and what the last pass was."""

    def __init__(self, kv: PagedKV, extent_for: Callable[[Seq, int], Extent]) -> None:
        self.kv, self._extent_for = kv, extent_for
        self.last: TreesPass | None = None  # the last pass that was launched, if that was over grown trees

    @property
    def added(self) -> int:
        """Positions that the last pass adds to a sequence, at most."""
        return 1 if self.last is None else self.last.form.depth + 1

    def places(self, seqs: Sequence[Seq], follows: Sequence[int] | None, form: TreeForm) -> list[Place]:
        """Of trees: of each the pages, the length that is known, and the tree or root that it follows."""
        extents, held = self.kv.extents([seq.id for seq in seqs]), self.kv.pool.held
        behind = [-1] * len(seqs) if follows is None else follows
        for seq, extent, tree in zip(seqs, extents, behind, strict=True):
            nodes = form.nodes + (self.added if tree >= 0 else 0)
            if nodes > TREE_MARGIN or extent.length + extent.coming + nodes > extent.writable:
                self._extent_for(seq, nodes)
        places = zip(extents, behind, strict=True)
        return [Place(held[one.id], one.length + one.coming, tree) for one, tree in places]

    def roots(self, seqs: Sequence[Seq], tokens: Sequence[int], follows: Sequence[int]) -> list[Root]:
        """One row per sequence; a token below 0 names a row or a tree of the last pass, -1 the first.

        Behind trees the length is the one before them.
        """
        extents, held = self.kv.extents([seq.id for seq in seqs]), self.kv.pool.held
        known, added = int(self.last is None), self.added
        lengths = [
            one.length + one.coming + (known if row >= 0 else 0)
            for one, row in zip(extents, follows, strict=True)
        ]
        for extent, row in zip(extents, follows, strict=True):
            end = extent.length + extent.coming + (added if row >= 0 else 0) + 1
            if end > extent.writable:
                self.kv.grow(extent.id, end)
        heads = [-1 - row if row >= 0 else token for token, row in zip(tokens, follows, strict=True)]
        return [(head, held[one.id], at) for head, one, at in zip(heads, extents, lengths, strict=True)]


def complete_roots(ints: Tensor, size: Size, rows: int, last: LastRound) -> None:
    """Lone roots behind trees that were not read: the token, the position and what follows from it, on the device."""
    run = Run.of(size, ints)
    tokens, positions, slots, groups = (
        run.tokens[:rows],
        run.positions[:rows],
        run.slots[:rows],
        run.groups[:rows],
    )
    follows, trees = tokens < 0, (-1 - tokens).clamp(min=0).long()
    accepted = last.accepted[trees]
    found = last.tokens[trees].gather(1, accepted[:, None])[:, 0]
    tokens.copy_(torch.where(follows, found.int(), tokens))
    positions.add_(torch.where(follows, accepted.int() + 1, 0))
    slots.copy_(ints[(groups[:, 7] + positions // PAGE).long()] * PAGE + positions % PAGE)
    groups[:, 1] = splits_at(positions) + 1
    groups[:, 5] = positions
