"""Lookahead: the pool, and the window that rides along with the tree."""

from __future__ import annotations

import torch

from forerun.core.types import Budget, Scores, Verdict
from forerun.drafters.lookup.lookahead import COLUMNS, LEVELS, LookaheadDrafter, Pool
from forerun.testing import FakeSeq, TableLM, check_drafter
from tests.drafters.rounds import as_lists, observe_prompts

VOCAB = 40
ROOM = Budget(COLUMNS * LEVELS + 8, 12, width=3)


class Counting(TableLM):
    """A target that counts up: whatever came, one more follows."""

    def logits(self, tokens: object) -> torch.Tensor:
        row = torch.zeros(self.vocab_size)
        row[(tokens[-1] + 1) % self.vocab_size] = 9.0  # type: ignore[index]
        return row


def test_the_contract() -> None:
    check_drafter(LookaheadDrafter, vocab_size=9)
    check_drafter(lambda: LookaheadDrafter(shared=True, columns=2, levels=2), vocab_size=9, rounds=24)


def test_the_window_is_a_trunk_with_a_chain_below_each_of_its_nodes() -> None:
    drafter, seq = LookaheadDrafter(), FakeSeq(0, [*range(30)])
    ((tokens, parents),) = as_lists(drafter.propose([seq], [ROOM]))
    columns = drafter._sequences[0].nodes
    assert len(columns) == COLUMNS
    above = 0
    for column, nodes in zip(drafter._sequences[0].window, columns, strict=True):
        assert [tokens[node] for node in nodes] == column
        assert parents[nodes[0]] == above
        assert [parents[node] for node in nodes[1:]] == nodes[:-1]
        above = nodes[0]


def test_guesses_become_n_grams_that_the_target_would_write() -> None:
    """After as many rounds as a column has levels, every n-gram of the window counts up."""
    drafter, target, seq = LookaheadDrafter(), Counting(VOCAB), FakeSeq(0, [5, 3, 11, 30, 8, 20])
    observe_prompts(drafter, target, [seq])
    for _ in range(LEVELS + 1):
        trees = drafter.propose([seq], [ROOM])
        scores = target.score([seq], trees, drafter.needs)
        verdict = Verdict.of([[]], [5], "cpu")  # something else is committed, so that only the window teaches
        target.commit([seq], trees, verdict)
        drafter.observe([seq], trees, scores, verdict)
        seq.tokens.append(5)
    for column in drafter._sequences[0].window:
        first, *rest = column
        assert rest == [(first + i) % VOCAB for i in range(1, LEVELS)]
        grams = drafter._sequences[0].pool.after((first - 1) % VOCAB)
        assert tuple((first + i) % VOCAB for i in range(LEVELS)) in grams
    seq.tokens.append((column[0] - 1) % VOCAB)
    ((tokens, _),) = as_lists(drafter.propose([seq], [Budget(3, 3)]))
    assert tokens[1:] == [(tokens[0] + i) % VOCAB for i in range(1, 4)]


def test_the_window_is_left_out_where_nodes_are_dear_or_few() -> None:
    drafter, seq = LookaheadDrafter(), FakeSeq(0, [*range(30)])
    dear = tuple(1.0 + 0.2 * n for n in range(ROOM.nodes + 1))
    cheap = tuple(1.0 + 0.005 * n for n in range(ROOM.nodes + 1))
    priced = [Budget(ROOM.nodes, 12, 3, price) for price in (dear, cheap)]
    sizes = [drafter.propose([seq], [budget]).nodes for budget in (ROOM, Budget(8, 12), Budget(30, 4), *priced)]
    assert [size > 1 for size in sizes] == [True, False, False, False, True]


def test_a_pool_keeps_the_most_recent_and_learns_how_far_to_trust_them() -> None:
    pool = Pool()
    for last in range(12):
        pool.add([1, 2, last])
    assert len(pool.after(1)) == 7
    assert pool.after(1)[0] == (2, 11)
    pool.add([1, 2, 8])
    assert pool.after(1)[:2] == [(2, 8), (2, 11)]
    before = pool.rate(0, 0), pool.rate(0, 1)
    for _ in range(50):
        pool.count(1, [2, 8])
    assert pool.rate(0, 0) > before[0]
    assert pool.rate(1, 0) > 0.3
    for _ in range(200):
        pool.count(1, [9])
    assert pool.rate(0, 0) < 0.2


def test_forgets_and_takes_a_prompt_of_one_token() -> None:
    drafter, seq = LookaheadDrafter(), FakeSeq(5, [1])
    trees = drafter.propose([seq], [Budget(0, 0)])
    drafter.observe([seq], trees, Scores(None), Verdict.of([[]], [3], "cpu"))
    drafter.forget(seq)
    assert not drafter._sequences
