"""The hybrid drafter: who drafts, who learns, and that nothing but speed depends on it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Offer, Request, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.plan import DraftMenu
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.testing import FakeSeq, LawDrafter, ScriptedDrafter, TableLM, check_drafter

CHAIN = Budget(3, 3)


def nines(seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
    """A chain of nines: easy to tell from what n-gram would copy."""
    return [seq.tokens[-1], 9, 9, 9], [-1, 0, 1, 2]


def hybrid(cost: float = 0.5) -> tuple[HybridDrafter, ScriptedDrafter]:
    second = ScriptedDrafter(nines, cost=cost)
    return HybridDrafter(NgramDrafter(), second), second


def judge(drafter: HybridDrafter, seqs: Sequence[FakeSeq], accepted: Sequence[int]) -> TreeBatch:
    """One round in which so many of each chain's nodes stand."""
    trees = drafter.propose(seqs, [CHAIN] * len(seqs))
    verdict = Verdict.of([range(1, n + 1) for n in accepted], [0] * len(seqs), "cpu")
    drafter.observe(seqs, trees, Scores(None), verdict)
    return trees


def tokens_of(trees: TreeBatch, b: int) -> list[int]:
    return trees.tokens[trees.starts[b] : trees.starts[b + 1]].tolist()


COPY = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6]  # the end has been seen before, six tokens long
FRESH = [11, 12, 13, 14]


def test_copied_text_is_looked_up_and_the_rest_goes_to_the_second() -> None:
    drafter, _ = hybrid()
    seqs = [FakeSeq(0, [*FRESH]), FakeSeq(1, [*COPY]), FakeSeq(2, [*FRESH, 15])]
    trees = drafter.propose(seqs, [CHAIN] * 3)
    assert tokens_of(trees, 0) == [14, 9, 9, 9]
    assert tokens_of(trees, 1) == [6, 7, 8, 1]
    assert tokens_of(trees, 2) == [15, 9, 9, 9]


def test_beside_a_drafter_on_a_device_look_ups_are_made_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _ = hybrid()
    looked, offer = list[int](), drafter.first.offer
    monkeypatch.setattr(drafter.first, "offer", lambda seq: (looked.append(seq.id), offer(seq))[1])
    seqs = [FakeSeq(i, [*COPY]) for i in range(4)]
    judge(drafter, seqs, [3] * 4)
    assert {seq.id for seq in seqs if drafter.offer(seq).free} == {0, 1, 2, 3}, "no menu: the second runs on a host"
    looked.clear()
    monkeypatch.setattr(ScriptedDrafter, "offer", lambda *_: Offer((1e-4,), menu=DraftMenu()))
    assert not any(drafter.offer(seq).free for seq in seqs)
    trees = judge(drafter, seqs, [0] * 4)
    assert [tokens_of(trees, b)[1] for b in range(4)] == [9] * 4
    assert not looked
    for seq in seqs[2:]:
        drafter.forget(seq)
    assert all(drafter.offer(seq).free for seq in seqs[:2]), "few are left"
    assert tokens_of(drafter.propose(seqs[:2], [Budget(3, 3, source="free")] * 2), 0) == [6, 7, 8, 1]


def is_lookup(drafter: HybridDrafter, seq: FakeSeq, budget: Budget = CHAIN) -> bool:
    """Did n-gram draft this round?"""
    tokens = tokens_of(drafter.propose([seq], [budget]), 0)
    return len(tokens) > 1 and tokens[1] != 9


def test_the_controller_is_told_what_both_have_to_offer() -> None:
    drafter, _ = hybrid(cost=0.5)
    copying, fresh = (drafter.offer(FakeSeq(i, [*text])) for i, text in enumerate((COPY, FRESH)))
    assert copying.level == fresh.level == 0.5
    assert not copying.chosen  # nobody said that the second chooses its nodes
    assert copying.free[0] > 0.5
    assert list(copying.free) == sorted(copying.free, reverse=True)
    assert fresh.free == ()
    assert not hybrid(cost=0.0)[0].offer(FakeSeq(0, [1])).costs


def test_the_controllers_word_holds() -> None:
    drafter, _ = hybrid()
    seq = FakeSeq(0, [*COPY])
    assert is_lookup(drafter, seq, Budget(3, 3, source="free"))
    assert not is_lookup(drafter, seq, Budget(3, 3, level=0.2, source="costly"))
    nothing = drafter.propose([FakeSeq(1, [*FRESH])], [Budget(3, 3, source="free")])
    assert nothing.is_plain()


def test_a_second_that_is_always_right_takes_over_weak_matches() -> None:
    weak = [7, 3, 8, 5, 3]  # one token was seen before: a match of length one
    drafter, _ = hybrid()
    seq = FakeSeq(0, [*weak])
    for _ in range(12):
        seq.tokens = [*seq.tokens, 20 + len(seq.tokens)]  # nothing matches: the second's turn
        judge(drafter, [seq], [3])
    seq.tokens = [*seq.tokens, 3]
    assert not is_lookup(drafter, seq)
    for _ in range(30):
        seq.tokens = [*seq.tokens, 20 + len(seq.tokens)]
        judge(drafter, [seq], [0])
    seq.tokens = [*seq.tokens, 3]
    assert is_lookup(drafter, seq)


def test_where_the_second_may_not_draft_any_match_will_do() -> None:
    drafter, _ = hybrid()
    seq = FakeSeq(0, [5, 1, 2, 3, 4])
    drafter.propose([seq], [Budget(0, 0)])  # no match, so the second's turn, and it got nothing
    seq.tokens = [*seq.tokens, 5]
    assert tokens_of(drafter.propose([seq], [CHAIN]), 0)[:2] == [5, 1]


def test_everybody_is_shown_everything_and_forgets() -> None:
    drafter, second = hybrid()
    seqs = [FakeSeq(0, [*FRESH]), FakeSeq(1, [*COPY])]
    judge(drafter, seqs, [1, 2])
    assert second.observed == [(0, 1), (1, 2)]
    for seq in seqs:
        drafter.forget(seq)
    assert second.forgotten == [0, 1]
    assert not drafter._sequences


def test_plan_and_proposal_agree_on_the_route() -> None:
    drafter, _ = hybrid(cost=0.05)
    cost = CostModel({1: 1.0, 16: 1.3})
    controller = AdaptiveController(cost, 6, 1, drafter.offer)
    seqs = [FakeSeq(0, [*COPY]), FakeSeq(1, [*FRESH])]
    copying, fresh = controller.plan(seqs)
    assert copying.source == "free"
    assert copying.price is not None  # n-gram cuts its own tree
    assert fresh.source == "costly"
    assert fresh.price is None
    trees = drafter.propose(seqs, [copying, fresh])
    assert tokens_of(trees, 0)[1:2] == [7]
    assert tokens_of(trees, 1)[1:2] == [9]


def test_doubles_that_cost_something_may_sample() -> None:
    seq = FakeSeq(0, [1])
    assert ScriptedDrafter(nines, cost=0.5).offer(seq) == Offer((0.5,), chosen=False)
    assert ScriptedDrafter(nines).offer(seq) == Offer()


def test_it_keeps_the_contract_of_drafters() -> None:
    law = TableLM(24, order=1, seed=3).law
    check_drafter(lambda: HybridDrafter(NgramDrafter(), LawDrafter(law, "sampled")), vocab_size=24)


def test_the_text_is_the_plain_loops_at_every_temperature() -> None:
    def write(drafter: str, temperature: float) -> list[int]:
        speculative = SpeculativeConfig(drafter, budget=4, controller="fixed")
        target, draft = TableLM(16, order=1, seed=5), TableLM(16, order=1, seed=5, sharpness=1.2)
        engine = make_engine(target, frozenset(), speculative, draft_target=draft)
        params = SamplingParams(40, temperature=temperature, seed=None if temperature == 0 else 7)
        seq = engine.find(engine.submit(Request((1, 2, 3), params)))
        assert seq is not None
        while engine.busy:
            engine.step()
        return seq.tokens

    with torch.no_grad():
        for temperature in (0.0, 0.8):
            assert write("ngram+draft_model", temperature) == write("none", temperature)


def test_beside_a_device_a_few_are_looked_up_every_round_and_a_crowd_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is at work meanwhile, and every look-up is scored; of a crowd they would take the host too long."""
    drafter, _ = hybrid()
    looked, offer = list[int](), drafter.first.offer
    monkeypatch.setattr(drafter.first, "offer", lambda seq: (looked.append(seq.id), offer(seq))[1])
    monkeypatch.setattr(ScriptedDrafter, "offer", lambda *_: Offer((1e-4,), menu=DraftMenu()))
    seqs, costly = [FakeSeq(i, [*COPY]) for i in range(4)], Budget(3, 3, source="costly")
    for count, wanted in ((2, 40), (4, 0)):
        some = seqs[:count]
        drafter.propose(some, [costly] * count)
        looked.clear()
        for _ in range(20):
            for seq in some:
                drafter.offer(seq)
                seq.tokens = [*seq.tokens, 1 + len(seq.tokens) % 8]
        assert len(looked) == wanted


def test_what_is_asked_of_a_sequence_that_has_ended_keeps_nothing() -> None:
    """An engine asks which device drafts for a round under way; how many sequences are known decides about look-ups."""
    drafter, _ = hybrid()
    seq = FakeSeq(1, FRESH)
    judge(drafter, [seq], [1])
    drafter.forget(seq)
    drafter._decides = True
    drafter.device([seq])
    assert not drafter._sequences
