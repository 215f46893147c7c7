"""Grows trees: by lists of what may follow each node, by a head's confidence (EAGLE-2), or by draws from its law.

Each node of chosen tokens carries its *survival*: the estimated probability that the whole path down to it is accepted.
It never grows with depth, so the best n nodes by survival are always connected, and 1 + the sum of their survivals is
the expected number of tokens of the round: to cut a tree to what pays is to count.

By confidence, level by level, for a whole batch: every frontier node proposes its likeliest children, the best of these
are the next frontier, and of all that were proposed the best n are kept; ties go to the smaller depth. Trees are plain
lists on the host: at the sizes of a round that is cheaper than any tensor operation.

The shape of a sampled tree is fixed before anything is drawn, because dropping drawn tokens would change their law. It
is the best one for how often the first, second, ... sibling is accepted where the ones before it were rejected.
Siblings are drawn without replacement, in index order; the verifier tests them with p/q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.core.noise import DRAFT, draw, uniform
from forerun.core.request import best_count
from forerun.core.types import Budget, Draws, Seq, TreeBatch
from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.model.draft_law import DraftLaw, likeliest
from forerun.verify.warp import warp_rows

Candidate = tuple[float, int, *tuple[Any, ...]]
"""Probability given the node above, token, and what else the drafter knows it by."""
# the likeliest first, and the probability that they leave to others
Candidates = tuple[Sequence[Candidate], float]
Ways = Callable[[Any], Candidates | None]  # what may follow a candidate's node; None = the text ends there


Size = tuple[int, int, int]  # of a tree: nodes below its root, levels, children of a node at most


class TextTable(NamedTuple):
    """What may follow a token, whatever else is known of the node; as far as that is trusted in one text."""

    factors: Sequence[float]  # of its probabilities: where nothing else may follow a node, and where something may
    after: Callable[[int], Sequence[Candidate]]


class BestTree(NamedTuple):
    tokens: list[int]
    parents: list[int]
    by_depth: list[float]  # how likely its nodes bring a path of depth 1, 2, ...
    nexts: list[int]  # tokens of the children of its root


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree whose nodes come in the order of their survivals; node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    survivals: list[float]  # of the nodes below the root
    depths: list[int]

    def cut(self, count: int) -> BestTree:
        pairs = zip(self.tokens[1 : count + 1], self.depths[1:], strict=False)
        nexts = [token for token, depth in pairs if depth == 1]
        return BestTree(self.tokens[: count + 1], self.parents[: count + 1], self.by_depth(count), nexts)

    def by_depth(self, count: int) -> list[float]:
        sums: list[float] = []
        for survival, depth in zip(self.survivals[:count], self.depths[1:], strict=False):
            if depth > len(sums):
                sums.append(0.0)
            sums[depth - 1] += survival
        return sums


def grow(root: int, first: Candidates, ways: Ways, more: TextTable | None, size: Size, least: float) -> Grown:
    """A tree of at most `size` (nodes below its root, levels, children of a node), down to survivals of `least`.

    Of each list of candidates only the best that is not yet in the tree waits: the others cannot come before it. What a
    table adds below a node is a list of its own, of which those that the node has already are passed over.
    """
    nodes, deepest, width = size
    tokens, parents, survivals, depths, children = [root], [-1], list[float](), [0], [0]
    waiting: list[tuple[float, int, int, int, float, Sequence[Candidate], tuple[int, ...]]] = []
    node, survival, found = 0, 1.0, first if deepest and nodes else None
    while True:
        if found is not None:
            own, left = found
            if own and (likely := survival * own[0][0]) > least:
                heappush(waiting, (-likely, 2 * node, node, 0, survival, own, ()))
            share = 0.0 if more is None else survival * left * more.factors[bool(own)]
            row = more.after(tokens[node]) if more is not None and share > least else ()
            if row and (likely := share * row[0][0]) > least:  # what is too unlikely need not wait
                known = tuple([one[1] for one in own])
                heappush(waiting, (-likely, 2 * node + 1, node, 0, share, row, known))
        if not waiting or len(survivals) >= nodes:
            break
        key, order, parent, rank, scale, some, known = heappop(waiting)
        survival, found = -key, None
        candidate, rank = some[rank], rank + 1
        if children[parent] >= width:
            continue
        if rank < len(some) and (likely := scale * some[rank][0]) > least:
            heappush(waiting, (-likely, order, parent, rank, scale, some, known))
        if candidate[1] in known:
            continue
        node = len(tokens)
        tokens.append(candidate[1])
        parents.append(parent)
        survivals.append(survival)
        depths.append(depths[parent] + 1)
        children[parent] += 1
        children.append(0)
        if depths[node] < deepest:
            found = ways(candidate)
    return Grown(tokens, parents, survivals, depths)


DEEPER = 0.9  # of what reaches a frontier, the share assumed to be accepted one level below
ROW = 0.2  # of a level of one row: what a further row adds to it, on a CPU
_AHEAD = (1, 2, 4, 8, 16)  # numbers of nodes that a further level may add


class TreeBuilder:
    """A tree under construction; node 0 is the root and certain."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.survivals = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, confidence: float) -> int:
        """The child of `parent` with this token, made if it is new; `confidence` is given the parent."""
        node = self._children.get((parent, token))
        if node is None:
            node = len(self.tokens)
            self._children[parent, token] = node
            self.tokens.append(token)
            self.parents.append(parent)
            self.survivals.append(self.survivals[parent] * min(max(confidence, 0.0), 1.0))
        return node

    def cut(self, nodes: int, price: Sequence[float] | None) -> tuple[list[int], list[int]]:
        """(tokens, parents) of the root and the best nodes below it: at most `nodes`, and only while it pays."""
        survivals = self.survivals  # as sorted keeps the order of equals, those made first come first
        order = sorted(range(1, len(self.tokens)), key=survivals.__getitem__, reverse=True)
        keep = order[: best_count([self.survivals[node] for node in order[:nodes]], price)]
        kept = [0, *sorted(keep)]  # parents were made before their children
        place = {node: i for i, node in enumerate(kept)}
        parents = [-1, *(place[self.parents[node]] for node in kept[1:])]
        return [self.tokens[node] for node in kept], parents


def worth_deepening(survivals: Sequence[float], drafted: int, price: Sequence[float], level: float) -> list[int]:
    """Which nodes of a frontier of these survivals to draft one more level below; none where that does not pay.

    So many nodes are there already. Of what reaches the frontier, some share is accepted one level deeper; each such
    node must pay for its place in the pass and its row in the level, and all of them together for the drafting of the
    level. Deeper levels may still pay where this one just does not: that is why the share is high.
    """
    last = min(drafted, len(price) - 1)
    ahead = [min(last + step, len(price) - 1) for step in _AHEAD]
    # the price may jump at first and be flat after: what counts is the best that several more nodes could do
    place = min([(price[n] - price[last]) / (n - last) for n in ahead if n > last], default=1.0)
    if sum([max(0.0, DEEPER * survival - place) for survival in survivals]) <= level:
        return []
    # no child survives more often than its parent
    least = min(place + ROW * level, max(survivals, default=0.0))
    return [i for i, survival in enumerate(survivals) if survival >= least]


@lru_cache(maxsize=64)
def best_tree(
    rates: tuple[tuple[float, ...], ...], nodes: int, depth: int, width: int
) -> tuple[tuple[int, int, float], ...]:
    """The tree of (parent, rank, survival) with the most expected tokens, root left out; best nodes first.

    Greedy is optimal: a node adds exactly the product of its path's rates, and never more than its parent.
    """
    levels = [[(rate, rank, i + 1) for rank, rate in enumerate(row)] for i, row in enumerate(rates)]

    def ways(node: tuple[float, int, int]) -> Candidates | None:
        return (levels[node[2]], 0.0) if node[2] < len(levels) else None

    grown = grow(0, (levels[0], 0.0), ways, None, (nodes, depth, width), -1.0)
    return tuple(zip(grown.parents[1:], grown.tokens[1:], grown.survivals, strict=True))


def filled_tree(
    root: int, guesses: list[list[int]], rates: tuple[tuple[float, ...], ...], budget: Budget
) -> tuple[list[int], list[int]]:
    """The best tree of a fixed shape, with the guesses [levels][ranks] of one sequence in it."""
    most = min(budget.width, len(guesses[0]))
    tree = best_tree(rates, budget.nodes, min(budget.depth, len(guesses)), most)
    tree = tree[: best_count([survival for *_, survival in tree], budget.price)]
    tokens, parents, levels = [root], [-1], [0]
    for parent, rank, _ in tree:
        tokens.append(guesses[levels[parent]][rank])
        parents.append(parent)
        levels.append(levels[parent] + 1)
    return tokens, parents


Tree = tuple[list[int], list[int]]  # tokens and parents, the root first
Frontier = list[tuple[int, int]]  # new nodes of one sequence: place of the parent in the last frontier, token
# of one sequence: log-probabilities and the target's ids, `count` a node
Ranked = tuple[list[float], list[int]]


class Steps(Protocol):
    """A head at work on one batch: logits after the roots, then after one frontier per level."""

    def first(self) -> Tensor:
        """[B, Vd] after the roots."""

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, Vd] after W new nodes each: their tokens [B, W], and their parents' places in the last frontier."""


class Ranks(Protocol):
    """The same head, asked only for the likeliest tokens, best first; frontiers may differ in size."""

    @property
    def size(self) -> int: ...

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
                gains = [math.log(rate) if rate > 0 else -math.inf for rate in self._rates[self._level][:branch]]
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


def lay_out(trees: Sequence[Tree], rows: Sequence[Sequence[int]] = (), laws: Sequence[Tensor] = ()) -> TreeBatch:
    """The batch that a proposal is; with laws where nodes were drawn."""
    drawn = None
    if laws:
        flat = torch.tensor([row for tree in rows for row in tree])
        drawn = Draws(torch.stack(list(laws)), flat, replace=False)
    return TreeBatch.trees(trees, drawn)


# how often the k-th sibling is accepted
RATES = (0.65, 0.1, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.008, 0.006)
TreeShape = tuple["TreeShape", ...]  # of the children, in the order they are drawn: each one's own children
Drawn = tuple[list[Tree], list[list[int]], list[Tensor]]  # trees, the law that each node came from, the laws
_ROUND = 4096  # numbers that a round has at a position: more than a tree has nodes


def sample_trees(steps: Steps, seqs: Sequence[Seq], budgets: Sequence[Budget], vocabulary: DraftVocabulary) -> Drawn:
    """One tree per sequence drawn from the head's own law."""
    logits = steps.first()[:, None]  # [B, W, Vd]
    laws: list[Tensor] = []
    growing = [_Drawn(seq, budget, laws) for seq, budget in zip(seqs, budgets, strict=True)]
    while True:
        for b, tree in enumerate(growing):
            if tree.frontier:
                rows = vocabulary.spread(logits[b, : len(tree.frontier)].float())
                paths = [tree.path(node) for node in tree.frontier]
                tree.draw(warp_rows(rows, [seqs[b]] * len(rows), paths).softmax(-1).cpu())
        ahead = [tree.advance() for tree in growing]
        if not any(ahead):
            return [tree.tree for tree in growing], [tree.rows for tree in growing], laws
        wide = max(map(len, ahead))
        padded = torch.tensor([[*row, *[(0, 0)] * (wide - len(row))] for row in ahead], device=logits.device)
        logits = steps.after(padded[..., 0], padded[..., 1])


class _Drawn:
    """One sequence's tree: nodes that are to have children are the frontier, in index order."""

    def __init__(self, seq: Seq, budget: Budget, laws: list[Tensor]) -> None:
        self.tree: Tree = ([seq.tokens[-1]], [-1])
        self.rows = [-1]
        self._seq, self._laws = seq, laws
        self._level, self._start = 0, 1  # depth of the frontier, and where the nodes below it begin
        shape = best_shape(budget.nodes, budget.depth, budget.width)
        self._wanted = {0: shape}  # node -> shapes of the children it is to have
        self.frontier = [0] if shape else []

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to a node."""
        tokens, parents = self.tree
        found: list[int] = []
        while node:
            found.append(tokens[node])
            node = parents[node]
        return found[::-1]

    def draw(self, laws: Tensor) -> None:
        """Children of the frontier from the laws [W, V] after its nodes, as many as their support allows."""
        position = len(self._seq.tokens)
        for node, law in zip(self.frontier, laws, strict=True):
            if not bool(law.isfinite().all()):
                continue  # all that the head can draft is ruled out here
            left, row = law.clone(), len(self._laws)
            self._laws.append(law)
            for below in self._wanted[node][: int((law > 0).sum())]:
                # keyed by the round too: a position drafted again must not see the same number again
                index = position * _ROUND + len(self.rows)
                token = draw(left, uniform(self._seq.seed, position + self._level, DRAFT, index))
                left[token] = 0.0
                self._add(node, token, row, below)

    def advance(self) -> list[tuple[int, int]]:
        """The next frontier: each node's token, and where its parent is in the last one."""
        place = {node: i for i, node in enumerate(self.frontier)}
        tokens, parents = self.tree
        self.frontier = [node for node in range(self._start, len(tokens)) if self._wanted[node]]
        self._start, self._level = len(tokens), self._level + 1
        return [(place[parents[node]], tokens[node]) for node in self.frontier]

    def _add(self, parent: int, token: int, row: int, below: TreeShape) -> None:
        self._wanted[len(self.rows)] = below
        self.tree[0].append(token)
        self.tree[1].append(parent)
        self.rows.append(row)


@lru_cache(maxsize=256)
def best_shape(nodes: int, depth: int, width: int) -> TreeShape:
    """The tree of `nodes` nodes with the most expected accepted tokens; at most `width` nodes a level branch."""
    made: list[tuple[int, int]] = [(-1, 0)]  # parent, depth
    waiting = [(-RATES[0], 0, 0)] if nodes and depth else []  # survival, parent, which child
    branching = [0] * (depth + 1)
    while waiting and len(made) <= nodes:
        score, parent, rank = heappop(waiting)
        level = made[parent][1] + 1
        if rank == 0:  # the parent's first child: it goes through the head
            if branching[level - 1] == width:
                continue
            branching[level - 1] += 1
        node = len(made)
        made.append((parent, level))
        if rank + 1 < min(width, len(RATES)):
            heappush(waiting, (score * RATES[rank + 1] / RATES[rank], parent, rank + 1))
        if level < depth:
            heappush(waiting, (score * RATES[0], node, 0))
    children: dict[int, list[int]] = {}
    for node, (parent, _) in enumerate(made[1:], start=1):
        children.setdefault(parent, []).append(node)

    def shape_of(node: int) -> TreeShape:
        return tuple(shape_of(child) for child in children.get(node, ()))

    return shape_of(0)
