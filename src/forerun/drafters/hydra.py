"""HydraDrafter: heads that each draft one position further, from the last hidden row and the tokens before it.

Head k reads the hidden row, the embedding of the root and those of the k - 1 tokens drafted before, side by
side; one wide block and a few residual ones, then an LM head that all heads share. No attention, so a draft costs
a few small products per level, and unlike Medusa's the tokens fit each other: the tree is dynamic.

On a GPU all levels of a draft are one captured graph, and the host reads their candidates once. Drafts that are drawn,
or under a temperature or noise, run operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from forerun.drafters.base import Parts
from forerun.drafters.captured import MOST
from forerun.drafters.draft_law import DraftLaw
from forerun.drafters.head_drafter import Calibration, LastRowDrafter, is_drawn, wants_sampling
from forerun.drafters.medusa import HeadSet, load_heads
from forerun.drafters.tree_growth import Tree, cut_grown, grow_trees, lay_out
from forerun.drafters.tree_sampling import sample_trees
from forerun.types import Budget, Seq, TreeBatch

WIDTHS = (1, 2, 4, 8)  # of frontiers in captured drafts: the widest that a budget allows


class HydraDrafter(LastRowDrafter):
    """Heads that see what was drafted before them."""

    def __init__(self, heads: HeadSet, *, sampled: bool = False) -> None:
        super().__init__()
        self.heads, self.sampled = heads, sampled

    @classmethod
    def build(cls, parts: Parts) -> HydraDrafter:
        heads = load_heads(parts.head_folder("hydra"), parts.target, "hydra")
        drafter = cls(heads, sampled=wants_sampling(parts.speculative, parts.target.device))
        if parts.target.device.type == "cuda":
            drafter.capture(heads.any_row(), drafter.usual_budgets())
        return drafter

    def usual_budgets(self) -> list[Budget]:
        sizes = product(range(1, self.heads.config.count + 1), WIDTHS)
        return [Budget(depth * width, depth, width) for depth, width in sizes]

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
            captures, some = self._captures, [seqs[b] for b in which]
            limits = [_within(budgets[b], self.heads.config.count) for b in which]
            hidden = self._last_rows(some, self.heads.dtype)
            roots = torch.tensor([seq.tokens[-1] for seq in some], device=self.heads.device)
            steps = HydraSteps(self.heads, hidden, roots)
            if drawn:
                grown, came_from, laws = sample_trees(steps, some, limits, vocabulary)
            elif self._is_captured(some):
                grown, steps.levels = self._replayed(some, limits, hidden, roots)
            else:
                grown = grow_trees(steps, some, limits, vocabulary, Calibration())
            for i, b in enumerate(which):
                trees[b], rows[b] = grown[i], came_from[i] if drawn else [-1] * len(grown[i][0])
            self._stop_clock(steps.levels, captures)
        return lay_out(trees, rows, laws)

    def _is_captured(self, seqs: Sequence[Seq]) -> bool:
        if self._calls is None or len(seqs) > MOST:
            return False
        return not DraftLaw(seqs, self.heads.vocabulary, self.heads.device).changes

    def _replayed(
        self, seqs: Sequence[Seq], budgets: Sequence[Budget], hidden: Tensor, roots: Tensor
    ) -> tuple[list[Tree], int]:
        """Trees cut from what one graph has grown, and its levels."""
        assert self._calls is not None
        levels = max(budget.depth for budget in budgets)
        most = min(len(self.heads.vocabulary), max(min(budget.width, budget.nodes) for budget in budgets))
        width = max(some for some in WIDTHS if some <= most)
        scores, ints = self._calls.call(
            (len(seqs), levels, width),
            lambda rows, tokens: grow_all(self.heads, rows, tokens, levels, width),
            hidden,
            roots,
        )
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


def grow_all(heads: HeadSet, hidden: Tensor, roots: Tensor, levels: int, width: int) -> tuple[Tensor, Tensor]:
    """Candidates of all levels: log-survivals [B, N], and tokens and parents [2, B, N]; nothing is read on the way."""
    from forerun.drafters.eagle.cuda.tree_growth import Frontier, HeadOutput, Pool, grow_level

    count, output, steps = len(roots), HeadOutput(heads.vocabulary.ids), HydraSteps(heads, hidden, roots)
    pool, frontier = (
        Pool(count, width, width, levels, heads.device),
        Frontier.of_roots(count, heads.device),
    )
    logits = steps.first()
    for level in range(levels):
        wide = frontier.tokens.shape[1]
        frontier = grow_level(pool, frontier, logits.flatten(0, -2), output)
        if level + 1 < levels:
            firsts = torch.arange(0, count * wide, wide, device=heads.device)[:, None]
            logits = steps.after(frontier.parents.view(count, -1) - firsts, frontier.tokens)
    return pool.scores, torch.stack((pool.tokens, pool.parents))


def _within(budget: Budget, levels: int) -> Budget:
    return replace(budget, depth=min(budget.depth, levels))
