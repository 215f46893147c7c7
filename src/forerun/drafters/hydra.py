"""HydraDrafter: heads that each draft one position further, from the last hidden row and the tokens before it.

Head k reads the hidden row, the embedding of the root and those of the k - 1 tokens drafted before, side by
side; one wide block and a few residual ones, then an LM head that all heads share. No attention, so a draft costs
a few small products per level, and unlike Medusa's the tokens fit each other: the tree is dynamic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.drafters.base import Parts
from forerun.drafters.head_drafter import Calibration, LastRowDrafter, is_drawn, wants_sampling
from forerun.drafters.medusa import HeadSet, load_heads
from forerun.drafters.tree_growth import grow_trees, lay_out
from forerun.drafters.tree_sampling import sample_trees
from forerun.types import Budget, Seq, TreeBatch


class HydraDrafter(LastRowDrafter):
    """Heads that see what was drafted before them."""

    def __init__(self, heads: HeadSet, *, sampled: bool = False) -> None:
        super().__init__()
        self.heads, self.sampled = heads, sampled

    @classmethod
    def build(cls, parts: Parts) -> HydraDrafter:
        heads = load_heads(parts.head_folder("hydra"), parts.target, "hydra")
        return cls(heads, sampled=wants_sampling(parts.speculative, parts.target.device))

    @torch.no_grad()
    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        rows, laws = [[-1] for _ in seqs], list[Tensor]()
        live, vocabulary = self._ready(seqs, budgets), self.heads.vocabulary
        for drawn in (False, True):
            which = [b for b in live if (self.sampled and is_drawn(seqs[b])) == drawn]
            if not which:
                continue
            self._meter.start()
            some = [seqs[b] for b in which]
            limits = [_within(budgets[b], self.heads.config.count) for b in which]
            steps = _HydraSteps(self.heads, self._last_rows(some, self.heads.dtype), some)
            if drawn:
                grown, came_from, laws = sample_trees(steps, some, limits, vocabulary)
            else:
                grown = grow_trees(steps, some, limits, vocabulary, Calibration())
                came_from = [[-1] * len(tree[0]) for tree in grown]
            for b, tree, sources in zip(which, grown, came_from, strict=True):
                trees[b], rows[b] = tree, sources
            self._meter.stop(steps.levels)
        return lay_out(trees, rows, laws)


class _HydraSteps:
    """The draft of one batch: what each frontier node's head reads, side by side."""

    def __init__(self, heads: HeadSet, hidden: Tensor, seqs: Sequence[Seq]) -> None:
        self.heads, self.levels = heads, 1
        self._hidden = hidden[:, None]  # [B, 1, D]
        roots = torch.tensor([[seq.tokens[-1]] for seq in seqs], device=heads.device)
        self._read = torch.cat((self._hidden, heads.embed(roots)), -1)  # [B, W, (1 + level) D]

    def first(self) -> Tensor:
        return self._logits()[:, 0]

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        along = self._read.gather(1, parents[:, :, None].expand(-1, -1, self._read.shape[-1]))
        self._read = torch.cat((along, self.heads.embed(tokens)), -1)
        self.levels += 1
        return self._logits()

    def _logits(self) -> Tensor:
        head, count, wide = self.levels - 1, *self._read.shape[:2]
        hidden = self._hidden.expand(-1, wide, -1).flatten(0, 1)
        row = self.heads.block(head, 0, self._read.flatten(0, 1), hidden)
        for j in range(1, self.heads.config.blocks):
            row = self.heads.block(head, j, row, row)
        return torch.unflatten(self.heads.logits(head, row), 0, (count, wide))


def _within(budget: Budget, levels: int) -> Budget:
    return replace(budget, depth=min(budget.depth, levels))
