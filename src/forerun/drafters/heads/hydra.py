"""HydraDrafter: heads that each draft one position further, from the last hidden row and the tokens before it.

Head k reads the hidden row, the embedding of the root and those of the k - 1 tokens drafted before, side by
side; one wide block and a few residual ones, then an LM head that all heads share. No attention, so a draft costs
a few small products per level, and unlike Medusa's the tokens fit each other: the tree is dynamic.

On a GPU all levels of a draft are one captured graph, and the host reads their candidates once. Drafts that are drawn
run operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.types import Budget, Seq, TreeBatch
from forerun.drafters.base import Parts
from forerun.drafters.heads.base import Calibration, is_drawn, wants_sampling
from forerun.drafters.heads.growth import Tree, cut_grown, grow_trees, lay_out, sample_trees
from forerun.drafters.heads.medusa import CapturedHeads, HeadSet, load_heads
from forerun.drafters.model.draft_law import Noised

WIDTHS = (1, 2, 4, 8)  # of frontiers in captured drafts: the widest that a budget allows


class HydraDrafter(CapturedHeads):
    """Heads that see what was drafted before them."""

    def __init__(self, heads: HeadSet, clock: Clock = WALL, *, sampled: bool = False) -> None:
        super().__init__(heads, clock)
        self.sampled = sampled

    @classmethod
    def build(cls, parts: Parts) -> HydraDrafter:
        heads = load_heads(parts.head_folder("hydra"), parts.target, "hydra")
        can = parts.target.can
        drafter = cls(heads, can.clock, sampled=wants_sampling(parts.speculative, can))
        if can.captures:
            drafter.capture(drafter.usual_budgets())
        return drafter

    def usual_budgets(self) -> list[Budget]:
        sizes = product(range(1, self.heads.config.count + 1), WIDTHS)
        return [Budget(depth * width, depth, width) for depth, width in sizes]

    @torch.no_grad()
    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        rows, laws = [[-1] for _ in seqs], list[Tensor]()
        live = self._ready(seqs, budgets)
        for drawn in (False, True):
            which = [b for b in live if (self.sampled and is_drawn(seqs[b])) == drawn]
            if not which:
                continue
            self._meter.start()
            captures, some = self.captures, [seqs[b] for b in which]
            limits = [_within(budgets[b], self.heads.config.count) for b in which]
            hidden = self._last_rows(some, self.heads.dtype)
            if not drawn:
                grown, levels = self._grow(some, limits, hidden)
                came_from = [[-1] * len(tree[0]) for tree in grown]
            else:
                steps = HydraSteps(self.heads, hidden, _roots(some, self.heads))
                grown, came_from, laws = sample_trees(steps, some, limits, self.heads.vocabulary)
                levels = steps.levels
            for b, tree, sources in zip(which, grown, came_from, strict=True):
                trees[b], rows[b] = tree, sources
            self._stop_clock(levels, captures)
        return lay_out(trees, rows, laws)

    def _grow(self, seqs: Sequence[Seq], budgets: Sequence[Budget], hidden: Tensor) -> tuple[list[Tree], int]:
        """Trees of chosen tokens, and levels that were run: where a graph is replayed, all of them."""
        heads = self.heads
        if not self._replays(seqs):
            steps = HydraSteps(heads, hidden, _roots(seqs, heads))
            return grow_trees(steps, seqs, budgets, heads.vocabulary, Calibration()), steps.levels
        levels = max(budget.depth for budget in budgets)
        most = min(len(heads.vocabulary), max(min(budget.width, budget.nodes) for budget in budgets))
        width = max(some for some in WIDTHS if some <= most)
        grow = partial(grow_all, heads, levels, width)
        scores, ints = self._replay(seqs, hidden, (levels, width), levels, grow)
        pools = zip(seqs, budgets, scores.tolist(), *ints.tolist(), strict=True)
        return [cut_grown(seq.tokens[-1], *pool) for seq, *pool in pools], levels


class HydraSteps:
    """The draft of one batch: what each frontier node's head reads, side by side."""

    def __init__(self, heads: HeadSet, hidden: Tensor, roots: Tensor) -> None:
        """Rows [B, D] and the tokens behind them [B]."""
        self.heads, self.levels = heads, 1
        self._hidden = hidden[:, None]  # [B, 1, D]
        self._read = torch.cat((self._hidden, heads.embed(roots[:, None])), -1)  # [B, W, (1 + level) D]

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


def grow_all(
    heads: HeadSet, levels: int, width: int, hidden: Tensor, roots: Tensor, noised: Noised
) -> tuple[Tensor, Tensor]:
    """Candidates of all levels: log-survivals [B, N], and tokens and parents [2, B, N]; nothing is read on the way."""
    from forerun.drafters.device.growth import Frontier, HeadOutput, Pool, grow_level

    count, output, steps = len(roots), HeadOutput(heads.vocabulary.ids), HydraSteps(heads, hidden, roots)
    by_kernels = heads.device.type == "cuda" and find_spec("triton") is not None
    pool, frontier = (Pool(count, width, width, levels, heads.device), Frontier.of_roots(count, heads.device))
    logits = steps.first()
    for level in range(levels):
        wide = frontier.tokens.shape[1]
        frontier = grow_level(pool, frontier, noised(logits.flatten(0, -2), level), output, fused=by_kernels)
        if level + 1 < levels:
            firsts = torch.arange(0, count * wide, wide, device=heads.device)[:, None]
            logits = steps.after(frontier.parents.view(count, -1) - firsts, frontier.tokens)
    return pool.scores, torch.stack((pool.tokens, pool.parents))


def _roots(seqs: Sequence[Seq], heads: HeadSet) -> Tensor:
    return torch.tensor([seq.tokens[-1] for seq in seqs], device=heads.device)


def _within(budget: Budget, levels: int) -> Budget:
    return replace(budget, depth=min(budget.depth, levels))
