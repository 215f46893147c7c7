"""Heads that are narrower than their target, and heads in files of one byte per weight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.types import Budget, Verdict
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.head import make_net
from forerun.drafters.heads.eagle import Eagle3Drafter, EagleDrafter
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead, read_head, write_head
from forerun.drafters.heads.eagle_native import NativeHead
from forerun.drafters.heads.formats import BLOCK, in_bytes, widened
from forerun.models.cuda.target import CudaDecoder
from forerun.models.native import library as native_library
from forerun.testing import FakeSeq
from forerun.train.export import export_head, import_head
from tests.drafters.rounds import as_lists
from tests.drafters.tiny_heads import eagle_config, eagle_weights
from tests.gpu.tiny import VOCAB, make_target


def _narrow(target: CudaDecoder, width: int = 32) -> tuple[EagleConfig, dict[str, Tensor]]:
    """A head of half its target's width; its embedding is a map of the target's."""
    config = eagle_config("eagle3", VOCAB, width, draft_vocab=120)
    config = replace(
        config, head_dim=16, heads=2, kv_heads=1, target_width=target.config.width, layers=(0, 1, 2), max_length=2048
    )
    weights = eagle_weights(config, seed=3)
    del weights["embed_tokens.weight"]
    torch.manual_seed(8)
    weights["embed_proj.weight"] = torch.randn(width, config.target_width) * 0.2
    return config, weights


def _drafters(target: CudaDecoder) -> list[EagleDrafter | OnDevice[HeadDraft]]:
    """The same head by torch, by the native kernels, on the device, and with its embedding written out."""
    config, weights = _narrow(target)
    shared = target.shared()
    table = shared.embed(torch.arange(VOCAB)) @ weights["embed_proj.weight"].t()
    whole = {name: weight for name, weight in weights.items() if name != "embed_proj.weight"}
    plain = Eagle3Drafter(EagleHead(config, {**whole, "embed_tokens.weight": table}, shared))
    found: list[EagleDrafter | OnDevice[HeadDraft]] = [plain, Eagle3Drafter(EagleHead(config, weights, shared))]
    if native_library.available():
        found.append(Eagle3Drafter(NativeHead(config, weights, shared)))
    return [*found, OnDevice(HeadDraft(*make_net(config, weights, target), capture=False), lambda: plain)]


def test_a_narrow_head_drafts_alike_everywhere() -> None:
    target = make_target("llama", "cpu")
    drafters = _drafters(target)
    seq = FakeSeq(0, [3, 4, 5, 6, 7, 8], max_length=90)
    trees, scores = target.prefill([seq], drafters[0].needs)
    budget = Budget(8, 3, 3)
    found = []
    for drafter in drafters:
        drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [8]))
        found.append(as_lists(drafter.propose([seq], [budget])))
    assert len(found[0][0][0]) == 9
    assert all(one == found[0] for one in found[1:])


def test_files_of_one_byte_per_weight(tmp_path: Path) -> None:
    """A quarter of the bytes of fp32, each number within 0.4% of its block's largest; small parts as they were."""
    torch.manual_seed(0)
    config = replace(eagle_config("eagle3", 1000, 128), heads=4, kv_heads=2, head_dim=32)
    weights = eagle_weights(config)
    write_head(tmp_path, config, weights, one_byte=True)
    again, read = read_head(tmp_path)
    assert again == config
    assert set(read) == set(weights)
    for name, weight in weights.items():
        if weight.dim() == 1:
            assert torch.equal(read[name], weight), name
            continue
        blocks = weight.view(len(weight), -1, BLOCK)
        error = (read[name].float() - weight).view_as(blocks).abs().amax(-1)
        assert bool((error <= 0.0085 * blocks.abs().amax(-1)).all()), name  # and bf16's own rounding
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 1.1 * sum(weight.numel() for weight in weights.values())


def test_zeros_and_other_tensors_are_kept() -> None:
    weights = {"a": torch.zeros(256, 64), "d2t": torch.arange(9), "b": torch.randn(3, 5)}
    stored = in_bytes(weights)
    assert stored["a"].dtype == torch.int8
    read = widened(stored)
    assert torch.equal(read["a"].float(), weights["a"])
    assert all(torch.equal(read[name], weights[name]) for name in ("d2t", "b"))


def test_vllm_gets_the_embedding_written_out_and_drafts_alike(tmp_path: Path) -> None:
    """vLLM reads heads of another width than their target's, but with an embedding of their own."""
    target = make_target("llama", "cpu")
    config, weights = _narrow(target)
    write_head(tmp_path / "head", config, weights)
    shared = target.shared()
    with pytest.raises(InvalidInput, match="--target"):
        export_head(tmp_path / "head", tmp_path / "out", "vllm", None)
    export_head(tmp_path / "head", tmp_path / "out", "vllm", None, embed_rows=shared.embed)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["hidden_size"], values["target_hidden_size"]) == (config.width, target.config.width)
    import_head(tmp_path / "out", tmp_path / "back", "vllm")
    again, read = read_head(tmp_path / "back")
    assert "embed_proj.weight" not in read
    assert read["embed_tokens.weight"].shape == (VOCAB, config.width)
    seq = FakeSeq(0, [3, 4, 5, 6, 7, 8], max_length=90)
    found = []
    for head in (EagleHead(config, weights, shared), EagleHead(again, read, shared)):
        drafter = Eagle3Drafter(head)
        trees, scores = target.prefill([seq], drafter.needs)
        drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [8]))
        found.append(as_lists(drafter.propose([seq], [Budget(8, 3, 3)])))
        target.release(seq)
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", ["sglang", "speculators"])
def test_other_engines_are_told_that_they_cannot_read_it(engine: str, tmp_path: Path) -> None:
    target = make_target("llama", "cpu")
    config, weights = _narrow(target)
    write_head(tmp_path / "head", config, weights)
    with pytest.raises(InvalidInput, match=f"{engine} reads heads that are as wide"):
        export_head(tmp_path / "head", tmp_path / "out", engine, None, embed_rows=target.shared().embed)
    export_head(tmp_path / "head", tmp_path / "ours", "eagle", None)
    assert "embed_proj.weight" in read_head(tmp_path / "ours")[1]
