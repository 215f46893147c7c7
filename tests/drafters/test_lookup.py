"""Drafters to derive from: what BaseDrafter and LookupDrafter say of themselves, and how a lookup is composed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.core.types import FREE, Budget, Needs, Offer, Seq, TreeBatch
from forerun.drafters.base import (
    AT_HAND,
    NEGLIGIBLE,
    BaseDrafter,
    Drafter,
    DrafterClass,
    LookupDrafter,
    NoDrafter,
    Parts,
)
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.testing import FakeSeq, ScriptedDrafter, TableLM, check_drafter
from tests.drafters.rounds import as_lists


class Rising(LookupDrafter):
    """Counts up from the last token, with a confidence that is set."""

    def __init__(self, rate: float = 0.9, vocab: int = 1 << 20) -> None:
        self.rate, self.vocab = rate, vocab

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        for i in range(length if self.rate else 0):
            yield (seq.tokens[-1] + 1 + i) % self.vocab, self.rate

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        rows = []
        for seq, budget in zip(seqs, budgets, strict=True):
            chain = [token for token, _ in self.chain(seq, min(budget.nodes, budget.depth))]
            rows.append([seq.tokens[-1], *chain])
        return TreeBatch.chains(rows)


def nines(cost: float) -> ScriptedDrafter:
    return ScriptedDrafter(lambda seq, budget: ([seq.tokens[-1], 9, 9], [-1, 0, 1]), cost=cost)


def test_a_drafter_needs_to_propose_and_nothing_else() -> None:
    with pytest.raises(TypeError, match="propose"):
        BaseDrafter()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="chain"):
        LookupDrafter()  # type: ignore[abstract]
    plain = NoDrafter()
    assert isinstance(plain, Drafter)
    assert isinstance(NoDrafter, DrafterClass)
    assert plain.needs == Needs(match_length=0)
    assert BaseDrafter.offer(plain, FakeSeq(0, [1])) is FREE
    plain.forget(FakeSeq(0, [1]))


def test_parts_say_what_is_missing() -> None:
    bare = Parts(TableLM(8), None, SpeculativeConfig())
    with pytest.raises(InvalidInput, match="'toy' needs a trained head; pass draft_model=FOLDER"):
        bare.head_folder("toy")
    with pytest.raises(InvalidInput, match="'toy' needs a second checkpoint; pass draft_model=NAME"):
        bare.checkpoint("toy")
    draft = TableLM(8)
    parts = Parts(TableLM(8), draft, SpeculativeConfig(draft_model="folder"))
    assert parts.head_folder("toy").name == "folder"
    assert parts.checkpoint("toy") is draft


def test_a_lookup_offers_what_its_chain_is_worth() -> None:
    offer = Rising(0.5).offer(FakeSeq(0, [1]))
    assert offer == Offer(free=(0.5, 0.25, 0.125, 0.0625))  # the next is negligible
    assert 0.5**5 < NEGLIGIBLE < 0.5**4
    assert len(Rising(1.0).offer(FakeSeq(0, [1])).free) == AT_HAND
    assert Rising(0.0).offer(FakeSeq(0, [1])) == Offer()
    assert Rising(0.7).confidence(FakeSeq(0, [1])) == 0.7
    assert Rising(0.0).confidence(FakeSeq(0, [1])) == 0.0


def test_the_contract_of_compositions_of_lookups() -> None:
    check_drafter(lambda: Rising(vocab=24), vocab_size=24)
    check_drafter(lambda: HybridDrafter(NgramDrafter(), Rising(vocab=24)), vocab_size=24)
    check_drafter(lambda: HybridDrafter(Rising(vocab=24), NoDrafter()), vocab_size=24)


def test_whoever_looks_things_up_goes_first() -> None:
    lookup, other = Rising(), nines(0.5)
    for composed in (HybridDrafter.compose(lookup, other), HybridDrafter.compose(other, lookup)):
        assert isinstance(composed, HybridDrafter)
        assert composed.first is lookup
        assert composed.second is other
    two = HybridDrafter.compose(lookup, NgramDrafter())
    assert isinstance(two, HybridDrafter)
    assert two.first is lookup


@pytest.mark.parametrize(("first", "second", "drafts"), [(0.9, 0.6, 2), (0.6, 0.9, 101)])
def test_of_two_lookups_the_surer_one_is_offered_and_drafts(first: float, second: float, drafts: int) -> None:
    class Hundred(Rising):
        def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
            for token, rate in super().chain(seq, length):
                yield token + 99, rate

    drafter, seq = HybridDrafter(Rising(first), Hundred(second)), FakeSeq(0, [1])
    offer = drafter.offer(seq)
    assert not offer.costs
    assert offer.free[0] == max(first, second)
    trees = drafter.propose([seq], [Budget(2, 2, source="free")])
    assert as_lists(trees)[0][0][1] == drafts


def test_a_lookup_with_nothing_to_say_leaves_the_round_to_one_that_costs_nothing() -> None:
    silent = HybridDrafter(Rising(0.0), nines(0.0))
    seq = FakeSeq(0, [1])
    assert silent.offer(seq) == Offer()
    for source in ("free", "any"):
        trees = silent.propose([seq], [Budget(2, 2, source=source)])  # type: ignore[arg-type]
        assert as_lists(trees)[0][0] == [1, 9, 9]


def test_what_is_free_is_never_taken_from_a_drafter_that_costs() -> None:
    drafter, seq = HybridDrafter(Rising(0.0), nines(0.5)), FakeSeq(0, [1])
    assert drafter.offer(seq).costs
    assert drafter.propose([seq], [Budget(2, 2, source="free")]).is_plain()
    assert as_lists(drafter.propose([seq], [Budget(2, 2, level=0.1, source="costly")]))[0][0] == [1, 9, 9]


@pytest.mark.parametrize(
    ("budget", "runs"),
    [
        (Budget(0, 0), False),
        (Budget(3, 0), False),
        (Budget(3, 2), True),
        (Budget(3, 2, source="free"), False),
        (Budget(3, 2, level=0.1, source="costly"), True),
    ],
)
def test_when_a_drafter_that_costs_may_run(budget: Budget, runs: bool) -> None:
    assert budget.runs == runs
