"""The screen before the LM head: its errors hold, and what it finds the largest is the largest, ties and all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.types import Needs, PlainSeq, Request, Scores, TreeBatch
from forerun.engine.routing import DrafterPool
from forerun.models.encoder_decoder.layers import NativeLinear, ScreenedHead
from forerun.models.native import library as native
from forerun.verify.warp import warp
from tests.encoder_decoder.test_target import engine_for, write
from tests.encoder_decoder.tiny_models import PAD, make_target, reference, sources

pytestmark = pytest.mark.skipif(not native.available(), reason="the screen is made of native kernels")
TOKENS, WIDTH = 3000, 96


@pytest.fixture(autouse=True)
def _threads() -> None:
    native.match_threads(torch.get_num_threads())


def head_of(seed: int, spread: float = 0.05) -> Tensor:
    """Rows of very different sizes; a few numbers in each that make blocks coarse."""
    chosen = torch.Generator().manual_seed(seed)
    weight = torch.randn(TOKENS, WIDTH, generator=chosen) * spread
    weight *= torch.rand(TOKENS, 1, generator=chosen) * 2
    weight[torch.rand(TOKENS, WIDTH, generator=chosen) < 0.02] *= 8
    return weight


def rows_of(seed: int, count: int) -> Tensor:
    chosen = torch.Generator().manual_seed(100 + seed)
    rows = torch.randn(count, WIDTH, generator=chosen) * 10 ** torch.randn(count, 1, generator=chosen)
    rows[:, ::17] *= 6
    return rows


def full(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    found = NativeLinear(weight, None, "float32")(rows)
    return found if bias is None else found.add_(bias)


@pytest.mark.parametrize("seed", range(4))
def test_every_logit_is_as_near_its_estimate_as_the_errors_say(seed: int) -> None:
    weight, rows = head_of(seed), rows_of(seed, 12)
    screen = ScreenedHead(weight, None)
    estimates, logits = NativeLinear(weight, None, "q8")(rows), full(weight, None, rows)
    errors = torch.from_numpy(np.stack([screen.errors(row) for row in rows.numpy()]))
    away = (estimates - logits).abs()
    assert (away <= errors).all()
    assert (away > errors / 20).any(), "errors that large would screen nothing"


def test_the_errors_hold_where_all_roundings_add_up() -> None:
    """Weights and rows that are rounded by nearly half a step, all in the direction of the product."""
    signs = torch.where(torch.arange(WIDTH) % 2 == 0, 1.0, -1.0)
    weight = (0.49 * signs).repeat(64, 1)
    weight[:, ::32] = 127.0  # the step of each block is one
    rows = (0.4999 * signs).repeat(3, 1)
    rows[:, 1::32] = 127.0
    screen = ScreenedHead(weight, None)
    away = (NativeLinear(weight, None, "q8")(rows) - full(weight, None, rows)).abs().numpy()
    errors = screen.errors(rows[0].numpy())
    assert (away <= errors).all()
    assert away.max() > 20, "all of it was lost, and the errors know"


def test_the_errors_know_what_rounding_takes_from_rows() -> None:
    """Weights that eight bits hold exactly: all that is lost is the row's."""
    signs = torch.where(torch.arange(WIDTH) % 2 == 0, 1.0, -1.0)
    weight = signs.repeat(64, 1)
    weight[:, ::32] = 127.0
    rows = (0.4999 * signs)[None].clone()
    rows[:, 1::32] = 127.0
    away = (NativeLinear(weight, None, "q8")(rows) - full(weight, None, rows)).abs().numpy()
    assert away.min() > 20
    assert (away <= ScreenedHead(weight, None).errors(rows[0].numpy())).all()


def test_a_token_whose_own_estimate_is_far_too_low_still_wins() -> None:
    """The error of the best estimate alone would not let it in: that of each rival counts."""
    weight, row = torch.zeros(64, WIDTH), torch.ones(1, WIDTH)
    row[:, ::32] = 127.0
    weight[7, 0] = 3.15  # a short row: an estimate of 400 that is nearly exact
    weight[9] = 0.49  # lost in eight bits, beside the largest of each block
    weight[9, ::32], weight[9, 31::32] = 0.0, 127.0
    logits, estimates = full(weight, None, row), NativeLinear(weight, None, "q8")(row)
    assert int(logits.argmax()) == 9
    assert int(estimates.argmax()) == 7
    found = ScreenedHead(weight, None).largest(row)
    assert found is not None
    assert int(found.argmax()) == 9


@pytest.mark.parametrize("biased", [False, True])
def test_the_largest_is_the_largest_of_the_whole_product_with_its_bits(biased: bool) -> None:
    decided = 0
    for seed in range(12):
        weight, rows = head_of(seed, spread=0.3), rows_of(seed, 1 + seed % 6)
        near = torch.randint(TOKENS, (40,), generator=torch.Generator().manual_seed(seed))
        top = int(full(weight, None, rows)[0].argmax())
        weight[near] = weight[top] * (1 + 1e-7 * torch.randn(40, 1))  # rivals within a rounding, and ties
        weight[near[0]] = weight[top]
        bias = torch.randn(TOKENS) if biased else None
        wanted, found = full(weight, bias, rows), ScreenedHead(weight, bias).largest(rows)
        if found is None:
            continue
        decided += 1
        assert torch.equal(found.amax(1), wanted.amax(1))
        assert found.numpy().argmax(1).tolist() == wanted.numpy().argmax(1).tolist(), "the first on a tie"
    assert decided >= 9, "a screen that gives up shows nothing"


def test_an_error_too_small_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with a hundredth of the errors another token wins somewhere."""
    monkeypatch.setattr(ScreenedHead, "errors", lambda self, x, honest=ScreenedHead.errors: honest(self, x) / 100)
    wrong = 0
    for seed in range(12):
        weight, rows = head_of(seed, spread=0.3), rows_of(seed, 4)
        top = int(full(weight, None, rows)[0].argmax())
        chosen = torch.Generator().manual_seed(seed)
        weight[:40] = weight[top] + torch.randn(40, WIDTH, generator=chosen) * 3e-3
        found = ScreenedHead(weight, None).largest(rows)
        assert found is not None
        wrong += found.numpy().argmax(1).tolist() != full(weight, None, rows).numpy().argmax(1).tolist()
    assert wrong > 0


def test_whichever_bannable_tokens_are_left_out_the_largest_of_the_rest_is_exact() -> None:
    weight, rows = head_of(5, spread=0.3), rows_of(5, 3)
    logits = full(weight, None, rows)
    first = logits.topk(4).indices.flatten().tolist()
    found = ScreenedHead(weight, None, first).largest(rows)
    assert found is not None
    for banned in ([], first[:1], first[:5], first):
        left, wanted = found.clone(), logits.clone()
        left[:, banned] = wanted[:, banned] = -torch.inf
        assert torch.equal(left.amax(1), wanted.amax(1))
        assert torch.equal(left.argmax(1), wanted.argmax(1))


def test_what_is_not_a_number_is_left_to_the_whole_product() -> None:
    weight, rows = head_of(1), rows_of(1, 2)
    rows[1, 3] = torch.nan
    assert ScreenedHead(weight, None).largest(rows) is None
    weight[7, 8] = torch.nan
    assert ScreenedHead(weight, None).largest(rows_of(1, 1)) is None


def test_a_row_of_zeros_is_left_to_the_whole_product() -> None:
    """All logits are the same: the estimates decide nothing."""
    assert ScreenedHead(head_of(1), None).largest(torch.zeros(1, WIDTH)) is None


class Noting:
    """Notes what is asked of a target, and passes it on."""

    def __init__(self) -> None:
        self.target = make_target("marian")
        self.asked: list[bool] = []
        whole = self.target.score

        def score(seqs: object, trees: TreeBatch, needs: Needs, prompts: object = None) -> Scores:
            self.asked.append(needs.largest_only)
            return whole(seqs, trees, needs, prompts)  # type: ignore[arg-type]

        self.target.score = score  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("params", "largest_only"),
    [
        ({}, True),
        ({"temperature": 0.7, "seed": 3}, False),
        ({"logprobs": 2}, False),
        ({"repetition_penalty": 1.3}, False),
        ({"min_tokens": 3}, False),
        ({"logit_bias": {4: 1.0}}, False),
        ({"bad_words": [[4]]}, False),
    ],
)
def test_only_laws_that_read_nothing_else_ask_for_the_largest_alone(
    params: dict[str, object], largest_only: bool
) -> None:
    noting = Noting()
    write(engine_for(noting.target, "marian"), sources(2), SamplingParams.from_dict({"max_tokens": 5, **params}))
    assert set(noting.asked) == {largest_only}


def test_one_request_that_reads_more_gets_more_for_all() -> None:
    noting = Noting()
    engine = engine_for(noting.target, "marian")
    prompts = sources(2)
    engine.submit(Request(prompts[0], SamplingParams(max_tokens=9)))
    engine.submit(Request(prompts[1], SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True)))
    while engine.busy:
        engine.step()
    assert noting.asked[0] is False
    assert noting.asked[-1] is True


def test_a_law_that_the_models_rules_do_not_change_is_handed_on_as_it_is() -> None:
    rules = make_target("marian").source_rules.laws
    seq = PlainSeq(0, [PAD], source=(3, 1), rules=rules, max_length=9)
    logits = torch.zeros(1, 64)
    logits[0, 5] = 1.0
    root = TreeBatch.chains([[PAD]])
    assert warp(logits, [seq], root).log_weights is logits
    logits[0, PAD] = 2.0  # banned
    assert warp(logits, [seq], root).log_weights[0].argmax() == 5
    seq.max_length = 2  # the end is forced
    logits[0, PAD] = 0.0
    assert warp(logits, [seq], root).log_weights[0].argmax() == 0


def test_the_real_loop_uses_the_screen_and_writes_what_transformers_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def largest(self: ScreenedHead, rows: Tensor, honest: object = ScreenedHead.largest) -> Tensor | None:
        made: Tensor | None = honest(self, rows)  # type: ignore[operator]
        found.append(made is not None)
        return made

    monkeypatch.setattr(ScreenedHead, "largest", largest)
    prompts, params = sources(6, seed=3), SamplingParams(max_tokens=24)
    texts = write(engine_for(make_target("marian"), "marian", "ngram", budget=3), prompts, params)
    assert texts == [reference("marian", prompt, 24) for prompt in prompts]
    assert sum(found) > len(found) / 4, "the screen decided too little to have shown anything"


def test_the_pool_asks_decoders_for_nothing_new() -> None:
    assert DrafterPool(lambda name, head=None: None, 8).needs([]) == Needs()  # type: ignore[arg-type, return-value]
