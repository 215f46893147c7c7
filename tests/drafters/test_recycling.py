"""Token recycling: what is kept of a pass, what is drafted from it, and whom it belongs to."""

from __future__ import annotations

import torch

from forerun.core.types import Budget, Scores, TreeBatch, Verdict
from forerun.drafters.lookup import recycling
from forerun.drafters.lookup.recycling import RecyclingDrafter, Table
from forerun.testing import FakeSeq, TableLM, check_drafter
from tests.drafters.rounds import as_lists, observe_prompts, play

VOCAB = 12


def logits_of(*rows: dict[int, float]) -> Scores:
    """A row of logits per node: log of the shares given, the rest impossible."""
    logits = torch.full((len(rows), VOCAB), -30.0)
    for i, row in enumerate(rows):
        for token, share in row.items():
            logits[i, token] = torch.tensor(share).log()
    return Scores(logits)


def after_a_pass(seq: FakeSeq, rows: list[dict[int, float]], tree: tuple[list[int], list[int]]) -> RecyclingDrafter:
    drafter = RecyclingDrafter()
    trees = TreeBatch.trees([tree])
    drafter.observe([seq], trees, logits_of(*rows), Verdict.of([[]], [7], "cpu"))
    seq.tokens.append(7)
    return drafter


def test_the_contract() -> None:
    check_drafter(RecyclingDrafter, vocab_size=9)
    check_drafter(lambda: RecyclingDrafter(shared=True), vocab_size=9, rounds=16)


def test_rejected_nodes_are_learnt_from_too() -> None:
    seq = FakeSeq(0, [1, 2])
    # 2 -> 7 was drawn; 5 was drafted after it in vain, and the target would have gone on with 6
    drafter = after_a_pass(seq, [{7: 0.9, 5: 0.1}, {6: 1.0}], ([2, 5], [-1, 0]))
    seq.tokens.append(2)
    tokens, _ = as_lists(drafter.propose([seq], [Budget(3, 3)]))[0]
    assert tokens == [2, 7]  # what follows 7 is not known
    wide, parents = as_lists(drafter.propose([seq], [Budget(4, 3, width=3)]))[0]
    assert wide == [2, 7, 5, 6]
    assert parents == [-1, 0, 0, 2]


def test_two_tokens_are_asked_before_one() -> None:
    table = Table()
    table.learn(1, 2, ((3, 5),))
    table.learn(9, 2, ((4, 5),))
    assert [token for token, _ in table.after(1, 2)] == [3]
    assert [token for token, _ in table.after(8, 2)] == [4]  # the last that was seen after any token
    assert table.after(8, 7) == []


def test_a_prompt_teaches_what_it_holds() -> None:
    drafter, seq = RecyclingDrafter(), FakeSeq(0, [1, 2, 3, 1, 2])
    observe_prompts(drafter, TableLM(VOCAB), [seq])
    assert drafter.propose([seq], [Budget(2, 2)]).tokens.tolist() == [2, 3, 1]


def test_how_likely_a_successor_was_decides_how_far_it_is_trusted() -> None:
    seq = FakeSeq(0, [1, 2])
    sure = after_a_pass(FakeSeq(0, [1, 2]), [{7: 0.99}], ([2], [-1]))
    unsure = after_a_pass(FakeSeq(0, [1, 2]), [dict.fromkeys(range(10), 0.1)], ([2], [-1]))
    assert sure.offer(seq).free[0] > 0.6 > 0.2 > unsure.offer(seq).free[0]


def test_rates_follow_what_came() -> None:
    table = Table()
    for _ in range(200):
        table.learn(1, 2, ((3, 10),))
        table.count(1, 2, 4)
    assert table.after(1, 2)[0][1] < 0.1
    for _ in range(400):
        table.count(1, 2, 3)
    assert table.after(1, 2)[0][1] > 0.4


def test_what_is_kept_is_bounded_and_belongs_to_one_request() -> None:
    drafter, target = RecyclingDrafter(), TableLM(VOCAB)
    seqs = [FakeSeq(0, [1, 2, 3]), FakeSeq(1, [4, 5])]
    observe_prompts(drafter, target, seqs)
    play(drafter, target, seqs, [Budget(4, 4, width=2)] * 2, 10, 0)
    fresh = FakeSeq(2, list(seqs[0].tokens))
    assert drafter.propose([fresh], [Budget(4, 4, width=2)]).is_plain()
    shared, target = RecyclingDrafter(shared=True), TableLM(VOCAB)
    seqs = [FakeSeq(0, [1, 2, 3], cache_salt="a")]
    observe_prompts(shared, target, seqs)
    play(shared, target, seqs, [Budget(4, 4, width=2)], 10, 0)
    shared.forget(seqs[0])
    drafter.forget(seqs[0])
    assert 0 not in drafter._tables
    table = Table()
    for i in range(recycling.MOST_CONTEXTS):
        table.learn(i, i + 1, ())
    assert len(table) == recycling.MOST_CONTEXTS
