"""The gradient that is written down is the one that autograd finds, chunk by chunk or whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.drafters.heads.formats import DraftVocabulary
from forerun.train.data.corpus import Batch
from forerun.train.recipes.base import LawLoss, learnt_rows, read_teacher


def plainly(loss: LawLoss, rows: Tensor, head: Tensor, truth: Tensor, truth_head: Tensor, weights: Tensor) -> Tensor:
    """The definitions, with all logits in memory."""
    log_q = (rows @ head.t()).log_softmax(-1)
    p = (truth @ truth_head.t()).softmax(-1)
    kl = (p * (p.log() - log_q)).sum(-1)
    if loss.kind == "lk_hybrid":
        accepted = torch.minimum(p, log_q.exp()).sum(-1)
        share = (-3 * accepted).exp().detach()
        kl = share * kl + (1 - share) * (1 - accepted)
    if loss.top_weight:
        best = p.topk(loss.top_k)
        kl = kl - loss.top_weight * (best.values * log_q.gather(-1, best.indices)).sum(-1)
    return (kl * weights).sum()


@pytest.mark.parametrize("loss", [LawLoss(), LawLoss("lk_hybrid"), LawLoss(top_k=3, top_weight=2.0)])
@pytest.mark.parametrize("chunk", [4, 100])
def test_the_gradient(loss: LawLoss, chunk: int) -> None:
    torch.manual_seed(0)
    rows, head = torch.randn(10, 6, dtype=torch.double), torch.randn(12, 6, dtype=torch.double)
    truth, truth_head = torch.randn(10, 5, dtype=torch.double), torch.randn(12, 5, dtype=torch.double)
    weights = torch.rand(10, dtype=torch.double) * (torch.arange(10) != 3)
    found = []
    for way in ("ours", "plain"):
        a, b = rows.clone().requires_grad_(), head.clone().requires_grad_()
        if way == "ours":
            total = loss.of_rows(a, b, truth, truth_head, weights, chunk)[0].sum()
        else:
            total = plainly(loss, a, b, truth, truth_head, weights)
        (total * 0.7).backward()
        found.append((total.detach().float(), a.grad.float(), b.grad.float()))  # type: ignore[union-attr]
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_a_perfect_head_loses_nothing_and_accepts_everything() -> None:
    rows, head = torch.randn(5, 6), torch.randn(9, 6)
    losses, accepted = LawLoss().of_rows(rows, head, rows, head, torch.ones(5))
    assert float(losses.sum()) == pytest.approx(0.0, abs=1e-5)
    assert float(accepted.sum()) == pytest.approx(5.0, abs=1e-4)


def test_a_frozen_head_gets_no_gradient() -> None:
    rows, head = torch.randn(5, 6, requires_grad=True), torch.randn(9, 6)
    LawLoss().of_rows(rows, head, torch.randn(5, 6), head, torch.ones(5))[0].sum().backward()
    assert rows.grad is not None
    assert head.grad is None


def test_only_rows_before_a_token_to_be_learnt_need_the_targets_argmax() -> None:
    """What a loss may look at is the same, whether all rows were asked for or those of the batch."""
    made = torch.Generator().manual_seed(1)
    last, head = torch.randn(3, 12, 8, generator=made), torch.randn(40, 8, generator=made)
    vocabulary = DraftVocabulary.most_frequent(torch.arange(40), 15)
    learnt = torch.zeros(3, 12, dtype=torch.bool)
    learnt[0, 4:9] = learnt[1, 1:] = learnt[2, 11:] = True
    batch = Batch(torch.zeros(3, 12, dtype=torch.long), learnt)
    everywhere, asked = (read_teacher(({}, last), head, vocabulary, one, chunk=5).inside for one in (None, batch))
    assert everywhere is not None
    assert asked is not None
    truth = torch.isin((last @ head.t()).argmax(-1), vocabulary.ids)
    assert torch.equal(everywhere, truth)
    before = torch.nn.functional.pad(learnt[:, 1:], (0, 1))
    assert 0 < (truth & before).sum() < before.sum()
    assert torch.equal(asked, truth & before)
    for shift in range(4):
        spoken = learnt_rows(batch, shift) + shift
        assert torch.equal(asked.flatten()[spoken], truth.flatten()[spoken])
