"""Composition `a+b`: a lookup such as n-gram where it can be trusted, a model or a trained head elsewhere.

Looking things up costs nothing and is right for long stretches of copied text; a model is right more often in
the stretches between. Who drafts is decided per sequence and round from the committed text and from how often each
was right, before anything is proposed: by the controller, which sees both offers, or, where budgets are fixed, here.
Where nodes are cheap, what n-gram has at hand is put beside the other's tree. Both are shown every round, whoever
drafted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from forerun.drafters.base import Drafter, LookupDrafter
from forerun.drafters.either import EitherDrafter
from forerun.drafters.tree_builder import best_count
from forerun.offers import Offer
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict

HANDICAP = 0.1  # of acceptance: what the costlier drafter must be ahead by, where nobody weighs costs
MEMORY = 0.95  # per position tested
BESIDE = 0.15  # how often n-gram is right where the other says otherwise, to begin with
LONGEST_BESIDE = 8

Tree = tuple[list[int], list[int]]  # tokens and parents, the root first


@dataclass(slots=True)
class _Text:
    """What is kept per sequence."""

    hits: float = 2.1  # of the second drafter: to begin with, an acceptance of 0.7 worth three tries
    tries: float = 3.0
    silenced: bool = False  # the second drafter was given nothing when it was last its turn
    drafted: bool = False  # the second drafter made the tree that is being judged
    beside_hits: float = 4.0 * BESIDE  # of n-gram, where it parted from the other's tree
    beside_tries: float = 4.0
    parting: tuple[int, int] | None = None  # node where it did, and the token it would have there
    merged: bool = False


class HybridDrafter:
    """Hands each sequence, each round, to one of two drafters."""

    def __init__(self, first: LookupDrafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self._texts: dict[int, _Text] = {}

    @classmethod
    def compose(cls, first: Drafter, second: Drafter) -> Drafter:
        """`first+second`: whichever of them looks things up goes first; two that both cost take turns."""
        if isinstance(first, LookupDrafter):
            return cls(first, second)
        return cls(second, first) if isinstance(second, LookupDrafter) else EitherDrafter(first, second)

    @property
    def needs(self) -> Needs:
        return self.first.needs | self.second.needs

    def offer(self, seq: Seq) -> Offer:
        """What the second costs, what is at hand at no cost, and what the second expected of a tree all its own."""
        first, second, text = self.first.offer(seq), self.second.offer(seq), self._texts.get(seq.id)
        own = text is not None and text.drafted and not text.merged
        return replace(
            second,
            free=max(first.free, second.free, key=sum) if second.free else first.free,
            chosen=second.chosen or not second.costs,
            expected=second.expected if own else None,
        )

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        ours = [self._goes_first(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        # the first drafter is asked about everybody: it scores its own guesses, used or not, at no cost
        nothing = Budget(0, 0)
        asked = [budget if mine else nothing for budget, mine in zip(budgets, ours, strict=True)]
        trees = self.first.propose(seqs, asked)
        theirs = [b for b, mine in enumerate(ours) if not mine and budgets[b].nodes]
        for b, seq in enumerate(seqs):
            text = self._texts[seq.id]
            text.drafted, text.parting, text.merged = b in theirs, None, False
            if not ours[b]:
                text.silenced = budgets[b].nodes == 0
        if not theirs:
            return trees
        some, wishes = [seqs[b] for b in theirs], [budgets[b] for b in theirs]
        second = self._with_matches(self.second.propose(some, wishes), some, wishes)
        mine = [b for b in range(len(seqs)) if b not in theirs]
        return TreeBatch.join([trees.select(mine), second] if mine else [second], [*mine, *theirs])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        judged = [b for b, seq in enumerate(seqs) if seq.id in self._texts and self._texts[seq.id].drafted]
        if judged:
            tokens, depths = trees.to_host()[0], trees.host_depths()
            paths, bonus = verdict.to_host()
        for b in judged:
            text, first, end = self._texts[seqs[b].id], trees.starts[b], trees.starts[b + 1]
            _count(text, max(depths[first:end]), len(paths[b]))
            if text.parting is not None:
                nodes = [0, *paths[b]]
                came = [*(tokens[first + node] for node in paths[b]), bonus[b]]
                _count_parting(text, dict(zip(nodes, came, strict=True)))
        for member in (self.first, self.second):
            member.observe(seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._texts.pop(seq.id, None)
        self.first.forget(seq)
        self.second.forget(seq)

    def _goes_first(self, seq: Seq, budget: Budget) -> bool:
        """Is this round the first drafter's? The controller has said so, or the better record decides."""
        text = self._texts.setdefault(seq.id, _Text())
        if budget.source == "costly":
            return False
        if budget.source == "free":
            second = self.second.offer(seq)
            if second.free:
                return sum(self.first.offer(seq).free) >= sum(second.free)
            if second.costs:
                return True
        rival = 0.0 if text.silenced else text.hits / text.tries - HANDICAP
        confidence = self.first.confidence(seq)
        return confidence > 0.0 and confidence >= rival

    def _with_matches(self, trees: TreeBatch, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """The second's trees, with what n-gram has at hand beside them where that pays."""
        if trees.device.type != "cpu":
            return trees  # reading them would make the device wait, which costs more than a match brings
        if trees.drawn_from is not None or trees.is_plain() or not any(budget.price for budget in budgets):
            return trees
        tokens, parents = trees.to_host()
        made: list[Tree] = []
        for b, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            span = slice(trees.starts[b], trees.starts[b + 1])
            made.append(self._merged(seq, budget, (tokens[span], parents[span])))
        if not any(self._texts[seq.id].merged for seq in seqs):
            return trees
        return TreeBatch.trees(made, device=trees.device)

    def _merged(self, seq: Seq, budget: Budget, tree: Tree) -> Tree:
        tokens, parents = tree
        room = budget.nodes - len(tokens) + 1
        if budget.price is None or room <= 0 or len(tokens) == 1:
            return tree
        chain = list(self.first.chain(seq, min(LONGEST_BESIDE, budget.depth)))
        known = {(parents[i], tokens[i]): i for i in range(1, len(tokens))}
        node, shared = 0, 0
        while shared < len(chain) and (node, chain[shared][0]) in known:
            node = known[node, chain[shared][0]]
            shared += 1
        if shared == len(chain):
            return tree
        text = self._texts[seq.id]
        survivals = list(accumulate((rate for _, rate in chain), mul))
        if node in parents:  # they part here
            text.parting = node, chain[shared][0]
            doubt = text.beside_hits / text.beside_tries / chain[shared][1]
            survivals = [survival * min(1.0, doubt) for survival in survivals]
        price = budget.price[len(tokens) - 1 :]
        more = best_count(survivals[shared : shared + room], price) if price else 0
        text.merged = more > 0
        for token, _ in chain[shared : shared + more]:
            tokens, parents = [*tokens, token], [*parents, node]
            node = len(tokens) - 1
        return tokens, parents


def _count(text: _Text, depth: int, accepted: int) -> None:
    tried = min(accepted + 1, depth)
    memory = MEMORY**tried
    text.hits = text.hits * memory + accepted
    text.tries = text.tries * memory + tried


def _count_parting(text: _Text, came: dict[int, int]) -> None:
    """Where n-gram parted from the tree and the text came that way: was it right?"""
    assert text.parting is not None
    node, token = text.parting
    if node in came:
        text.beside_hits = text.beside_hits * MEMORY + (came[node] == token)
        text.beside_tries = text.beside_tries * MEMORY + 1.0
