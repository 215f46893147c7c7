"""Nodes that do not gain their price are left out of trees grown on the device: texts and laws stay, experts rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.types import CUT, Budget, Form, Needs, Round, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.device import eagle as draft_runner
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.growth import cut_trees
from forerun.drafters.device.head import make_net
from forerun.engine.engine import Engine
from forerun.engine.round import rejected_branches
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from forerun.verify.warp import warp
from tests.drafters.rounds import as_lists
from tests.gpu.heads import make_head, plain_drafter, settled
from tests.gpu.test_following import CHAIN, TREE, WIDE, Forms, Watched, make, plain_texts, requests, sampled, write
from tests.gpu.test_grown import _grown
from tests.gpu.test_moe import make_target

PRICE = tuple(0.015 * nodes**0.8 for nodes in range(21))


class Priced(Forms):
    """Forms whose nodes have a price; notes what was drafted."""

    def __init__(self, forms: Sequence[Form | None], price: tuple[float, ...] | None = PRICE) -> None:
        super().__init__(forms, 5)
        self.price, self.seen = price, list[tuple[int, int]]()

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        return [replace(budget, price=self.price) for budget in super().plan(seqs)]

    def observe(self, outcome: Round) -> None:
        self.seen += zip(outcome.drafted, outcome.depths, strict=True)


@pytest.fixture(scope="module")
def target() -> CudaDecoder:
    """A mixture that says few different tokens; what nobody has written is not a number."""
    target = make_target("mixtral", "cpu")
    target.model.head[8:] = 0.0
    target.kv.data.fill_(float("nan"))
    return target


def engine_of(target: CudaDecoder, forms: Forms, follows: bool = True) -> Engine:
    engine = make(target, forms, follows=follows)
    config, weights = make_head(target, borrows=True)
    plain = plain_drafter(target, config, weights)
    draft = HeadDraft(*make_net(config, weights, target, None), capture=False, cuts=True)
    engine.drafters.add("device", OnDevice(draft, lambda: plain))
    return engine


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("forms", [[WIDE], [CHAIN, TREE, WIDE, None]])
def test_texts_are_those_of_plain_decoding(
    forms: list[Form | None], target: CudaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = requests(9, 3)
    wanted, watched, priced = plain_texts(target, some), Watched(monkeypatch), Priced(forms)
    engine = engine_of(target, priced)
    assert write(engine, some, 5)[0] == wanted
    assert watched.followed > 10
    sizes = {form.nodes for form in forms if form is not None}
    assert {nodes for nodes, _ in priced.seen} - sizes - {0}, "trees of other sizes than their forms"
    assert engine.stats.drafted == sum(nodes for nodes, _ in priced.seen), "those that were left out do not count"
    assert all(depth <= nodes for nodes, depth in priced.seen)
    assert all(bool(depth) == bool(nodes) for nodes, depth in priced.seen)


@pytest.mark.parametrize("chain", [False, True])
def test_what_is_left_is_what_a_head_drafts_on_the_host(chain: bool) -> None:
    """By the same price: as many of the best nodes as gain most beyond it. No two words are as likely."""
    target = make_target("mixtral", "cpu")
    config, weights = make_head(target, borrows=True)
    plain, sizes = plain_drafter(target, config, weights), set[int]()
    draft = HeadDraft(*make_net(config, weights, target, None), capture=False, cuts=True)
    drafter, rng = OnDevice(draft, lambda: plain), random.Random(4)
    seqs = [FakeSeq(b, [rng.randrange(200) for _ in range(n)], max_length=900) for b, n in enumerate((2, 70))]
    trees, scores = target.prefill(seqs, drafter.needs)
    for one in (drafter, plain):
        one.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))
    form = CHAIN if chain else WIDE
    for each in (0.0001, 0.002, 0.004, 0.008, 0.01, 0.2):
        budgets = [Budget(*form.sizes, price=tuple(each * nodes for nodes in range(21)))] * 2
        grown, wanted = (one.propose(seqs, budgets) for one in (drafter, plain))
        for mine, theirs in zip(as_lists(grown), as_lists(wanted), strict=True):
            left = [i for i, token in enumerate(mine[0]) if token != CUT]
            parents = [left.index(mine[1][i]) if i else -1 for i in left]
            assert ([mine[0][i] for i in left], parents) == tuple(theirs)
            sizes.add(len(left))
    assert len(sizes) >= 2, "some are cut, some are not"


def test_negative_control_a_walk_that_enters_what_was_cut(target: CudaDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is something to enter: the target would often say what was left out, and its keys are nowhere."""
    some, whole = [one for one in requests(9, 3) if len(one.prompt) > 1], list[Tensor]()

    def cut(pool: Any, roots: Tensor, nodes: int, into: Tensor, **more: Any) -> None:
        cut_trees(pool, roots, nodes, into)
        whole[:] = [into[0].clone()]
        cut_trees(pool, roots, nodes, into, **more)

    monkeypatch.setattr(draft_runner, "cut_trees", cut)
    walk = target.grown.walk

    def enter(trees: Tensor, *more: Tensor) -> None:
        if whole[0].shape == trees[0].shape:
            trees[0] = torch.where(trees[0] == CUT, whole[0], trees[0])
        walk(trees, *more)

    wanted = plain_texts(target, some)
    assert write(engine_of(target, Priced([WIDE]), follows=False), some, 5)[0] == wanted
    monkeypatch.setattr(target.grown, "walk", enter)
    assert write(engine_of(target, Priced([WIDE]), follows=False), some, 5)[0] != wanted


def test_without_a_price_and_with_shared_noise_nothing_is_cut(target: CudaDecoder) -> None:
    for price, more in ((None, {}), (PRICE, {"temperature": 1.0, "seed": 3})):
        some, priced = requests(3, 4, **more), Priced([WIDE], price)
        assert write(engine_of(target, priced), some, 5)[0] == plain_texts(target, some)
        assert {nodes for nodes, _ in priced.seen} <= {0, WIDE.nodes}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("verifier", ["exact", "coupled"])
def test_sampled_texts_are_those_without_drafts(target: CudaDecoder, verifier: str) -> None:
    some = sampled(6, 7, verifier)
    assert write(engine_of(target, Priced([WIDE])), some, 5)[0] == plain_texts(target, some)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"min_tokens": 5},
        {"logprobs": 2},
    ],
)
def test_what_the_host_decides_enters_no_cut_node(target: CudaDecoder, more: dict[str, object]) -> None:
    some, priced = requests(5, 4, **more), Priced([WIDE])
    assert write(engine_of(target, priced), some, 5)[0] == plain_texts(target, some)


def test_a_part_of_a_batch_is_scored_as_a_whole(target: CudaDecoder) -> None:
    """Beside trees of the host those of the device have no form: what was cut there is a token like any other."""
    some = [*requests(4, 5), *requests(3, 6, drafter="ngram"), *requests(2, 7, drafter="none")]
    assert write(engine_of(target, Priced([WIDE])), some, 5)[0] == plain_texts(target, some)
    grown = _grown([([3, CUT, 5], [-1, 0, 0])], TreeForm(1, 3, 2), "cpu")
    joined = TreeBatch.join([grown, TreeBatch.chains([[4, 6]])], [0, 1])
    assert min(joined.to_host()[0]) >= 0


def test_what_was_cut_activates_no_experts_and_moves_nobody(target: CudaDecoder) -> None:
    """Rows of the kept nodes are those of the same tree alone; a path may move over places of what was cut."""
    target.kv.data.fill_(float("nan"))
    rng, seqs = random.Random(2), [FakeSeq(i, [5, 9, 11, 40 + i] * 20, max_length=400) for i in range(2)]
    for seq in seqs:
        target.prefill([seq], Needs())
    kept, form = ([0, 3, 5], [-1, 0, 1]), TreeForm(1, 7, 3)
    said = [int(target.score(seqs[:1], TreeBatch.chains([[40]]), Needs()).required_logits[0].argmax())]
    chain = TreeBatch.chains([[40, said[0]]])
    said.append(int(target.score(seqs[:1], chain, Needs()).required_logits[1].argmax()))
    tokens, parents = [40, CUT, CUT, said[0], CUT, said[1], CUT], [-1, 0, 0, 0, 1, 3, 5]
    alone = TreeBatch.chains([[40, *said]])
    wanted = target.score(seqs[:1], alone, Needs()).required_logits.clone()
    fewest = target.passes.steps.active_experts()
    scores = target.score(seqs[:1], trees := _grown([(tokens, parents)], form, "cpu"), Needs())
    assert target.passes.steps.active_experts() == fewest
    torch.testing.assert_close(scores.required_logits[kept[0]], wanted, atol=1e-4, rtol=0.0)
    assert scores.required_logits.isfinite().all()
    verdict = settled(scores)
    assert verdict.to_host()[0] == [[3, 5]]
    assert trees.drafted() == [(2, 2)]
    target.commit(seqs[:1], trees, verdict)
    seqs[0].tokens += [*said, verdict.to_host()[1][0]]
    seqs[1].tokens[-1:] = seqs[0].tokens[-4:]
    fresh = FakeSeq(7, list(seqs[0].tokens), max_length=400)
    target.prefill([fresh], Needs())
    roots = TreeBatch.chains([fresh.tokens[-1:]])
    both = [target.score([seq], roots, Needs()).required_logits.clone() for seq in (seqs[0], fresh)]
    torch.testing.assert_close(*both, atol=1e-4, rtol=0.0)
    lone = _grown([([fresh.tokens[-1], *[CUT] * 6], parents)], form, "cpu")
    target.score([fresh], lone, Needs())
    assert target.passes.steps.active_experts() == [2, 2, 2]
    whole = target.score([fresh], _grown([([rng.randrange(50) for _ in tokens], parents)], form, "cpu"), Needs())
    assert whole.required_logits.isfinite().all()
    assert target.passes.steps.active_experts() > fewest, "the negative control: with all nodes"
    for seq in (*seqs, fresh):
        target.release(seq)


def test_penalties_read_no_token_of_what_was_cut() -> None:
    params, logits = SamplingParams(temperature=1.0, presence_penalty=2.0), torch.zeros(3, 9)
    seqs, trees = [FakeSeq(0, [3, 4], params=params)], TreeBatch.trees([([4, 5, CUT], [-1, 0, 1])])
    weights = warp(logits, seqs, trees).log_weights
    assert weights[1, 5] == weights[2, 5] == -2.0
    assert weights[2, -1] == 0.0


def test_rejected_branches_are_those_that_were_put_to_the_target() -> None:
    tokens, parents = [40, 7, CUT, 8, CUT], [-1, 0, 0, 1, 3]
    assert [branch.tokens for branch in rejected_branches(tokens, parents, [], 0)] == [(7, 8)]
    assert not rejected_branches(tokens, parents, [1, 3], 2)


def test_what_is_not_exact_passes_by_what_was_cut() -> None:
    """Else it would read the chance of the last token of the vocabulary."""
    from forerun.core.noise import Noise
    from forerun.core.types import Laws
    from forerun.verify.typical import TypicalVerifier

    laws = Laws(torch.tensor([[-9.0, -9.0, 5.0]]).repeat(3, 1), (False,))
    for token, path in ((CUT, []), (2, [1])):
        trees = TreeBatch.trees([([0, token, CUT], [-1, 0, 1])])
        assert TypicalVerifier().verify(trees, laws, Noise([1], [1])).to_host()[0] == [path]
