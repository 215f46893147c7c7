"""Two drafters of any kind: the better record drafts, the other is tried again, and the text is the plain one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.core.types import CUT, Budget, Needs, Offer, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.compose import EitherDrafter
from forerun.testing import FakeSeq, LawDrafter, ScriptedDrafter, TableLM, check_drafter
from tests.drafters.rounds import as_lists

CHAIN = Budget(2, 2)


def says(token: int, cost: float = 0.5, layers: tuple[int, ...] = ()) -> ScriptedDrafter:
    """Always a chain of one token."""

    def script(seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
        return [seq.tokens[-1], token, token], [-1, 0, 1]

    return ScriptedDrafter(script, needs=Needs(layers), cost=cost)


def pair() -> tuple[EitherDrafter, ScriptedDrafter, ScriptedDrafter]:
    first, second = says(5, cost=0.5, layers=(1,)), says(6, cost=0.25, layers=(-1,))
    return EitherDrafter(first, second), first, second


def judge(drafter: EitherDrafter, seqs: Sequence[FakeSeq], accepted: Sequence[int]) -> list[int]:
    """One round in which so many of each chain's tokens are accepted; which token each was drafted with."""
    trees = drafter.propose(seqs, [CHAIN] * len(seqs))
    drafter.observe(seqs, trees, Scores(None), Verdict.of([range(1, n + 1) for n in accepted], [0] * len(seqs), "cpu"))
    return [tokens[1] for tokens, _ in as_lists(trees)]


def test_the_contract() -> None:
    laws = [TableLM(24, order=1, seed=seed).law for seed in (3, 4)]
    check_drafter(lambda: EitherDrafter(*(LawDrafter(law, "sampled") for law in laws)), vocab_size=24)


def test_it_needs_what_both_need() -> None:
    assert pair()[0].needs == Needs((-1, 1))


def test_the_first_begins_and_a_better_second_takes_over() -> None:
    drafter, _, _ = pair()
    seq = FakeSeq(0, [1, 2])
    assert judge(drafter, [seq], [0]) == [5]
    assert judge(drafter, [seq], [2]) == [6]  # the second's prior is now the better record
    assert judge(drafter, [seq], [2]) == [6]


def test_a_drafter_that_rests_is_tried_again_when_the_other_fails() -> None:
    drafter, _, _ = pair()
    seq = FakeSeq(0, [1, 2])
    drafted = [judge(drafter, [seq], [0])[0] for _ in range(40)]
    assert set(drafted) == {5, 6}
    assert drafted.count(5) > 5
    assert drafted.count(6) > 5


def test_sequences_have_records_of_their_own() -> None:
    drafter, _, _ = pair()
    good, bad = FakeSeq(0, [1]), FakeSeq(1, [2])
    assert judge(drafter, [good, bad], [2, 0]) == [5, 5]
    assert judge(drafter, [good, bad], [2, 2]) == [5, 6]
    assert judge(drafter, [bad, good], [2, 2]) == [6, 5]  # in any order


def test_the_offer_is_that_of_the_one_whose_turn_it_is() -> None:
    drafter, _, _ = pair()
    seq = FakeSeq(0, [1, 2])
    assert drafter.offer(seq) == Offer((0.5,), chosen=False)
    judge(drafter, [seq], [0])
    assert drafter.offer(seq) == Offer((0.25,), chosen=False)


class Sure(ScriptedDrafter):
    """Expects two tokens of every draft."""

    def offer(self, seq: Seq) -> Offer:
        return Offer((0.5,), expected=2.0)


def test_what_was_expected_counts_only_for_who_drafted() -> None:
    sure = Sure(lambda seq, budget: ([seq.tokens[-1], 5], [-1, 0]))
    drafter, seq = EitherDrafter(sure, says(6)), FakeSeq(0, [1, 2])
    assert drafter.offer(seq).expected is None  # it has drafted nothing yet
    judge(drafter, [seq], [1])
    assert drafter.offer(seq).expected == 2.0


def test_rounds_without_a_draft_leave_the_records_alone() -> None:
    drafter, _, _ = pair()
    seq = FakeSeq(0, [1, 2])
    for _ in range(30):
        trees = drafter.propose([seq], [Budget(0, 0)])
        assert trees.is_plain()
        drafter.observe([seq], trees, Scores(None), Verdict.of([[]], [0], "cpu"))
    assert judge(drafter, [seq], [2]) == [5]


def test_both_are_shown_every_round_and_forget() -> None:
    drafter, first, second = pair()
    seqs = [FakeSeq(0, [1]), FakeSeq(1, [2])]
    judge(drafter, seqs, [1, 2])
    assert first.observed == second.observed == [(0, 1), (1, 2)]
    prompt = TreeBatch.chains([[1, 2, 3]])
    drafter.observe([FakeSeq(7, [1, 2, 3, 4])], prompt, Scores(None), Verdict.whole_chain(prompt, [4]))
    for seq in seqs:
        drafter.forget(seq)
    assert first.forgotten == second.forgotten == [0, 1]
    assert not drafter._sequences


def test_what_a_device_has_cut_counts_against_nobody() -> None:
    """Neither a tree that was cut to its root, nor the levels that are not there."""
    drafter, _, _ = pair()
    seq = FakeSeq(0, [1, 2])
    for tokens, path in (([2, CUT, CUT], []), ([2, 5, CUT], [1])) * 4:
        drafter.propose([seq], [CHAIN])
        trees = TreeBatch(torch.tensor(tokens), torch.tensor([-1, 0, 1]), (0, 3), form=TreeForm(1, 3, 2, 1))
        drafter.observe([seq], trees, Scores(None), Verdict.of([path], [0], "cpu"))
    assert judge(drafter, [seq], [0]) == [5], "it was right whenever it drafted"
