"""sparse_kv on every kind of decoder: its passes, the target's KV behind them, its texts, and when it rests.

Drafts of the host, but for texts on a GPU; tests/gpu/test_sparse_draft.py is about those of the device.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import NEVER, Needs, Request, TreeBatch, Verdict
from forerun.drafters.model.draft_model import UNMEASURED
from forerun.drafters.model.layer_skip import SparseKvDrafter
from forerun.engine.engine import Engine
from forerun.models.attention import Span, SparseContext
from forerun.models.base import LayerSubset
from forerun.models.cuda.target import CudaDecoder
from forerun.models.decoder import Decoder
from forerun.models.native.target import NativeDecoder
from forerun.models.pages import PAGE
from forerun.models.partial import PartialTarget
from forerun.testing import FakeSeq, TableLM
from forerun.verify.greedy import device_walk
from tests.exactness.harness import Letters, run
from tests.gpu.tiny import VOCAB, make_reference, need_cuda, weights_of
from tests.native.blocks import needs_native

KINDS = ["torch", pytest.param("native", marks=needs_native), "steps", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS, CONTEXT, LENGTH = 3, 4 * PAGE, 11 * PAGE + 9
Whole = Decoder | CudaDecoder


@cache
def reference() -> Any:
    """Attention decides what it writes: weights of queries and keys are large."""
    model = make_reference("llama")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "o_proj" in name:
                weight.mul_(3.0)
    return model


def target_of(kind: str) -> Whole:
    need_cuda("cuda" if kind == "cuda" else "cpu")
    config, weights = weights_of(reference())
    if kind == "torch":
        return Decoder(config, weights, dtype=torch.float32, device="cpu", kv_slots=None)
    if kind == "native":
        return NativeDecoder(config, weights, mode="float32", kv_slots=None)
    device, dtype = ("cuda", torch.bfloat16) if kind == "cuda" else ("cpu", torch.float32)
    walk = device_walk(torch.device(device))
    return CudaDecoder(config, weights, dtype=dtype, device=device, kv_slots=20_000, greedy_walk=walk)


def text_of(length: int = LENGTH, seed: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def part_of(target: Whole, context: SparseContext | None) -> PartialTarget:
    shared = target.shared()
    assert shared.partial is not None
    part = shared.partial(LayerSubset(LAYERS), context=context)
    assert isinstance(part, PartialTarget)
    return part


def started(target: Whole, tokens: list[int], seq_id: int = 1) -> FakeSeq:
    seq = FakeSeq(seq_id, list(tokens), max_length=1500)
    target.prefill([seq], Needs())
    return seq


def drafted(part: PartialTarget, seqs: list[FakeSeq], tokens: list[list[int]]) -> Tensor:
    """[n, B, V] after each of these tokens, which follow one by one, as a drafter reads them."""
    rows, views = [], [FakeSeq(seq.id, list(seq.tokens), max_length=1500) for seq in seqs]
    for i in range(len(tokens[0])):
        for view, seq, some in zip(views, seqs, tokens, strict=True):
            view.tokens = [*seq.tokens[:-1], *some[: i + 1]]
        chains = TreeBatch.chains([[some[i]] for some in tokens])
        rows.append(part.score(views, chains, Needs()).required_logits.clone())
        part.commit(views, chains, Verdict.whole_chain(chains, [0] * len(seqs)))
    return torch.stack(rows)


def scored(target: Whole, seq: FakeSeq, tokens: list[int]) -> Tensor:
    return target.score([seq], TreeBatch.chains([tokens]), Needs()).required_logits.clone()


def over_pages(tokens: list[int], further: list[int], pages: list[int]) -> Tensor:
    """[n, V] by transformers: keys and values of some pages of a text, at the places that they had in all of it."""
    model, length = reference(), len(tokens) - 1
    kept = [at for page in pages for at in range(page * PAGE, min(length, (page + 1) * PAGE))]
    with torch.no_grad():
        whole = model(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
        some = DynamicCache()
        for i, layer in enumerate(whole.layers):
            some.update(layer.keys[:, :, kept], layer.values[:, :, kept], i)
        rows = []
        for i, token in enumerate(further):
            places = torch.tensor([[length + i]])
            rows.append(model(torch.tensor([[token]]), past_key_values=some, position_ids=places).logits[0, -1])
    return torch.stack(rows)


def near(got: Tensor, wanted: Tensor, kind: str) -> bool:
    share = 0.35 if kind == "cuda" else 1e-3  # in 16 bits, with sharp attention
    return float((got.cpu() - wanted).abs().max()) < share * float(wanted.std())


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_pass_is_a_pass_over_its_pages(kind: str) -> None:
    """Two sequences of different lengths in one pass, across the end of a page; against transformers."""
    target, context = target_of(kind), SparseContext(CONTEXT)
    texts = [text_of(), text_of(9 * PAGE + 62, seed=4)]
    seqs = [started(target, tokens, i) for i, tokens in enumerate(texts)]
    further = [[tokens[-1], 5, 6, 7, 8] for tokens in texts]
    got = drafted(part_of(target, context), seqs, further)
    for b, tokens in enumerate(texts):
        _, before, low = context._chosen[b]
        pages = [*before, *range(low, len(tokens) // PAGE + 1)]
        assert len(pages) <= context.pages < len(tokens) // PAGE
        assert near(got[:, b], over_pages(tokens, further[b], pages), kind)
        assert not near(got[:, b], over_pages(tokens, further[b], [*range(len(tokens) // PAGE + 1)]), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_counts_no_position_left_out_says_something_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above: rotations at the places in the shorter table."""
    target, context, tokens = target_of(kind), SparseContext(CONTEXT), text_of()
    seq, narrow = started(target, tokens), context.narrow

    def forgetful(*args: Any) -> Span:
        return replace(narrow(*args), skipped=0)

    monkeypatch.setattr(context, "narrow", forgetful)
    got = drafted(part_of(target, context), [seq], [tokens[-1:]])[:, 0]
    _, before, low = context._chosen[1]
    pages = [*before, *range(low, len(tokens) // PAGE + 1)]
    assert not near(got, over_pages(tokens, tokens[-1:], pages), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_changes_no_bit_of_the_target(kind: str) -> None:
    """Whatever was drafted, the target's pass writes all keys and values of its nodes anew."""
    target, tokens = target_of(kind), text_of()
    seq, part = started(target, tokens), part_of(target, SparseContext(CONTEXT))
    chain = [tokens[-1], 9, 8, 7, 6]
    plain = scored(target, seq, chain)
    for first in (chain, chain[:3], [tokens[-1], 30, 31, 32, 33, 34]):
        drafted(part, [seq], [first])
        assert torch.equal(scored(target, seq, chain), plain)
    drafted(part, [seq], [chain])
    trees = TreeBatch.chains([chain])
    target.score([seq], trees, Needs())
    target.commit([seq], trees, Verdict.whole_chain(trees, [11]))
    seq.tokens = [*tokens, *chain[1:], 11]
    other = target_of(kind)
    wanted = scored(other, started(other, seq.tokens), [11, 12])
    assert near(scored(target, seq, [11, 12]), wanted.cpu(), kind)


@pytest.mark.parametrize("kind", ["torch", pytest.param("native", marks=needs_native)])
def test_keys_that_a_draft_left_would_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of exactness: where a draft's own keys and values are kept, logits and texts are others."""
    target, tokens = target_of(kind), text_of()
    seq, part = started(target, tokens), part_of(target, SparseContext(CONTEXT))
    chain = [tokens[-1], 9, 8, 7, 6]
    plain = scored(target, seq, chain)
    part._is_start = True  # as of the first layers of an early exit, whose keys are the target's own
    drafted(part, [seq], [chain])
    assert not torch.allclose(scored(target, seq, chain), plain, atol=1e-2)
    target.release(seq)
    wanted = run(engine_on(target, "none"), requests())
    init = PartialTarget.__init__

    def keeping(self: PartialTarget, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        self._is_start = True

    monkeypatch.setattr(PartialTarget, "__init__", keeping)
    assert run(engine_on(target, "sparse_kv"), requests()) != wanted


def requests(count: int = 4) -> list[Request]:
    """More than run at once, greedy and sampled by a seed; texts that repeat themselves, and a short one."""
    asked = []
    for i, length in zip(range(count), (LENGTH, 700, 20, 6 * PAGE), strict=False):
        tokens = (text_of(length // 3, seed=i) * 4)[:length]
        params = SamplingParams(max_tokens=24, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
        asked.append(Request(tuple(tokens), params))
    return asked


def engine_on(target: Whole, drafter: str, **settings: Any) -> Engine:
    given = {"controller": "fixed", "budget": 4, "draft_context": CONTEXT, **settings}
    speculative = SpeculativeConfig(drafter=drafter, **given)
    config = EngineConfig(max_batch=3, max_length=1500)
    return make_engine(target, frozenset({0}), speculative, config, Letters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        ("sparse_kv", {}),
        ("sparse_kv", {"width": 2}),
        ("sparse_kv", {"controller": "adaptive"}),
        ("ngram>sparse_kv", {}),
        ("ngram+sparse_kv", {}),
        ("layer_skip>sparse_kv", {"draft_layers": "2"}),
    ],
    ids=str,
)
def test_the_text_is_the_plain_one(kind: str, drafter: str, settings: dict[str, Any]) -> None:
    target = target_of(kind)
    wanted = run(engine_on(target, "none"), requests())
    engine = engine_on(target, drafter, **settings)
    assert run(engine, requests()) == wanted
    assert engine.stats.drafted > 40 or "controller" in settings
    assert not engine.drafters._failed
    assert target.used_slots == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_that_is_read_whole_drafts_what_the_target_writes(kind: str) -> None:
    """A draft that reads a wrong position, or stale keys, would still be exact: only its acceptance would tell."""
    target, accepted = target_of(kind), {}
    for context in (1500, CONTEXT):
        engine = engine_on(target, "sparse_kv", draft_context=context)
        run(engine, requests())
        accepted[context] = engine.stats.accepted / engine.stats.drafted
    assert accepted[1500] > (0.6 if kind == "cuda" else 0.999)  # in 16 bits random logits are near each other
    assert accepted[CONTEXT] < accepted[1500]


def test_it_rests_until_most_of_a_context_is_left_out() -> None:
    target = target_of("torch")
    engine = engine_on(target, "sparse_kv", controller="adaptive", budget=None)
    drafter = engine.drafters.get("sparse_kv")
    assert drafter is not None
    short, long = (FakeSeq(i, text_of(n), max_length=1500) for i, n in ((1, 2 * CONTEXT - 1), (2, 2 * CONTEXT)))
    assert drafter.offer(short) is NEVER
    assert drafter.offer(long).costs
    few = [Request(tuple(text_of(2 * CONTEXT - 40)), SamplingParams(max_tokens=30, ignore_eos=True))]
    run(engine, few)
    assert engine.stats.drafted == 0


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_draft_pass_of_the_host_is_timed_before_the_first_draft(kind: str) -> None:
    """Else a pass that is faster than what was assumed would never be tried; the sequence that was timed is gone."""
    target = target_of(kind)
    drafter = engine_on(target, "sparse_kv").drafters.get("sparse_kv")
    assert drafter is not None
    offered = drafter.offer(FakeSeq(2, text_of(), max_length=1500))
    assert offered.level > 0.0
    assert offered.level != UNMEASURED
    assert target.used_slots == 0
    small = engine_on(target, "sparse_kv", draft_context=4000).drafters.get("sparse_kv")
    assert isinstance(small, SparseKvDrafter)
    assert not small._meter.seconds, "there is no room for so long a context"


def test_a_target_without_pages_is_refused() -> None:
    for drafter in ("sparse_kv", "ngram+sparse_kv"):
        with pytest.raises(InvalidInput, match="KV cache has pages"):
            make_engine(TableLM(8), frozenset(), SpeculativeConfig(drafter=drafter)).drafters.get(drafter)
    with pytest.raises(InvalidInput, match="draft_context"):
        SpeculativeConfig(draft_context=0)
