"""EAGLE heads on the native kernels, against the same heads in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput, VocabularyMismatch
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Scores, TreeBatch, Verdict
from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.eagle import Eagle2Drafter, Eagle3Drafter, EagleDrafter
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead, Kind, read_head, write_head
from forerun.drafters.heads.eagle_native import Bits, NativeHead, NativeRunner, NativeSteps
from forerun.models.base import SharedWeights
from forerun.models.native import library as native
from forerun.models.native.packing import unpack_rows
from forerun.testing import FakeSeq, TableLM
from tests.drafters.rounds import as_lists, observe_prompts
from tests.drafters.tiny_heads import eagle_config, eagle_weights
from tests.native.blocks import random_blocks

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels that draft")

VOCAB = 13
KINDS = [
    ("eagle", {}),
    ("eagle3", {}),
    ("eagle3", {"fc_norm": True, "norm_output": True}),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    ("eagle3", {"depth": 3, "fc_norm": True, "norm_output": True}),
    ("eagle", {"window": 2, "windowed": (True,)}),
    ("eagle3", {"depth": 2, "window": 4, "windowed": (True, False)}),
    ("eagle3", {"max_length": 5}),
    ("eagle3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
]


def both(
    config: EagleConfig, weights: dict[str, Tensor], shared: SharedWeights | None = None, bits: Bits = 8
) -> list[EagleDrafter]:
    cls = Eagle3Drafter if config.kind == "eagle3" else Eagle2Drafter
    return [cls(EagleHead(config, weights, shared)), cls(NativeHead(config, weights, shared, bits))]


def show(drafter: EagleDrafter, seq: FakeSeq, features: Tensor) -> None:
    """The rows [n - 1, F] of a text, observed as its prompt."""
    chain, layers = TreeBatch.chains([seq.tokens[:-1]]), drafter.head.config.layers
    hidden = dict(zip(layers, features.chunk(len(layers), -1), strict=True))
    drafter.observe([seq], chain, Scores(None, hidden), Verdict.whole_chain(chain, [seq.tokens[-1]]))


@torch.no_grad()
def said(drafter: EagleDrafter, seqs: list[FakeSeq]) -> list[Tensor]:
    """Logits of a draft with branches: two nodes below each root, then three below them."""
    texts = [drafter._sequences[seq.id] for seq in seqs]
    walk = drafter._runner.begin(seqs, texts, [Budget(9, 3, 3)] * len(seqs))
    found = [walk.first()]
    for parents, tokens in (([0, 0], [5, 7]), ([1, 0, 1], [2, 4, 6])):
        rows = [torch.tensor(numbers).expand(len(seqs), -1) for numbers in (parents, tokens)]
        found.append(walk.after(*rows))
    return found


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_small_heads_say_the_same(kind: Kind, more: dict[str, Any]) -> None:
    config = eagle_config(kind, VOCAB, **more)
    drafters = both(config, eagle_weights(config, seed=3))
    seqs = [FakeSeq(0, [1, 2, 3, 4, 5, 6, 7]), FakeSeq(1, [9, 8, 7])]
    torch.manual_seed(0)
    for seq in seqs:
        features = torch.randn(len(seq.tokens) - 1, config.feature_width)
        for drafter in drafters:
            show(drafter, seq, features)
    for wanted, found in zip(*(said(drafter, seqs) for drafter in drafters), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "apart", "alike"), [(8, 0.04, 0.9), (4, 0.4, 0.5)])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_large_heads_are_rounded_and_choose_the_same(kind: Kind, bits: Bits, apart: float, alike: float) -> None:
    """Matrices of this size are blocks: logits within a fraction of their spread, and of eight bits the same best.

    Weights are random here, which four bits suit less than those of a trained head.
    """
    config = replace(
        eagle_config(kind, 4096, width=128, draft_vocab=2048 if kind == "eagle3" else None),
        heads=4,
        kv_heads=2,
        head_dim=32,
        inner=512,
    )
    drafters = both(config, eagle_weights(config, seed=5), bits=bits)
    torch.manual_seed(1)
    seq = FakeSeq(0, torch.randint(4096, (30,)).tolist())
    features = torch.randn(29, config.feature_width)
    for drafter in drafters:
        show(drafter, seq, features)
    agreed = 0
    for wanted, found in zip(*(said(drafter, [seq]) for drafter in drafters), strict=True):
        assert 0.0 < float((found - wanted).norm()) < apart * float(wanted.norm())
        best, near = (logits.topk(8).indices.flatten(0, -2) for logits in (wanted, found))
        assert bits == 4 or torch.equal(best[:, 0], near[:, 0])
        agreed += sum(len(set(a) & set(b)) for a, b in zip(best.tolist(), near.tolist(), strict=True))
    assert agreed >= alike * 8 * 6


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"temperature": 4.0, "noise": True}])
@pytest.mark.parametrize("budget", [Budget(4, 4), Budget(9, 3, 3), Budget(6, 4, 3, price=(1.0,) * 4 + (2.0,) * 3)])
@pytest.mark.parametrize("layers", [1, 2])
def test_trees_are_the_same(params: dict[str, float | bool], budget: Budget, layers: int) -> None:
    config = eagle_config("eagle3", VOCAB, draft_vocab=9, depth=layers, window=3, windowed=(layers > 1, True)[-layers:])
    config = replace(config, calibration=Calibration(1.2, 0.8))
    drafters = both(config, eagle_weights(config, seed=8))
    sampling = SamplingParams(temperature=float(params.get("temperature", 0.0)))
    seqs = [
        FakeSeq(i, [i, 3, 1, 4, 1, 5][: 3 + i], params=sampling, seed=i, shares_noise=bool(params.get("noise")))
        for i in range(3)
    ]
    trees = []
    for drafter in drafters:
        observe_prompts(drafter, TableLM(VOCAB), seqs)
        trees.append(as_lists(drafter.propose(seqs, [budget, Budget(2, 2), budget])))
    assert trees[0] == trees[1]
    claims = [[drafter.offer(seq).expected for seq in seqs] for drafter in drafters]
    assert claims[1] == pytest.approx(claims[0], rel=1e-3)


@pytest.mark.parametrize("longest", [2048, 13, 6])
def test_a_row_has_its_own_bits(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside others, with other threads, read at once or in pieces; longer texts than it was trained for."""
    config = replace(eagle_config("eagle3", 64, width=64), heads=4, kv_heads=2, head_dim=16, inner=1024)
    config = replace(config, max_length=longest)
    head = NativeHead(config, eagle_weights(config), None)
    torch.manual_seed(2)
    seqs = [FakeSeq(i, torch.randint(64, (20 + i,)).tolist()) for i in range(3)]
    features = [torch.randn(len(seq.tokens) - 1, config.feature_width) for seq in seqs]

    def run(which: list[int]) -> list[Tensor]:
        drafter = Eagle3Drafter(head)
        for i in which:
            show(drafter, seqs[i], features[i])
        return said(drafter, [seqs[i] for i in which])

    alone, before = [run([i]) for i in range(3)], torch.get_num_threads()
    monkeypatch.setattr("forerun.drafters.heads.eagle_native.CHUNK", 6)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            together = run([0, 1, 2])
            assert all(torch.equal(together[j][i], alone[i][j][0]) for i in range(3) for j in range(3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["blocks", "float", "call"])
def test_the_targets_tables_are_read_where_they_lie(how: str) -> None:
    config = eagle_config("eagle3", 40, width=32)
    blocks, head = random_blocks("Q8_0", 40, 32), torch.randn(40, 32)
    table = unpack_rows(blocks, torch.arange(40)) * 50
    shared = SharedWeights.of(table, head)
    if how != "float":
        shared = replace(shared, table=None)
    if how == "blocks":
        shared = replace(shared, embed=lambda ids: unpack_rows(blocks, ids), table=blocks)
        shared = replace(shared, head_rows=lambda ids: unpack_rows(blocks, ids), head_table=blocks)
    drafters = both(config, eagle_weights(config, borrows=True), shared)
    seq = FakeSeq(0, [1, 39, 7, 2])
    features = torch.randn(3, config.feature_width)
    for drafter in drafters:
        show(drafter, seq, features)
    for wanted, found in zip(*(said(drafter, [seq]) for drafter in drafters), strict=True):
        largest = float(wanted.abs().max())
        atol = 0.01 * largest if how == "blocks" else 1e-3  # packed rows are multiplied with rounded ones
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=atol)


@pytest.mark.parametrize(("words", "rounded"), [(1500, True), (900, False)])  # few rows are not worth it
def test_the_targets_lm_head_is_rounded_to_four_bits(words: int, rounded: bool) -> None:
    config = eagle_config("eagle3", words, width=64)
    blocks = random_blocks("Q8_0", words, 64)
    table = unpack_rows(blocks, torch.arange(words))
    shared = replace(SharedWeights.of(table, table), head_table=blocks)
    heads = [NativeHead(config, eagle_weights(config, borrows=True), shared, bits) for bits in (8, 4)]
    kinds = [native.library().fr_packed_kind(kind) for kind in (8, 3)]  # Q8_0 and Q4_1
    assert [head.struct.lm_head.part[0].kind for head in heads] == [kinds[0], kinds[rounded]]


def test_a_text_that_the_head_cannot_read_is_refused() -> None:
    config = eagle_config("eagle3", VOCAB)
    drafter = Eagle3Drafter(NativeHead(config, eagle_weights(config), None))
    seq = FakeSeq(0, [1, 2, VOCAB, 3])
    show(drafter, seq, torch.randn(3, config.feature_width))
    with pytest.raises(VocabularyMismatch, match="token 13"):
        drafter.propose([seq], [Budget(2, 2)])
    with pytest.raises(InvalidInput, match="shares none"):
        NativeHead(config, eagle_weights(config, borrows=True), None)


def test_a_quote_counts_what_is_to_be_read() -> None:
    config = eagle_config("eagle3", VOCAB)
    drafter = Eagle3Drafter(NativeHead(config, eagle_weights(config), None))
    seq = FakeSeq(0, [i % VOCAB for i in range(100)])
    show(drafter, seq, torch.randn(99, config.feature_width))
    before = drafter.offer(seq)
    drafter.propose([seq], [Budget(3, 3)])
    after = drafter.offer(seq)
    assert before.start > 0.0 == after.start
    assert after.level > 0.0
    assert after.chosen
    assert after.stops
    assert drafter.offer(seq).expected is not None
    drafter.forget(seq)
    assert drafter.offer(seq).expected is None


def test_an_offer_tells_the_first_level_from_the_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first level reads the new rows too: priced alike, deeper levels would seem to cost as much."""
    config = eagle_config("eagle3", VOCAB)
    seq, now = FakeSeq(0, [1, 2, 3]), [0.0]
    drafter = Eagle3Drafter(NativeHead(config, eagle_weights(config, seed=3), None), clock=lambda: now[0])
    show(drafter, seq, torch.zeros(2, config.feature_width))
    begin, step = NativeRunner.begin, NativeSteps._step

    def slow_begin(self: NativeRunner, *given: Any) -> NativeSteps:
        now[0] += 0.004
        return begin(self, *given)

    def slow_step(self: NativeSteps, *given: Any) -> None:
        now[0] += 0.001
        step(self, *given)

    monkeypatch.setattr(NativeRunner, "draft", lambda self, *given: None)  # level by level, as in a batch
    monkeypatch.setattr(NativeRunner, "begin", slow_begin)
    monkeypatch.setattr(NativeSteps, "_step", slow_step)
    for _ in range(3):
        drafter.propose([seq], [Budget(3, 3)])
    assert drafter.offer(seq).seconds == pytest.approx((0.004, 0.001))
    assert drafter.offer(seq).until(3) == pytest.approx(0.006)


@pytest.mark.parametrize("inner", [1536, 3072])
def test_a_head_of_one_byte_per_weight_runs_in_four_bits(tmp_path: Path, inner: int) -> None:
    """As the trainer writes it, with the shapes of the default model's head, of either width of its MLP."""
    config = replace(
        eagle_config("eagle3", 2048, width=576, draft_vocab=1024, fc_norm=True, norm_output=True),
        heads=9,
        kv_heads=3,
        head_dim=64,
        inner=inner,
    )
    write_head(tmp_path, config, eagle_weights(config, seed=7), one_byte=True)
    again, weights = read_head(tmp_path, kind="eagle3")
    wide, rounded = both(again, weights, bits=4)
    struct = rounded.head.struct
    layer = struct.layers[0]
    parts = [*layer.gate_up.part[:2], layer.down.part[0], struct.fc.part[0], struct.lm_head.part[0]]
    four_bits = native.library().fr_packed_kind(3)  # Q4_1
    assert struct.inner == inner
    assert [part.kind for part in parts] == [four_bits] * 5
    assert (parts[0].outputs, parts[2].inputs) == (inner, inner)
    seq = FakeSeq(0, [5, 6, 7, 8])
    torch.manual_seed(2)
    features = torch.randn(3, config.feature_width)
    for drafter in (wide, rounded):
        show(drafter, seq, features)
    for wanted, found in zip(said(wide, [seq]), said(rounded, [seq]), strict=True):
        assert 0.0 < float((found - wanted).norm()) < 0.4 * float(wanted.norm())
    rounded.propose([seq], [Budget(3, 3)])
    first, further = rounded.offer(seq).seconds
    assert first > 0.0 < further
