"""LookaheadDrafter: n-grams from the target's own guesses, made by Jacobi iteration in branches of the same trees.

A window of guessed tokens rides along with each tree (lookahead decoding, Fu et al. 2024): a trunk of `columns` guesses
of what comes next, and below each of them a chain of further guesses. The target's argmax after each node is a better
guess for the node below, so a column becomes an n-gram that the target itself might write. Finished n-grams go into a
pool by their first token; those that begin with the last committed token are the branches that can be accepted.
Nothing is stored twice: trunk and chains are ordinary nodes of the tree.

The window pays only where nodes are nearly free. Under a price list that says otherwise it is left out, and the
pool holds what was committed alone. Rows are read of trees alone: plain rounds overlap, as with any look-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core.tree import committed_tokens
from forerun.core.types import Budget, Offer, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import BaseDrafter, Parts, chances, goes_on
from forerun.drafters.heads.growth import TreeBuilder

COLUMNS, LEVELS = 5, 3  # of the window: guesses of the trunk, and nodes of a column, its trunk node included
KEPT = 7  # n-grams of a first token
MOST_KEYS = 1 << 15  # first tokens in a pool; beyond, the oldest are dropped
# tokens that all nodes of the window may cost together, where a price list says what they cost
WINDOW_GAIN = 0.2
MEMORY = 0.99
# prior acceptance by rank, and of later tokens
_FIRST, _DEEPER = (0.3, 0.12, 0.08, 0.05, 0.04, 0.03, 0.02), 0.55

Tree = tuple[list[int], list[int]]


class Pool:
    """N-grams by their first token, the most recent first, and how often they were right."""

    def __init__(self) -> None:
        self._grams: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        self.hits, self.tries = [8.0 * p for p in (*_FIRST, _DEEPER)], [8.0] * (len(_FIRST) + 1)

    def __len__(self) -> int:
        return len(self._grams)

    def add(self, gram: Sequence[int]) -> None:
        first, rest = gram[0], tuple(gram[1:])
        known = [one for one in self._grams.get(first, ()) if one != rest]
        self._grams[first] = [rest, *known][:KEPT]
        self._grams.move_to_end(first)
        while len(self._grams) > MOST_KEYS:
            self._grams.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        return self._grams.get(token, [])

    def rate(self, rank: int, depth: int) -> float:
        i = len(_FIRST) if depth else rank
        return self.hits[i] / self.tries[i]

    def count(self, token: int, came: Sequence[int]) -> None:
        """Which of the n-grams were right, and how far?"""
        for rank, gram in enumerate(self.after(token)):
            self._count(rank, gram[0] == came[0])
            for guess, right in zip(gram[1:], came[1:], strict=False):
                if gram[0] != came[0]:
                    break
                self._count(len(_FIRST), guess == right)
                if guess != right:
                    break

    def count_behind(self, tokens: Sequence[int], came: int) -> None:
        """The same for the newest n-grams of earlier tokens that went on as they say, behind a round of one token."""
        for depth in range(1, len(tokens)):
            gram = next(iter(self.after(tokens[-1 - depth])), ())
            if len(gram) > depth and gram[:depth] == tuple(tokens[-depth:]):
                self._count(len(_FIRST), gram[depth] == came)

    def _count(self, i: int, hit: bool) -> None:
        self.hits[i] = self.hits[i] * MEMORY + hit
        self.tries[i] = self.tries[i] * MEMORY + 1.0


@dataclass(slots=True)
class _Sequence:
    pool: Pool
    window: list[list[int]] = field(default_factory=list)  # by column, the trunk's token first
    nodes: list[list[int]] = field(default_factory=list)  # where these are in the tree that is being verified


class LookaheadDrafter(BaseDrafter):
    """The target's own guesses, some rounds later."""

    looks_up = True

    def __init__(self, shared: bool = False, columns: int = COLUMNS, levels: int = LEVELS) -> None:
        self.shared, self.columns, self.levels = shared, columns, levels
        self._sequences: dict[int, _Sequence] = {}
        self._tenants: dict[str, Pool] = {}

    @classmethod
    def build(cls, parts: Parts) -> LookaheadDrafter:
        return cls(parts.speculative.shared)

    def offer(self, seq: Seq) -> Offer:
        """The best n-gram costs nothing; the window is drafted where the price list allows it."""
        pool = self._state(seq).pool
        best = next(iter(pool.after(seq.tokens[-1])), ())
        return Offer(free=chances(pool.rate(0, depth) for depth in range(len(best))))

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.trees([self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Take n-grams from what was committed and from the window, whose guesses move up by one."""
        committed = committed_tokens(trees, verdict)
        windows = scores.logits is not None and any(self._state(seq).nodes for seq in seqs)
        guesses = scores.logits.argmax(-1).tolist() if windows and scores.logits is not None else []
        for b, seq in enumerate(seqs):
            start, came, is_new = trees.starts[b], committed[b], seq.id not in self._sequences
            state = self._state(seq)
            if scores.logits is None and not goes_on(seq, trees, b):
                if is_new:  # with the first part of it all that is read is collected
                    self._collect(state.pool, seq.tokens, len(seq.tokens) - 1)
                continue
            state.pool.count(seq.tokens[-1], came)
            if len(came) == 1:
                state.pool.count_behind(seq.tokens[-self.levels :], came[0])
            self._collect(state.pool, [*seq.tokens[-self.levels :], *came], len(came))
            for column, nodes in zip(state.window, state.nodes, strict=False):
                column.append(guesses[start + nodes[-1]])
                state.pool.add(column)
                del column[0]
            state.nodes = []

    def rewind(self, seq: Seq, length: int) -> None:
        """What the target would write after some tokens holds wherever they stand."""

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)

    def _collect(self, pool: Pool, tokens: Sequence[int], fresh: int) -> None:
        """Every n-gram of a text that ends in its last `fresh` tokens."""
        size = self.levels + 1
        for end in range(max(size, len(tokens) - fresh + 1), len(tokens) + 1):
            pool.add(tokens[end - size : end])

    def _state(self, seq: Seq) -> _Sequence:
        state = self._sequences.get(seq.id)
        if state is None:
            tenant = seq.cache_salt if self.shared else None
            pool = Pool() if tenant is None else self._tenants.setdefault(tenant, Pool())
            state = self._sequences[seq.id] = _Sequence(pool)
        return state

    def _tree(self, seq: Seq, budget: Budget) -> Tree:
        state, builder = self._state(seq), TreeBuilder(seq.tokens[-1])
        left = 1.0
        for rank, gram in enumerate(state.pool.after(seq.tokens[-1])[: max(1, budget.width)]):
            node = 0
            for depth, token in enumerate(gram[: budget.depth]):
                rate = state.pool.rate(rank, depth)
                node = builder.add(node, token, rate if depth else left * rate)
                if token in seq.stop_ids:
                    break
            left -= left * state.pool.rate(rank, 0)
        tree = builder.cut(budget.nodes, budget.price)
        state.nodes = []
        if self._has_room(budget, len(tree[0]) - 1):
            self._add_window(seq, state, tree)
        return tree

    def _has_room(self, budget: Budget, used: int) -> bool:
        last = used + self.columns * self.levels
        if last > budget.nodes or self.columns + self.levels - 1 > budget.depth:
            return False
        return budget.price is None or budget.price[last] - budget.price[used] <= WINDOW_GAIN

    def _add_window(self, seq: Seq, state: _Sequence, tree: Tree) -> None:
        """Hang trunk and columns onto the tree; a node that is there already is used."""
        tokens, parents = tree
        if not state.window:  # any tokens will do; the sequence's own are the likeliest to come
            size, tail = self.levels, seq.tokens[-64:]
            state.window = [[tail[(i * 7 + j) % len(tail)] for j in range(size)] for i in range(self.columns)]
        known = {(parents[i], tokens[i]): i for i in range(1, len(tokens))}

        def add(parent: int, token: int) -> int:
            node = known.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            return node

        trunk = 0
        for column in state.window:
            trunk = add(trunk, column[0])
            nodes = [trunk]
            for token in column[1:]:
                nodes.append(add(nodes[-1], token))
            state.nodes.append(nodes)
