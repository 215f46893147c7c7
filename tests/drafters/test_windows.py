"""Heads that see a window, or no further than they were trained for: public layouts, and what is refused of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.core.types import Budget
from forerun.drafters.heads import base as heads_base
from forerun.drafters.heads.block import BlockDrafter
from forerun.drafters.heads.block_head import BlockHead, read_block
from forerun.drafters.heads.eagle import Eagle3Drafter, load_head
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead, read_head, write_head
from forerun.drafters.heads.eagle_native import NativeHead
from forerun.models.native import library as native
from forerun.testing import FakeSeq, TableLM
from forerun.testing.doubles import extend, random_verdict
from tests.drafters.rounds import as_lists, observe_prompts
from tests.drafters.test_block_family import shown
from tests.drafters.tiny_heads import block_config, block_weights, eagle_config, eagle_weights, save_head

VOCAB = 24
LAYER = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "attention_bias": False,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EAGLE3 = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "draft_vocab_size": VOCAB}
SPECULATORS = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **EAGLE3}
AUTHORS = {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 10000.0, **EAGLE3}

# layout: config.json as its authors write it, and what it is
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "speculators' EAGLE-3 with windows": (
        {**SPECULATORS, "transformer_layer_config": {**LAYER, **SLIDING, "rope_parameters": {"rope_theta": 10000.0}}},
        {"window": 5, "windowed": (True,)},
    ),
    "the authors' EAGLE-3 with windows": ({**AUTHORS, **LAYER, **SLIDING}, {"window": 5, "windowed": (True,)}),
    "a window that is switched off": ({**AUTHORS, **LAYER, "sliding_window": 5, "use_sliding_window": False}, {}),
    "positions of pictures": ({**AUTHORS, **LAYER, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, {}),
    "Llama 3's positions": ({**AUTHORS, **LAYER, "rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3}),
    "speculators' positions": (
        {**SPECULATORS, "transformer_layer_config": {**LAYER, "rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}},
        {"rope_scaling": LLAMA3},
    ),
}  # fmt: skip


def config_with(**parts: Any) -> EagleConfig:
    return replace(eagle_config("eagle3", VOCAB), max_length=2048, **parts)


def written(folder: Path, values: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors")
    return folder


def drafted(head: Any, length: int = 19) -> list[Any]:
    drafter, seq = Eagle3Drafter(head), FakeSeq(0, [i * 7 % VOCAB for i in range(length)])
    observe_prompts(drafter, TableLM(VOCAB), [seq])
    return as_lists(drafter.propose([seq], [Budget(12, 4, 3)]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_public_layouts_load_as_they_are(layout: str, tmp_path: Path) -> None:
    values, parts = LAYOUTS[layout]
    config = config_with(**parts)
    weights = eagle_weights(config, seed=2)
    found, read = read_head(written(tmp_path, values, weights))
    assert found == config
    for form in ("eagle", "speculators"):  # and as this package writes it
        write_head(tmp_path / form, found, read, form)  # type: ignore[arg-type]
        assert read_head(tmp_path / form)[0] == found
    wanted = drafted(EagleHead(config, weights, None))
    assert drafted(load_head(tmp_path, TableLM(VOCAB))) == wanted
    plain = drafted(EagleHead(config_with(), weights, None))
    assert (plain == wanted) == (not parts.get("window")), "a window that is left out shows"


@pytest.mark.skipif(not native.available(), reason="elsewhere all heads run in torch")
def test_normed_queries_and_keys_are_not_left_out(tmp_path: Path) -> None:
    """As in EAGLE-3 heads whose layer is Qwen 3's: no native kernel norms them."""
    config = config_with()
    weights = eagle_weights(config, seed=2)
    values = {**SPECULATORS, "transformer_layer_config": {**LAYER, "model_type": "qwen3"}}
    plain = load_head(written(tmp_path, values, weights), TableLM(VOCAB))
    assert isinstance(plain, NativeHead)
    weights |= {f"midlayer.self_attn.{name}_norm.weight": torch.randn(4) for name in "qk"}
    normed = load_head(written(tmp_path, values, weights), TableLM(VOCAB))
    assert drafted(normed) == drafted(EagleHead(config, weights, None)) != drafted(plain)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}, DamagedFile, "layer_types"),
        ({"layer_types": ["sliding_attention"]}, DamagedFile, "sliding_window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModel, "dynamic over 4 of 4"),
        ({"rope_scaling": {"rope_type": "yarn", "partial_rotary_factor": 0.5}}, UnsupportedModel, "yarn over 2 of 4"),
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedModel, "rope type 'spiral'"),
    ],
)
def test_what_would_be_misread_is_refused(
    changed: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    weights = eagle_weights(config_with())
    with pytest.raises(error, match=words):
        read_head(written(tmp_path, {**AUTHORS, **LAYER, **changed}, weights))


def test_biases_are_refused(tmp_path: Path) -> None:
    weights = eagle_weights(config_with()) | {"midlayer.self_attn.q_proj.bias": torch.zeros(16)}
    with pytest.raises(UnsupportedModel, match=r"biases \('midlayer.self_attn.q_proj.bias'\)"):
        read_head(written(tmp_path, {**AUTHORS, **LAYER}, weights))


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
@torch.no_grad()
def test_a_block_drafter_sees_no_further_than_it_was_trained_for(kind: Any) -> None:
    """As with a window of that length in all layers; a longer one, and none, say something else."""
    config = block_config(kind, VOCAB)
    weights, rows = block_weights(config, seed=2), []
    for parts in ({"max_length": 8}, {"window": 8, "windowed": (True, True)}, {"max_length": 9}, {}):
        drafter = BlockDrafter(BlockHead(replace(config, **parts), weights, None))  # type: ignore[arg-type]
        seqs, _ = shown(drafter, [[i * 7 % VOCAB for i in range(13)]])
        drafter._runner.read(seqs, [drafter._sequences[0]])
        rows.append(drafter._runner.begin(seqs))
    torch.testing.assert_close(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2], atol=0.01)
    assert not torch.allclose(rows[2], rows[3], atol=0.01)


def test_a_block_drafters_positions_may_be_scaled(tmp_path: Path) -> None:
    save_head("dspark", tmp_path, VOCAB)
    values = json.loads((tmp_path / "config.json").read_text())
    for kind, known in (("linear", True), ("dynamic", False)):
        scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 4096}
        (tmp_path / "config.json").write_text(json.dumps({**values, "rope_scaling": scaling}))
        if not known:
            with pytest.raises(UnsupportedModel, match="dynamic over 4 of 4"):
                read_block(tmp_path)
            continue
        rotations = BlockHead(*read_block(tmp_path), None)._rotations
        assert float(rotations.at(torch.tensor([100]), 0).angle()[0, 0, -1]) == pytest.approx(0.25)  # 1 without


DEEP = config_with(depth=2, window=5, windowed=(True, True))
BLOCK = block_config("dflash", VOCAB, window=4, windowed=(True, False), max_length=9)
HEADS: dict[str, Callable[[], Any]] = {
    "torch": lambda: Eagle3Drafter(EagleHead(DEEP, eagle_weights(DEEP, seed=3), None)),
    "native": lambda: Eagle3Drafter(NativeHead(DEEP, eagle_weights(DEEP, seed=3), None)),
    "block": lambda: BlockDrafter(BlockHead(BLOCK, block_weights(BLOCK, seed=3), None)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_rows_that_no_draft_depends_on_are_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of many lengths, rounds with trees and rounds without; with fewer rows yet drafts are others."""
    if kind == "native" and not native.available():
        pytest.skip("no native kernels that draft")

    def drafts(surplus: int, less: int = 0) -> list[Any]:
        monkeypatch.setattr(heads_base, "SURPLUS", surplus)
        drafter, target, rng = HEADS[kind](), TableLM(VOCAB), random.Random(3)
        drafter._depends_on -= less
        seqs = [FakeSeq(i, [(j * 7 + i) % VOCAB for j in range(length)]) for i, length in enumerate((60, 3, 23))]
        observe_prompts(drafter, target, seqs)
        most = drafter._depends_on if surplus < 99 else 99
        assert [len(drafter._sequences[i].tokens) for i in range(3)] == [min(59, most), 2, min(22, most)]
        found = []
        for turn in range(24):
            trees = drafter.propose(seqs, [Budget(0, 0) if turn % 8 < 6 else Budget(6, 3, 2)] * 3)
            found.append(as_lists(trees))
            scores, verdict = target.score(seqs, trees, drafter.needs), random_verdict(rng, trees, VOCAB)
            target.commit(seqs, trees, verdict)
            drafter.observe(seqs, trees, scores, verdict)
            extend(seqs, trees, verdict)
        return found

    whole = drafts(10_000)
    assert drafts(1) == whole
    assert drafts(4) == whole
    assert drafts(1, less=4) != whole
