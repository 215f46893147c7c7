"""Test doubles: a target without a network, scripted drafters, and sequences outside an engine.

`TableLM`'s law is a table over the last few tokens, so the law that a sequence *should* have can be computed directly.
`ScriptedDrafter` plays given trees; `LawDrafter` drafts from any law, in each form that verifiers know.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from forerun.core.noise import DRAFT, draw, uniform
from forerun.core.types import (
    Budget,
    Draws,
    Needs,
    Offer,
    PlainSeq,
    Prompts,
    Scores,
    Seq,
    TreeBatch,
    Verdict,
    first_rows,
)
from forerun.models.base import SharedWeights
from forerun.models.slots import UnpagedTarget

Law = Callable[[Sequence[int]], Tensor]  # tokens so far -> [V], sums to 1
Script = Callable[[Seq, Budget], tuple[Sequence[int], Sequence[int]]]  # -> tokens and parents, root included


FakeSeq = PlainSeq  # a sequence outside an engine


@dataclass(slots=True)
class TableLM(UnpagedTarget):
    """A target whose logits are a random function of the last `order` tokens; misuse is an AssertionError."""

    vocab_size: int
    order: int = 2
    seed: int = 0
    sharpness: float = 1.5  # standard deviation of the logits
    width: int = 8  # of the hidden rows
    max_length: int = 1 << 20
    slots: int | None = None  # tokens it can cache in all; None = no limit
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lends: SharedWeights | None = None  # what `shared` answers: a table has no weights of its own
    pass_rows: int = 512
    _promised: int = 0  # slots for the trees of the coming round
    _cached: dict[int, list[int]] = field(default_factory=dict)
    _scored: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    _rows: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def used_slots(self) -> int:
        return sum(len(tokens) for tokens in self._cached.values())

    def shared(self) -> SharedWeights | None:
        return self.lends

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[V] its logits after these tokens, cached or not."""
        return self._row("logits", tokens, self.vocab_size) * self.sharpness

    def law(self, tokens: Sequence[int]) -> Tensor:
        """[V] its law at temperature 1 after these tokens."""
        return self.logits(tokens).softmax(-1)

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        known = [len(self._cached.setdefault(seq.id, [])) for seq in seqs]
        for seq in seqs:
            self._check_cache(seq, seq.tokens[: len(self._cached[seq.id])])
        chains = [seq.tokens[have:-1] for seq, have in zip(seqs, known, strict=True)]
        chains = chains if rows is None else first_rows(chains, rows)
        contexts: list[list[int]] = []
        for seq, have, chain in zip(seqs, known, chains, strict=True):
            contexts += [seq.tokens[: have + i + 1] for i in range(len(chain))]
            self._cached[seq.id] = seq.tokens[: have + len(chain)]
        self._check_use([token for chain in chains for token in chain])
        return TreeBatch.chains(chains, self.device), Scores(None, self._hidden(contexts, needs))

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        assert len(seqs) == len(trees), f"{len(seqs)} sequences and {len(trees)} trees"
        read = None if prompts is None else self.prefill(prompts.seqs, needs, prompts.rows)
        contexts: list[list[int]] = []
        for b, seq in enumerate(seqs):
            assert seq.id in self._cached, f"sequence {seq.id} is scored without prefill"
            self._check_cache(seq, seq.tokens[:-1])
            tokens, parents = tree_of(trees, b)
            assert tokens[:1] == seq.tokens[-1:], f"sequence {seq.id}: the root is not the last token"
            for i in range(len(tokens)):
                assert i == 0 or 0 <= parents[i] < i, f"sequence {seq.id}: node {i} precedes its parent"
                contexts.append(seq.tokens + [tokens[j] for j in path_to(parents, i)])
                assert len(contexts[-1]) <= self.max_length, f"sequence {seq.id}: longer than the context"
            self._scored[seq.id] = (tokens, parents)
        self._check_use(trees.tokens.tolist())
        logits = torch.stack([self.logits(context) for context in contexts])  # [M, V]
        return Scores(logits.to(self.device), self._hidden(contexts, needs), read=read)

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        self._promised = 0
        for b, seq in enumerate(seqs):
            tokens, parents = tree_of(trees, b)
            assert self._scored.pop(seq.id, None) == (tokens, parents), f"sequence {seq.id}: tree was not scored"
            path = verdict.path(b)
            assert not path or path == path_to(parents, path[-1]), f"sequence {seq.id}: {path} is no path"
            self._cached[seq.id] += [tokens[i] for i in [0, *path]]

    def truncate(self, seq: Seq, length: int) -> None:
        if seq.id in self._cached:
            del self._cached[seq.id][length:]
            self._scored.pop(seq.id, None)

    def cached_tokens(self, seq: Seq) -> int:
        return len(self._cached.get(seq.id, []))

    def release(self, seq: Seq) -> None:
        self._cached.pop(seq.id, None)
        self._scored.pop(seq.id, None)

    def _check_cache(self, seq: Seq, tokens: list[int]) -> None:
        assert self._cached[seq.id] == tokens, f"the cache of sequence {seq.id} does not hold its tokens"

    def _check_use(self, tokens: Iterable[int]) -> None:
        """A network would read past its embedding, or write past its cache."""
        assert all(0 <= token < self.vocab_size for token in tokens), "a token lies outside the vocabulary"
        assert self.slots is None or self.used_slots <= self.slots, "more tokens are cached than there are slots"

    def _hidden(self, contexts: Sequence[Sequence[int]], needs: Needs) -> dict[int, Tensor]:
        empty = torch.zeros(0, self.width)
        rows = {n: [self._row(n, context, self.width) for context in contexts] for n in needs.hidden_layers}
        return {n: (torch.stack(row) if row else empty).to(self.device) for n, row in rows.items()}

    def _row(self, name: object, tokens: Sequence[int], size: int) -> Tensor:
        key = (name, *tokens[-self.order :])
        if key not in self._rows:
            digest = hashlib.blake2b(repr((self.seed, key)).encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            self._rows[key] = torch.randn(size, generator=generator)
        return self._rows[key]


@dataclass(slots=True)
class ScriptedDrafter:
    """Proposes the trees of a script, cut to the budget; records what it observes."""

    script: Script
    needs: Needs = field(default_factory=Needs)
    cost: float = 0.0  # seconds per level
    observed: list[tuple[int, int]] = field(default_factory=list)  # (sequence, accepted) by round
    forgotten: list[int] = field(default_factory=list)

    @classmethod
    def random(cls, vocab_size: int, seed: int = 0, width: int = 3) -> ScriptedDrafter:
        """Random trees of distinct siblings, the same for the same tokens."""

        def script(seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
            rng = random.Random(repr((seed, seq.seed, seq.tokens)))
            return random_tree(rng, seq.tokens[-1], vocab_size, budget.nodes, width)

        return cls(script)

    def offer(self, seq: Seq) -> Offer:
        return _offer(self.cost)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.trees([self._cut(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        self.observed += zip([seq.id for seq in seqs], verdict.accepted.tolist(), strict=True)

    def forget(self, seq: Seq) -> None:
        self.forgotten.append(seq.id)

    def _cut(self, seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
        tokens, parents = self.script(seq, budget)
        kept: dict[int, int] = {}  # node of the script -> node of the tree
        for i in range(len(tokens)):
            fits = len(path_to(parents, i)) <= budget.depth and len(kept) <= budget.nodes
            if i == 0 or (fits and parents[i] in kept):
                kept[i] = len(kept)
        return [tokens[i] for i in kept], [-1 if parents[i] < 0 else kept[parents[i]] for i in kept]


@dataclass(slots=True)
class LawDrafter:
    """Drafts from a law of its own, level by level, as full a tree as the budget allows.

    chosen: the likeliest tokens | sampled: siblings i.i.d. | distinct: siblings without replacement. Its
    random numbers are keyed by the root's position, which no two rounds share: one that was drafted with in
    vain may have decided what was accepted (block verification looks ahead), so it must not come again.
    """

    law: Law
    how: Literal["chosen", "sampled", "distinct"] = "sampled"
    needs: Needs = field(default_factory=Needs)
    cost: float = 0.0  # seconds per level

    def offer(self, seq: Seq) -> Offer:
        return _offer(self.cost)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        laws: list[Tensor] = []
        rows: list[int] = []
        trees = [self._grow(seq, budget, laws, rows) for seq, budget in zip(seqs, budgets, strict=True)]
        if self.how == "chosen" or not laws:
            return TreeBatch.trees(trees)
        return TreeBatch.trees(trees, Draws(torch.stack(laws), torch.tensor(rows), self.how == "sampled"))

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """It learns nothing."""

    def forget(self, seq: Seq) -> None:
        """Nothing is held."""

    def _grow(self, seq: Seq, budget: Budget, laws: list[Tensor], rows: list[int]) -> tuple[list[int], list[int]]:
        tokens, parents = [seq.tokens[-1]], [-1]
        rows.append(-1)
        for parent in range(1 + budget.nodes):
            room = min(budget.width, 1 + budget.nodes - len(tokens))
            path = path_to(parents, parent) if parent < len(tokens) else []
            if parent >= len(tokens) or room <= 0 or len(path) >= budget.depth:
                break
            q = self.law(seq.tokens + [tokens[i] for i in path]).float()
            children = self._children(seq, q, min(room, int((q > 0).sum())), len(tokens))
            tokens += children
            parents += [parent] * len(children)
            rows += [len(laws)] * len(children)
            laws.append(q)
        return tokens, parents

    def _children(self, seq: Seq, q: Tensor, count: int, first: int) -> list[int]:
        if self.how == "chosen":
            return [int(token) for token in q.topk(count).indices]
        left, children = q.clone(), []
        for i in range(first, first + count):
            children.append(draw(left, uniform(seq.seed, len(seq.tokens), DRAFT, i)))
            if self.how == "distinct":
                left[children[-1]] = 0.0
        return children


def _offer(cost: float) -> Offer:
    """What costs nothing is chosen; what costs may be sampled."""
    return Offer((cost,), chosen=False) if cost else Offer()


def tree_of(trees: TreeBatch, b: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of tree b."""
    span, (tokens, parents) = slice(trees.starts[b], trees.starts[b + 1]), trees.to_host()
    return tokens[span], parents[span]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from below the root down to `node`."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def random_tree(
    rng: random.Random, root: int, vocab_size: int, nodes: int, width: int = 3
) -> tuple[list[int], list[int]]:
    """A tree of at most `nodes` nodes below its root, any shape, siblings distinct."""
    tokens, parents = [root], [-1]
    for _ in range(nodes):
        parent = rng.randrange(len(tokens))
        taken = [tokens[i] for i in range(len(tokens)) if parents[i] == parent]
        token = rng.randrange(vocab_size)
        if token not in taken and len(taken) < width:
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def random_verdict(rng: random.Random, trees: TreeBatch, vocab_size: int) -> Verdict:
    """Any path of each tree, and any bonus."""
    paths = []
    for b, size in enumerate(trees.sizes()):
        paths.append(path_to(tree_of(trees, b)[1], rng.randrange(size)))
    return Verdict.of(paths, [rng.randrange(vocab_size) for _ in paths], trees.tokens.device)


def extend(seqs: Iterable[FakeSeq], trees: TreeBatch, verdict: Verdict) -> None:
    """Append to each sequence what the verdict committed: the path's tokens and the bonus."""
    for b, seq in enumerate(seqs):
        tokens = tree_of(trees, b)[0]
        seq.tokens += [*(tokens[i] for i in verdict.path(b)), int(verdict.bonus[b])]
