"""Conformance checks of drafters (any proposal, offer and observation) and of targets (their contract).

Random ragged batches, random trees, random accepted paths: what must hold of a target is compared with the plainest
computation, a sequence alone that is prefilled from scratch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import count, pairwise

import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Needs, Offer, Prompts, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import Drafter
from forerun.models.base import Target
from forerun.testing.doubles import FakeSeq, TableLM, extend, path_to, random_tree, random_verdict, tree_of


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


_NO_NEEDS = Needs()


def check_target(
    target_factory: Callable[[], Target],
    *,
    vocab_size: int,
    rounds: int = 6,
    batch: int = 3,
    nodes: int = 6,
    needs: Needs = _NO_NEEDS,
    seed: int = 0,
    atol: float = 1e-4,
) -> None:
    """Hold a target to the contract of forerun.models.base.

    Every round takes some of the sequences, in any order, scores a random tree of each, compares every node
    with a plain pass over its own path and commits a random path; now and then a new sequence replaces one.
    """
    rng, ids = random.Random(seed), count()
    target, plain = target_factory(), target_factory()
    assert target.vocab_size == vocab_size, f"vocab_size is {target.vocab_size}, not {vocab_size}"
    free = target.used_slots
    live = [_new_seq(rng, next(ids), vocab_size, length) for length in (1, *[0] * (batch - 1))]
    _prefill(target, live, needs)
    for n in range(rounds):
        seqs = rng.sample(live, rng.randint(1, len(live))) if n else live
        trees = TreeBatch.trees(
            [random_tree(rng, seq.tokens[-1], vocab_size, rng.randint(0, nodes)) for seq in seqs], device=target.device
        )
        if n % 2:  # a tree that was scored and not committed must leave no trace
            target.score(seqs, TreeBatch.chains([[seq.tokens[-1], 0] for seq in seqs], target.device), needs)
        joins = [_new_seq(rng, next(ids), vocab_size, 9), _new_seq(rng, next(ids), vocab_size, 1)] if n % 2 else []
        _compare(plain, seqs, trees, _score_beside(target, seqs, trees, joins, needs, rng), needs, ids, atol)
        verdict = random_verdict(rng, trees, vocab_size)
        target.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)
        _join(target, plain, joins, needs, ids, atol)
        held = [target.cached_tokens(seq) for seq in live]
        assert held == [len(seq.tokens) - 1 for seq in live], f"cached_tokens says {held}, not all but the last"
        if n % 3 == 1:  # one drops some of its last tokens and continues with others
            _rewrite(rng, target, rng.choice(live), needs)
        if n % 3 == 2:  # one leaves, another comes
            target.release(live.pop(rng.randrange(len(live))))
            live.append(_new_seq(rng, next(ids), vocab_size))
            _prefill(target, live[-1:], needs)
            _check_room(random.Random(seed + n), target, needs, ids)
    unknown = FakeSeq(next(ids), [0])
    assert target.cached_tokens(unknown) == 0, "a sequence that was never prefilled has nothing cached"
    target.truncate(unknown, 0)
    target.release(unknown)
    for seq in live:
        target.release(seq)
    left = target.used_slots
    assert left == free, f"{left} slots are in use after every release; {free} were when it was made"


def _score_beside(
    target: Target, seqs: Sequence[Seq], trees: TreeBatch, joins: Sequence[FakeSeq], needs: Needs, rng: random.Random
) -> Scores:
    """Score trees while the first few tokens of other sequences' prompts are cached."""
    if not joins:
        return target.score(seqs, trees, needs)
    rows = rng.randint(1, 8)
    scores = target.score(seqs, trees, needs, Prompts(joins, rows))
    assert scores.read is not None, "score did not return what it read of prompts"
    chains, read = scores.read
    assert chains.tokens.tolist() == joins[0].tokens[:rows], "score caches as many tokens as it may"
    assert chains.sizes() == [rows, 0], "score returns one chain per prompt"
    held = [target.cached_tokens(seq) for seq in joins]
    assert held == [rows, 0], f"cached_tokens says {held} after {rows} rows of a prompt"
    _check_rows(read, needs, rows)
    return scores


def _join(target: Target, plain: Target, joins: Sequence[Seq], needs: Needs, ids: count[int], atol: float) -> None:
    """Cache the rest of their prompts, in a chunk of its own: they score as if it had been one."""
    if joins:
        _prefill(target, joins, needs, [target.cached_tokens(seq) for seq in joins])
        roots = TreeBatch.chains([seq.tokens[-1:] for seq in joins], target.device)
        _compare(plain, joins, roots, target.score(joins, roots, needs), needs, ids, atol)
    for seq in joins:
        target.release(seq)


def _new_seq(rng: random.Random, id: int, vocab_size: int, length: int = 0) -> FakeSeq:
    tokens = [rng.randrange(vocab_size) for _ in range(length or rng.randint(2, 14))]
    source = random.Random(id).choices(range(vocab_size), k=1 + id % 7)  # for those that read one
    return FakeSeq(id, tokens, seed=rng.getrandbits(32), source=source)


def _rewrite(rng: random.Random, target: Target, seq: FakeSeq, needs: Needs) -> None:
    kept = rng.randrange(len(seq.tokens))
    target.truncate(seq, kept)
    seq.tokens[kept:] = [rng.randrange(target.vocab_size) for _ in range(rng.randint(1, 4))]
    _prefill(target, [seq], needs, [kept])


def _check_room(rng: random.Random, target: Target, needs: Needs, ids: count[int]) -> None:
    """Several that there is room for can be prefilled together, in the order asked, and leave nothing behind."""
    used, longest = target.used_slots, min(24, target.max_length)
    asked = [rng.randint(1, longest) for _ in range(6)]
    while not target.has_room(*asked):
        asked.pop()
        assert asked or target.has_room(), "has_room() without sequences must be True"
    seqs = [_new_seq(rng, next(ids), target.vocab_size, rng.randint(1, length)) for length in asked]
    for seq, length in zip(seqs, asked, strict=True):
        seq.max_length = length
    if seqs:
        _prefill(target, seqs, needs)
    for seq in seqs:
        target.release(seq)
    left = target.used_slots
    assert left == used, f"{left} slots are in use after sequences came and went; {used} were before"


def _prefill(target: Target, seqs: Sequence[Seq], needs: Needs, cached: Sequence[int] = ()) -> None:
    trees, scores = target.prefill(seqs, needs)
    fresh = [seq.tokens[have:-1] for seq, have in zip(seqs, cached or [0] * len(seqs), strict=True)]
    wanted = [token for tokens in fresh for token in tokens]
    assert trees.tokens.tolist() == wanted, "prefill returns the tokens it cached: all that were not, but the last"
    assert trees.sizes() == [len(tokens) for tokens in fresh], "prefill returns one chain per sequence"
    _check_rows(scores, needs, len(trees.tokens))


def _check_rows(scores: Scores, needs: Needs, nodes: int) -> None:
    for layer in needs.hidden_layers:
        assert layer in scores.hidden, f"hidden layer {layer} was needed and is not there"
        rows = len(scores.hidden[layer])
        assert rows == nodes, f"hidden layer {layer} has {rows} rows for {nodes} nodes"


def _compare(
    plain: Target, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, needs: Needs, ids: count[int], atol: float
) -> None:
    """Every node against a new sequence, alone, that was prefilled with the node's own path."""
    assert scores.logits is not None, "score returned no logits"
    shape = (len(trees.tokens), plain.vocab_size)
    assert scores.logits.shape == shape, f"logits are {tuple(scores.logits.shape)}, not {shape}"
    _check_rows(scores, needs, len(trees.tokens))
    for b, seq in enumerate(seqs):
        tokens, parents = tree_of(trees, b)
        for i in range(len(tokens)):
            path = [tokens[j] for j in path_to(parents, i)]
            alone = FakeSeq(next(ids) + (1 << 40), seq.tokens + path, source=seq.source)
            _prefill(plain, [alone], needs)
            root = TreeBatch.chains([alone.tokens[-1:]], plain.device)
            wanted = plain.score([alone], root, needs)
            plain.release(alone)
            node, where = trees.starts[b] + i, f"node {i} of a tree of {len(tokens)} after {len(seq.tokens)}"
            assert wanted.logits is not None, "score returned no logits"
            _assert_close(scores.logits[node], wanted.logits[0], atol, f"logits of {where}")
            for layer in needs.hidden_layers:
                got = scores.hidden[layer][node]
                _assert_close(got, wanted.hidden[layer][0], atol, f"hidden layer {layer} of {where}")


def _assert_close(got: Tensor, wanted: Tensor, atol: float, what: str) -> None:
    off = float((got.float() - wanted.float().to(got.device)).abs().max())
    assert off <= atol, f"{what} tokens differ from a plain pass by {off:.3g} (at most {atol:.3g})"
