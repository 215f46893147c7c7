"""Reduced draft vocabularies, and how a head's logits are read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.noise import coupling_key, exponential
from forerun.core.params import SamplingParams
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.model import draft_law
from forerun.drafters.model.draft_law import SHARPER, DraftLaw, KernelDraftLaw, likeliest
from forerun.testing import FakeSeq

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_files_hold_offsets_and_a_mask(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    made = DraftVocabulary.most_frequent(torch.tensor(counts), size)
    tensors = made.tensors()
    assert tensors["t2d"].nonzero().flatten().tolist() == made.ids.tolist()
    assert (torch.arange(size) + tensors["d2t"]).tolist() == made.ids.tolist()
    again = DraftVocabulary.from_file(tensors, size, len(counts))
    assert torch.equal(again.ids, made.ids)
    left_out = [count for i, count in enumerate(counts) if i not in made.ids.tolist()]
    assert max(left_out, default=0) <= min(counts[i] for i in made.ids.tolist())


def test_the_lowest_id_wins_a_tie_and_some_are_always_kept() -> None:
    counts = torch.tensor([5, 1, 5, 5, 0])
    assert DraftVocabulary.most_frequent(counts, 2).ids.tolist() == [0, 2]
    assert DraftVocabulary.most_frequent(counts, 3, always=[4]).ids.tolist() == [0, 2, 4]
    for size in (0, 6):
        with pytest.raises(InvalidInput, match="1 to the target's 5"):
            DraftVocabulary.most_frequent(counts, size)


@pytest.mark.parametrize(
    ("offsets", "rows"),
    [([0, 0, 1], 4), ([0, -1], 2), ([-1, 0], 2), ([0, 9], 2), ([3, 1], 2)],
    ids=["other rows", "not ascending", "below 0", "beyond", "ids, not offsets"],
)
def test_offsets_that_cannot_be_right_are_refused(offsets: list[int], rows: int) -> None:
    with pytest.raises(DamagedFile, match="it holds offsets"):
        DraftVocabulary.from_file({"d2t": torch.tensor(offsets)}, rows, 8)


def test_without_offsets_all_ids_must_be_there() -> None:
    assert DraftVocabulary.from_file({}, 8, 8).is_whole
    with pytest.raises(DamagedFile, match="which ids are they"):
        DraftVocabulary.from_file({}, 6, 8)


def test_logits_are_spread_over_the_targets_ids() -> None:
    some, whole = DraftVocabulary(torch.tensor([1, 4]), 6), DraftVocabulary.whole(6)
    logits = torch.tensor([[0.5, -2.0]])
    spread = some.spread(logits)
    assert spread[0, [1, 4]].tolist() == [0.5, -2.0]
    assert torch.isinf(spread[0, [0, 2, 3, 5]]).all()
    assert not some.is_whole
    assert len(some) == 2
    full = torch.randn(1, 6)
    assert whole.spread(full) is full
    head = torch.randn(6, 3)
    assert whole.rows_of(head) is head
    assert torch.equal(some.rows_of(head), head[[1, 4]])
    assert torch.equal(some.to(CPU).ids, some.ids)


def seq(temperature: float = 0.0, shares_noise: bool = False, seed: int = 3) -> FakeSeq:
    return FakeSeq(0, [1, 2, 3], params=SamplingParams(temperature=temperature), seed=seed, shares_noise=shares_noise)


VOCABULARY = DraftVocabulary(torch.tensor([0, 2, 3, 7]), 9)


def test_greedy_sequences_are_read_as_they_are() -> None:
    logits = torch.randn(2, 3, 4)
    law = DraftLaw([seq(), seq(shares_noise=True)], VOCABULARY, CPU)
    assert law.applied(logits, 1) is logits


def test_a_temperature_divides() -> None:
    logits = torch.randn(2, 3, 4)
    law = DraftLaw([seq(2.0), seq()], VOCABULARY, CPU)
    applied = law.applied(logits, 0)
    torch.testing.assert_close(applied[0], logits[0] / 2.0)
    torch.testing.assert_close(applied[1], logits[1])


def test_shared_noise_is_that_of_the_position_and_of_the_targets_ids() -> None:
    logits = torch.randn(1, 2, 4)
    noisy = seq(1.0, shares_noise=True)
    for level in (0, 2):
        noise = exponential(noisy.seed, len(noisy.tokens) + level, 9, CPU)[VOCABULARY.ids].log()
        applied = DraftLaw([noisy], VOCABULARY, CPU).applied(logits, level)
        torch.testing.assert_close(applied, logits * SHARPER - noise)


def test_kernels_get_the_same_as_factors_and_keys() -> None:
    hot, cold, noisy = seq(0.5), seq(), seq(1.0, shares_noise=True, seed=8)
    law = KernelDraftLaw([hot, cold, noisy])
    assert law.scales([2, 1, 1]) == [2.0, 2.0, 1.0, SHARPER]
    assert law.is_noisy
    assert law.noise([2, 1, 3], 1) == ([coupling_key(8, 4)], [-1, -1, -1, 0, 0, 0])
    plain = KernelDraftLaw([cold, seq(1.0)])
    assert plain.scales([1, 1]) is None
    assert not plain.is_noisy


@pytest.mark.parametrize("kernels", [True, False])
def test_the_likeliest_are_those_of_the_law(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(draft_law.native, "available", lambda: False)
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    values, rows = likeliest(logits, 4)
    law = logits.log_softmax(-1)
    wanted = law.topk(4)
    assert torch.equal(rows, wanted.indices)
    torch.testing.assert_close(values, wanted.values, atol=1e-5, rtol=0)
    certain = torch.full((1, 1, 5), -1e9)
    certain[..., 3] = 0.0
    best, where = likeliest(certain, 1)
    assert (float(best), int(where)) == (0.0, 3)
