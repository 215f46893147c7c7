"""Conformance checks of drafters: what must hold of any proposal, offer and observation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from forerun.core.offer import Offer
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Seq, TreeBatch, Verdict
from forerun.drafters.base import Drafter
from forerun.models.base import Target
from forerun.testing.doubles import FakeSeq, TableLM, extend, path_to, random_verdict, tree_of


def check_drafter(
    drafter_factory: Callable[[], Drafter],
    *,
    vocab_size: int,
    rounds: int = 8,
    batch: int = 4,
    hidden_width: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> None:
    """Hold a drafter to the contract of forerun.drafters.base, over random sequences, budgets and verdicts.

    The target is a TableLM whose hidden rows have `hidden_width` columns. Half the sequences repeat themselves,
    so that a lookup drafter has something to find.
    """
    rng, drafter = random.Random(seed), drafter_factory()
    target = TableLM(vocab_size, seed=seed, width=hidden_width, device=torch.device(device))
    live = [_varied_seq(rng, b, vocab_size) for b in range(batch)]
    _observe_prompts(drafter, target, live)
    for n in range(rounds):
        seqs = rng.sample(live, rng.randint(1, len(live))) if n else live
        budgets = [_varied_budget(rng, 0 if b == n % batch else 8) for b in range(len(seqs))]
        before = [list(seq.tokens) for seq in seqs]
        for seq in seqs:
            check_offer(drafter.offer(seq))
        trees = drafter.propose(seqs, budgets)
        assert [seq.tokens for seq in seqs] == before, "offer or propose changed a sequence"
        check_trees(trees, seqs, budgets, vocab_size)
        scores = target.score(seqs, trees, drafter.needs)
        verdict = random_verdict(rng, trees, vocab_size)
        target.commit(seqs, trees, verdict)
        drafter.observe(seqs, trees, scores, verdict)
        extend(seqs, trees, verdict)
        if n % 3 == 2:  # one leaves; a new one comes, and may be given the same id
            gone = live.pop(rng.randrange(len(live)))
            target.release(gone)
            drafter.forget(gone)
            live.append(_varied_seq(rng, gone.id, vocab_size))
            _observe_prompts(drafter, target, live[-1:])
    for seq in live:
        drafter.forget(seq)


def check_offer(offer: Offer) -> None:
    """What must hold of any offer."""
    times = (*offer.seconds, offer.start)
    assert all(math.isfinite(time) and time >= 0 for time in times), f"{offer}: times are seconds, 0 or more"
    assert all(0 <= share <= 1 for share in offer.free), f"{offer}: free holds probabilities"
    falls = all(deep <= shallow for shallow, deep in pairwise(offer.free))
    assert falls, f"{offer}: what is accepted at a depth was accepted above it, so free never grows"
    assert offer.expected is None or offer.expected >= 0, f"{offer}: expected is a number of tokens"


def check_trees(trees: TreeBatch, seqs: Sequence[Seq], budgets: Sequence[Budget], vocab_size: int) -> None:
    """What must hold of any proposal."""
    assert len(trees) == len(seqs), f"{len(trees)} trees for {len(seqs)} sequences"
    assert len(trees.tokens) == len(trees.parents) == trees.starts[-1], "tokens, parents and starts disagree"
    drawn = trees.drawn_from
    rows = [-1] * len(trees.tokens) if drawn is None else drawn.rows.tolist()
    assert len(rows) == len(trees.tokens), f"{len(rows)} drawn rows for {len(trees.tokens)} nodes"
    if drawn is not None:
        assert drawn.laws.shape[-1] == vocab_size, "laws do not have the vocabulary's width"
        assert bool((drawn.laws >= 0).all()), "a law has a negative probability"
        off = float((drawn.laws.double().sum(-1) - 1).abs().max()) if len(drawn.laws) else 0.0
        assert off < 1e-4, f"a law's probabilities sum to 1 +- {off:.3g}"
    for b, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
        tokens, parents = tree_of(trees, b)
        assert tokens[:1] == seq.tokens[-1:], f"tree {b}: the root is not the last token"
        assert parents[0] == -1, f"tree {b}: the root has a parent"
        assert all(0 <= p < i for i, p in enumerate(parents) if i), f"tree {b}: a node precedes its parent"
        assert len(tokens) - 1 <= budget.nodes, f"tree {b}: {len(tokens) - 1} nodes, budget {budget.nodes}"
        deepest = max(len(path_to(parents, i)) for i in range(len(tokens)))
        assert deepest <= budget.depth, f"tree {b}: {deepest} deep, budget {budget.depth}"
        assert all(0 <= token < vocab_size for token in tokens), f"tree {b}: a token is not in the vocabulary"
        _check_siblings(trees, b, rows[trees.starts[b] : trees.starts[b + 1]])


def _check_siblings(trees: TreeBatch, b: int, rows: Sequence[int]) -> None:
    tokens, parents = tree_of(trees, b)
    drawn = trees.drawn_from
    assert rows[0] == -1, f"tree {b}: the root was not drawn"
    for parent in set(parents[1:]):
        children = [i for i in range(1, len(tokens)) if parents[i] == parent]
        laws = {rows[i] for i in children}
        assert len(laws) == 1, f"tree {b}: the children of node {parent} are not of one law"
        row = laws.pop()
        if drawn is None or row == -1 or not drawn.replace:
            assert len({tokens[i] for i in children}) == len(children), f"tree {b}: equal siblings, {parent}"
        if drawn is not None and row != -1:
            assert 0 <= row < len(drawn.laws), f"tree {b}: there is no law {row}"
            possible = all(drawn.laws[row, tokens[i]] > 0 for i in children)
            assert possible, f"tree {b}: a child of node {parent} is impossible under the law it was drawn from"


def _varied_seq(rng: random.Random, id: int, vocab_size: int) -> FakeSeq:
    text = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 8))]
    params = SamplingParams(temperature=rng.choice([0.0, 0.8, 1.0]))
    noisy = rng.random() < 0.5
    return FakeSeq(id, text * rng.choice([1, 3]), params=params, seed=rng.getrandbits(32), shares_noise=noisy)


def _varied_budget(rng: random.Random, most: int) -> Budget:
    nodes = rng.randint(0, most)
    return Budget(nodes, depth=rng.randint(1, 5) if nodes else 0, width=rng.randint(1, 3))


def _observe_prompts(drafter: Drafter, target: Target, seqs: Sequence[Seq]) -> None:
    trees, scores = target.prefill(seqs, drafter.needs)
    drafter.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))
