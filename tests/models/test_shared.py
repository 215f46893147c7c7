"""What targets share with drafters is what they compute with: rows, norm, layers and rotary tables of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.core.errors import InvalidInput, VocabularyMismatch
from forerun.core.types import Needs, TreeBatch
from forerun.models.base import SharedWeights, Target
from forerun.models.decoder import Decoder
from forerun.models.hf import HFTarget
from forerun.models.layers import rms_norm
from forerun.models.native import library as native_library
from forerun.models.native.target import NativeDecoder
from forerun.testing import FakeSeq, TableLM
from tests.gpu.tiny import VOCAB, make_reference, make_target, weights_of

KINDS = ("torch", "native", "cuda", "hf")
TEXT = [3, 9, 27, 4]


def make(kind: str, name: str) -> tuple[Target, Any]:
    model = make_reference(name)
    config, weights = weights_of(model)
    if kind == "hf":
        return HFTarget(model), model
    if kind == "torch":
        return Decoder(config, weights, dtype=torch.float32, device="cpu", kv_slots=None), model
    if kind == "native":
        if not native_library.available():
            pytest.skip("no native kernels")
        return NativeDecoder(config, weights, mode="float32", kv_slots=None), model
    return make_target(name, "cpu", kv_slots=5_000), model


def shared_of(target: Target) -> SharedWeights:
    shared = target.shared()
    assert shared is not None
    return shared


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])  # an LM head that is the embedding, and one of its own
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_that_the_target_computes_with(kind: str, name: str) -> None:
    target, model = make(kind, name)
    shared, layers = shared_of(target), model.config.num_hidden_layers
    seq, needs = FakeSeq(0, [*TEXT], max_length=20), Needs((-1, 0, layers))
    target.prefill([seq], needs)
    scores = target.score([seq], TreeBatch.chains([[TEXT[-1], 5, 6]]), needs)
    torch.testing.assert_close(shared.embed(torch.tensor([TEXT[-1], 5, 6])), scores.hidden[0], atol=1e-5, rtol=0)
    head = shared.head_rows(torch.arange(target.vocab_size))
    torch.testing.assert_close(scores.hidden[-1] @ head.t(), scores.logits, atol=1e-4, rtol=0)
    assert (shared.width, shared.vocab_size, shared.dtype) == (head.shape[1], VOCAB, torch.float32)
    if shared.final_norm is not None and kind != "hf":
        normed = rms_norm(scores.hidden[layers], shared.final_norm, model.config.rms_norm_eps)
        torch.testing.assert_close(normed, scores.hidden[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_rotary_tables_are_there(kind: str) -> None:
    target, model = make(kind, "llama")
    shared = shared_of(target)
    assert len(shared.layers) == model.config.num_hidden_layers
    if kind == "hf":
        assert shared.layers[0] is model.model.layers[0]
        assert shared.config is None
        return
    assert shared.config is not None
    assert shared.config.layers == len(shared.layers)
    assert shared.final_norm is not None
    positions = torch.arange(7)
    embedding = model.model.rotary_emb(torch.zeros(1, 7, 1), positions[None])  # cosines, sines [1, 7, Dh]
    found = shared.rotations[0].at(positions, 0)[:, 0]
    half = found.shape[1]
    torch.testing.assert_close(found.real, embedding[0][0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.imag, embedding[1][0, :, :half], atol=1e-5, rtol=0)


def test_only_native_tables_can_be_read_in_place() -> None:
    in_place = {}
    for kind in KINDS:
        shared = shared_of(make(kind, "smollm2")[0])
        in_place[kind] = (shared.table is not None, shared.head_table is not None)
    assert in_place == {kind: (kind == "native", kind == "native") for kind in KINDS}


def test_a_table_over_ngrams_shares_nothing_unless_told() -> None:
    assert TableLM(8).shared() is None
    table = torch.randn(8, 4)
    lends = SharedWeights.of(table, 2 * table)
    target = TableLM(8, lends=lends)
    assert target.shared() is lends
    assert lends.layers == ()
    torch.testing.assert_close(lends.head_rows(torch.tensor([3])), 2 * table[[3]])


def test_a_head_of_another_shape_is_named() -> None:
    shared = SharedWeights.of(torch.randn(8, 4), torch.randn(8, 4))
    shared.must_fit(4, 8, "me")
    with pytest.raises(InvalidInput, match=r"6 wide and the target 4: .*\(other\)"):
        shared.must_fit(6, 8, "other")
    with pytest.raises(VocabularyMismatch, match="vocabulary of 9"):
        shared.must_fit(4, 9, "")
