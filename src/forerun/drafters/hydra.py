"""Hydra heads: each guesses one position further, from the last hidden row and the guesses before it.

Head k reads the hidden row, the embedding of the root and those of the k - 1 tokens drafted on the way, side by
side; one wide block and a few residual ones, then an LM head that all heads share. No attention, so a draft costs
a few small products per level, and unlike Medusa's the guesses fit each other: the tree is dynamic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.base import Parts
from forerun.drafters.growth import grow_trees, lay_out
from forerun.drafters.heads import Calibration, Meter, Rows, is_ready, observe_rows, wants_sampling
from forerun.drafters.medusa import HeadSet, load_heads
from forerun.drafters.sampled import sample_chains
from forerun.quotes import Quote
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict


class HydraDrafter:
    """Heads that see what was drafted before them."""

    needs = Needs((-1,))

    def __init__(self, heads: HeadSet, *, sampled: bool = False) -> None:
        self.heads, self.sampled = heads, sampled
        self._texts: dict[int, Rows] = {}
        self._meter = Meter()

    @classmethod
    def build(cls, parts: Parts) -> HydraDrafter:
        heads = load_heads(parts.speculative.draft_model, parts.target, "hydra")
        return cls(heads, sampled=wants_sampling(parts.speculative))

    @property
    def cost(self) -> float:
        return self._meter.seconds

    def quote(self, seq: Seq) -> Quote:
        """A level of heads; a millisecond until the first draft has shown better."""
        return Quote(self.cost or 1e-3, chosen=not self.sampled)

    @torch.no_grad()
    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        rows, laws = [[-1] for _ in seqs], list[Tensor]()
        live = [b for b, seq in enumerate(seqs) if is_ready(self._texts.get(seq.id), seq, budgets[b])]
        if live:
            self._meter.start()
            some, most = [seqs[b] for b in live], self.heads.config.count
            wishes = [_within(budgets[b], most) for b in live]
            steps = _Walk(self.heads, [self._texts[seq.id].features[0] for seq in some], some)
            vocabulary = self.heads.vocabulary
            if self.sampled:
                grown, their_rows, laws = sample_chains(steps, some, wishes, vocabulary)
                for b, theirs in zip(live, their_rows, strict=True):
                    rows[b] = theirs
            else:
                grown = grow_trees(steps, some, wishes, vocabulary, Calibration())
            for b, tree in zip(live, grown, strict=True):
                trees[b] = tree
            self._meter.stop(steps.levels)
        return lay_out(trees, rows, laws)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        observe_rows(self._texts, (-1,), seqs, trees, scores, verdict)
        for seq in seqs:  # only the last row counts
            text = self._texts[seq.id]
            if text.features:
                text.features, text.tokens = [text.features[-1][-1:].clone()], []

    def forget(self, seq: Seq) -> None:
        self._texts.pop(seq.id, None)


class _Walk:
    """The draft of one batch: what each frontier node's head reads, side by side."""

    def __init__(self, heads: HeadSet, hidden: Sequence[Tensor], seqs: Sequence[Seq]) -> None:
        self.heads, self.levels = heads, 1
        self._hidden = torch.cat(list(hidden)).to(heads.dtype)[:, None]  # [B, 1, D]
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
    return Budget(budget.nodes, min(budget.depth, levels), budget.width, budget.price, budget.level)
