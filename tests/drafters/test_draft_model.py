"""A second model as the drafter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Needs, Request, Scores, Seq, TreeBatch
from forerun.drafters.base import Parts
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.testing import FakeSeq, TableLM, check_drafter


@pytest.mark.parametrize("draft_vocab", [9, 7, 12])  # the same, fewer ids, more ids (padding)
def test_the_contract(draft_vocab: int) -> None:
    check_drafter(lambda: ModelDrafter(TableLM(vocab_size=draft_vocab), vocab_size=9), vocab_size=9)


def test_needs_a_second_checkpoint() -> None:
    with pytest.raises(InvalidInput, match="draft_model=NAME"):
        ModelDrafter.build(Parts(TableLM(vocab_size=4), None, SpeculativeConfig()))


def test_a_perfect_draft_is_accepted_whole() -> None:
    engine = make_engine(
        TableLM(vocab_size=30),
        frozenset(),
        SpeculativeConfig(drafter="draft_model", budget=4, controller="fixed"),
        draft_target=TableLM(vocab_size=30),
    )
    seq_id = engine.submit(Request((1, 2, 3), SamplingParams(max_tokens=20)))
    seq = engine.find(seq_id)
    assert seq is not None
    while engine.busy:
        engine.step()
    assert seq.stats.rounds == 4  # five tokens a round: four drafted, one of the target's own
    assert seq.stats.accepted_per_position == [1.0] * 4


def test_nothing_is_read_twice() -> None:
    """A perfect draft: a round feeds the draft model its own last guess and the target's token, and its new guesses."""
    fed: list[int] = []

    class Counting(TableLM):
        def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs) -> Scores:
            fed.append(trees.nodes)
            return super().score(seqs, trees, needs)

    engine = make_engine(
        TableLM(vocab_size=30),
        frozenset(),
        SpeculativeConfig(drafter="draft_model", budget=4, controller="fixed"),
        draft_target=Counting(vocab_size=30),
    )
    engine.submit(Request((1, 2, 3), SamplingParams(max_tokens=20)))
    while engine.busy:
        engine.step()
    assert fed == [1, 1, 1, 1, *[2, 1, 1, 1] * 3]


def test_sampled_tokens_carry_the_law_they_were_drawn_from() -> None:
    draft = TableLM(vocab_size=8)
    seq = FakeSeq(0, [1, 2, 3], params=SamplingParams(temperature=0.7), seed=5)
    trees = ModelDrafter(draft, 8).propose([seq], [Budget(4, 2, width=2)])
    assert trees.drawn_from is not None
    assert not trees.drawn_from.replace
    law = (draft.logits(seq.tokens) / 0.7).softmax(-1)
    torch.testing.assert_close(trees.drawn_from.laws[0], law)
    assert trees.drawn_from.rows.tolist()[1:3] == [0, 0]


def test_it_says_what_reading_the_text_would_cost_and_forgets_that_when_it_is_read() -> None:
    drafter = ModelDrafter(TableLM(vocab_size=30), vocab_size=30)
    seq = FakeSeq(0, [i % 30 for i in range(40)])
    before = drafter.offer(seq)
    assert before.start > 0
    assert before.level > 0  # never taken for free, measured or not
    assert not before.chosen
    drafter.propose([seq], [Budget(2, 2)])
    assert drafter.offer(seq).start == 0.0
    assert drafter.offer(FakeSeq(1, [1, 2, 3] * 20)).start > drafter.offer(FakeSeq(2, [1, 2, 3] * 10)).start > 0


def test_of_equally_likely_tokens_the_lowest_is_drafted() -> None:
    """As drafts on a device have it, where kernels choose."""

    class Undecided(TableLM):
        def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs) -> Scores:
            return Scores(torch.zeros_like(super().score(seqs, trees, needs).required_logits))

    seqs = [FakeSeq(b, [1, 2, 3], max_length=40) for b in range(2)]
    drafter = ModelDrafter(Undecided(vocab_size=9), vocab_size=9)
    trees = drafter.propose(seqs, [Budget(3, 3)] * 2)
    assert trees.tokens.tolist() == [3, 0, 0, 0] * 2
    assert trees.parents.tolist() == [-1, 0, 1, 2] * 2
