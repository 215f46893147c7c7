"""Dynamic trees (EAGLE-2): grows trees from a head's likeliest tokens, level by level, for a whole batch.

A head says how likely each token of its vocabulary is after every node of the frontier. Growing a tree from
that is the same for all heads: every frontier node proposes its likeliest children, the best of these by
cumulative confidence are the next frontier, and of all that were proposed the best n are kept,
connected because confidence never grows with depth; ties go to the smaller depth. The nodes are chosen, so the
tree may be cut where the head's own confidence says that more would not pay.

Only the few best of each node's tokens are needed, so the trees themselves are plain lists on the host: at the
sizes of a round that is cheaper than any tensor operation. Each sequence grows within its own budget,
independent of its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.drafters.draft_law import DraftLaw, likeliest
from forerun.drafters.head_drafter import Calibration
from forerun.drafters.tree_builder import best_count, worth_deepening
from forerun.drafters.vocab import DraftVocabulary
from forerun.types import Budget, Draws, Seq, TreeBatch

Tree = tuple[list[int], list[int]]  # tokens and parents, the root first
Frontier = list[tuple[int, int]]  # new nodes of one sequence: place of the parent in the last frontier, token
# of one sequence: log-probabilities and the target's ids, `count` a node
Ranked = tuple[list[float], list[int]]


class Steps(Protocol):
    """A head at work on one batch: logits after the roots, then after one frontier per level."""

    def first(self) -> Tensor:
        """[B, Vd] after the roots."""
        ...

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, Vd] after W new nodes each: their tokens [B, W], and their parents' places in the last frontier."""
        ...


class Ranks(Protocol):
    """The same head, asked only for the likeliest tokens, best first; frontiers may differ in size."""

    @property
    def size(self) -> int:
        """How many tokens there are to rank."""
        ...

    def roots(self, count: int) -> list[Ranked]: ...

    def below(self, frontiers: Sequence[Frontier], count: int) -> list[Ranked]: ...


class LogitRanks:
    """Ranks from logits; frontiers are padded to one width."""

    def __init__(self, steps: Steps, seqs: Sequence[Seq], vocabulary: DraftVocabulary) -> None:
        self._steps, self._seqs, self._vocabulary = steps, seqs, vocabulary
        self._level = 0
        self.size = len(vocabulary)

    def roots(self, count: int) -> list[Ranked]:
        return self._ranked(self._steps.first()[:, None], count)

    def below(self, frontiers: Sequence[Frontier], count: int) -> list[Ranked]:
        wide = max(map(len, frontiers))
        # [B, W, 2]
        padded = torch.tensor(
            [[*frontier, *[(0, 0)] * (wide - len(frontier))] for frontier in frontiers],
            device=self._vocabulary.ids.device,
        )
        self._level += 1
        return self._ranked(self._steps.after(padded[..., 0], padded[..., 1]), count)

    def _ranked(self, logits: Tensor, count: int) -> list[Ranked]:
        draft_law = DraftLaw(self._seqs, self._vocabulary, logits.device)
        values, rows = likeliest(draft_law.applied(logits, self._level), count)  # [B, W, k]
        tokens = self._vocabulary.ids[rows]
        return list(zip(values.flatten(1).tolist(), tokens.flatten(1).tolist(), strict=True))


def grow_trees(
    steps: Steps,
    seqs: Sequence[Seq],
    budgets: Sequence[Budget],
    vocabulary: DraftVocabulary,
    calibration: Calibration,
    rates: Sequence[Sequence[float]] | None = None,
) -> list[Tree]:
    """One tree of chosen tokens per sequence, from a head's logits."""
    return grow_ranked(LogitRanks(steps, seqs, vocabulary), seqs, budgets, calibration, rates)[0]


def grow_ranked(
    ranks: Ranks,
    seqs: Sequence[Seq],
    budgets: Sequence[Budget],
    calibration: Calibration,
    rates: Sequence[Sequence[float]] | None = None,
    after_first: Callable[[], None] = lambda: None,
) -> tuple[list[Tree], list[float]]:
    """One tree of chosen tokens per sequence, and how many of its tokens should be accepted.

    `rates` [levels][ranks] in place of confidences fixes its shape; `after_first` is called once the first level is
    known.
    """
    growths = [
        _Growth(seq.tokens[-1], budget, ranks.size, calibration, rates)
        for seq, budget in zip(seqs, budgets, strict=True)
    ]
    count = max(growth.branch for growth in growths)
    found = ranks.roots(count)
    after_first()
    while True:
        for growth, (values, tokens) in zip(growths, found, strict=True):
            growth.add_candidates(values, tokens, count)
        frontiers = [growth.next_frontier() for growth in growths]
        if not any(frontiers):
            return [growth.cut() for growth in growths], [growth.expected for growth in growths]
        found = ranks.below(frontiers, count)


class _Growth:
    """One sequence's tree: all candidates, level by level, so that parents precede children."""

    def __init__(
        self,
        root: int,
        budget: Budget,
        vocabulary: int,
        calibration: Calibration,
        rates: Sequence[Sequence[float]] | None,
    ) -> None:
        self._root, self._budget, self._calibration, self._rates = root, budget, calibration, rates
        self._width = min(budget.width, budget.nodes)
        ranks = vocabulary if rates is None else min(vocabulary, len(rates[0]))
        self.branch = min(self._width, ranks)  # candidates per node
        self._depth = budget.depth if rates is None else min(budget.depth, len(rates))
        self._scores: list[float] = []  # log of the survival
        self._tokens: list[int] = []
        self._parents: list[int] = []  # index into these lists; -1 = the root
        self._frontier = [-1]  # where the nodes are that are asked for children
        self._level = 0
        self._start = 0  # where the last level begins
        self.expected = 0.0  # tokens of the tree that should be accepted

    def add_candidates(self, values: list[float], tokens: list[int], count: int) -> None:
        """The likeliest children of the frontier, `count` of each node, of which the first `branch` are used."""
        if not self._frontier:
            return
        self._start, branch = len(self._scores), self.branch
        for i, place in enumerate(self._frontier):
            above = self._scores[place] if place >= 0 else 0.0
            low = i * count
            if self._rates is None:
                gains = self._calibration.log_confidences(values[low : low + branch])
            else:
                gains = [
                    math.log(rate) if rate > 0 else -math.inf for rate in self._rates[self._level][:branch]
                ]
            self._scores += [above + gain for gain in gains]
            self._tokens += tokens[low : low + branch]
            self._parents += [place] * branch
        self._level += 1

    def next_frontier(self) -> Frontier:
        """The best of the last level; none where the tree is deep enough or more would not pay."""
        if not self._frontier:
            return []
        last = range(self._start, len(self._scores))
        best = sorted(last, key=self._scores.__getitem__, reverse=True)[: self._width]
        self._frontier = self._worthy(best) if self._level < self._depth else []
        branch, start = self.branch, self._start
        return [((place - start) // branch, self._tokens[place]) for place in self._frontier]

    def _worthy(self, frontier: list[int]) -> list[int]:
        """Those below which nodes could still be worth their place in the pass, and their drafting."""
        price = self._budget.price
        if price is None:
            return frontier
        survivals = [math.exp(score) for score in sorted(self._scores, reverse=True)[: self._budget.nodes]]
        drafted = best_count(survivals, price)
        survivals = [math.exp(self._scores[place]) for place in frontier]
        return [frontier[i] for i in worth_deepening(survivals, drafted, price, self._budget.level)]

    def cut(self) -> Tree:
        """The best of all candidates: within the budget, and only while they pay."""
        budget, scores, parents = self._budget, self._scores, self._parents
        depths, children = {-1: 0}, {-1: 0}
        kept: list[int] = []
        for place in sorted(range(len(scores)), key=scores.__getitem__, reverse=True):  # ties: made first
            if len(kept) == budget.nodes:
                break
            parent = parents[place]
            depth = depths.get(parent, budget.depth) + 1  # a parent that was not taken has no depth
            if depth <= budget.depth and children[parent] < budget.width:
                children[parent] += 1
                depths[place], children[place] = depth, 0
                kept.append(place)
        if budget.price is not None:
            kept = kept[: best_count([math.exp(scores[place]) for place in kept], budget.price)]
        self.expected = sum(math.exp(scores[place]) for place in kept)
        kept.sort()  # parents were added before their children
        index = {-1: 0} | {place: i for i, place in enumerate(kept, start=1)}
        tokens = [self._root, *(self._tokens[place] for place in kept)]
        return tokens, [-1, *(index[parents[place]] for place in kept)]


def cut_grown(root: int, budget: Budget, scores: list[float], tokens: list[int], parents: list[int]) -> Tree:
    """The best of candidates that were grown elsewhere: log-survivals, tokens and parents, -1 = the root."""
    growth = _Growth(root, budget, len(tokens), Calibration(), None)
    growth._scores, growth._tokens, growth._parents = scores, tokens, parents
    return growth.cut()


def lay_out(
    trees: Sequence[Tree], rows: Sequence[Sequence[int]] = (), laws: Sequence[Tensor] = ()
) -> TreeBatch:
    """The batch that a proposal is; with laws where nodes were drawn."""
    drawn = None
    if laws:
        flat = torch.tensor([row for tree in rows for row in tree])
        drawn = Draws(torch.stack(list(laws)), flat, replace=False)
    return TreeBatch.trees(trees, drawn)
