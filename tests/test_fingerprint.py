"""Heads find their model by its weights and tokenizer, under any name and in any format, and no other model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import choose_drafter
from forerun.build.fingerprint import Fingerprint, Likeness, find_head
from forerun.core.params import SpeculativeConfig
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from tests.test_heads import MODEL, boxed

WIDTH, LAYERS = 64, 4
Change = Callable[[str, Tensor], Tensor]


def checkpoint(seed: int = 1, change: Change = lambda name, weight: weight, first: str = "a") -> Checkpoint:
    """A model with trained-looking norms: not all ones."""
    dice = torch.Generator().manual_seed(seed)
    weights = {"model.norm.weight": 1.0 + 0.3 * torch.randn(WIDTH, generator=dice)}
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.input_layernorm.weight"] = 1.0 + 0.3 * torch.randn(WIDTH, generator=dice)
        weights[f"model.layers.{layer}.self_attn.k_proj.weight"] = torch.randn(32, WIDTH, generator=dice)
    found: Any = {name: change(name, weight) for name, weight in weights.items()}
    tokenizer: Any = SimpleNamespace(vocab_size=24, token=lambda index: f"{first if index < 2 else 't'}{index}")
    config = {**MODEL, "num_hidden_layers": LAYERS}
    return Checkpoint("renamed.gguf", Path("renamed.gguf"), config, found, lambda: tokenizer)


def quantised(kind: str) -> Change:
    """As llama.cpp's own package packs and unpacks matrices; norms stay as they are."""
    gguf = pytest.importorskip("gguf")

    def change(name: str, weight: Tensor) -> Tensor:
        if "norm" in name:
            return weight
        packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind]).copy())

    return change


def tuned(norms: float, matrices: float) -> Change:
    def change(name: str, weight: Tensor) -> Tensor:
        share = norms if "norm" in name else matrices
        return weight + share * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(9))

    return change


@pytest.mark.parametrize(
    ("other", "likeness"),
    [
        (lambda: checkpoint(), "same"),
        (lambda: checkpoint(change=lambda _, weight: weight.bfloat16()), "same"),
        (lambda: checkpoint(change=lambda _, weight: weight.half()), "same"),
        (lambda: checkpoint(change=quantised("Q8_0")), "same"),
        (lambda: checkpoint(change=quantised("Q4_0")), "same"),
        (lambda: checkpoint(change=quantised("Q4_1")), "same"),
        (lambda: checkpoint(change=tuned(0.05, 0.02)), "tuned"),
        (lambda: checkpoint(first="<new>"), "tuned"),
        (lambda: checkpoint(change=tuned(0.0, 1.0)), "other"),
        (lambda: checkpoint(change=tuned(0.6, 0.0)), "other"),
        (lambda: checkpoint(seed=2), "other"),
    ],
)
def test_models_are_told_apart(tmp_path: Path, other: Callable[[], Checkpoint], likeness: Likeness) -> None:
    own = Fingerprint.of(checkpoint())
    assert own is not None
    own.write(tmp_path)
    wanted, found = Fingerprint.read(tmp_path), Fingerprint.of(other())
    assert wanted == own
    assert found is not None
    assert wanted.likeness(found) == likeness


def test_a_head_is_found_by_what_the_model_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, folder = Fingerprint.of(checkpoint()), boxed(tmp_path, target_layers=LAYERS)
    assert own is not None
    own.write(folder)
    for each, likeness in ((checkpoint(), "same"), (checkpoint(change=tuned(0.05, 0.0)), "tuned")):
        found = find_head(each, box=tmp_path)
        assert found is not None
        assert (found.head.path, found.likeness) == (folder, likeness)
        assert ("fine-tune" in str(found)) == (likeness == "tuned")
        assert "\n" not in str(found)
    adapted = find_head(replace(checkpoint(), adapted_from="base"), box=tmp_path)
    assert adapted is not None
    assert adapted.likeness == "tuned"
    named = replace(checkpoint(seed=2), name="Tiny-24M-Instruct")  # its name, and other weights
    assert find_head(named, box=tmp_path) is None
    (folder / "fingerprint.json").unlink()  # as older trainers left it: then the name decides
    assert find_head(named, box=tmp_path) is not None
    assert find_head(checkpoint(), box=tmp_path) is None


def test_a_head_that_was_given_for_another_model_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, folder = Fingerprint.of(checkpoint()), boxed(tmp_path, target_layers=LAYERS)
    assert own is not None
    own.write(folder)
    given = SpeculativeConfig(draft_model=str(folder))
    for mine in (checkpoint(), checkpoint(change=quantised("Q4_0"))):
        assert choose_drafter(given, mine, "cpu").draft_model == str(folder)
    assert not caplog.messages
    assert choose_drafter(given, checkpoint(seed=2), "cpu").draft_model == str(folder)
    assert "was trained for org/Tiny-24M-Instruct" in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"norms": 1, "matrices": {}, "tokens": {}}', "[" * 9999])
def test_a_damaged_fingerprint_is_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / "fingerprint.json").write_text(damage)
    assert Fingerprint.read(tmp_path) is None


def test_models_with_other_weights_have_none() -> None:
    strange: Any = {"encoder.weight": torch.ones(2)}
    assert Fingerprint.of(replace(checkpoint(), weights=strange)) is None


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_keeps_its_heads_under_another_name(
    smollm2_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renamed = tmp_path / "my-own-name.gguf"
    renamed.symlink_to(smollm2_path)
    caplog.set_level(logging.INFO)
    for drafter, head in (("auto", "smollm2-135m-eagle3"), ("medusa", "smollm2-135m-medusa")):
        chosen = choose_drafter(SpeculativeConfig(drafter=drafter), open_checkpoint(str(renamed)), "cpu")
        assert Path(chosen.draft_model or "").name == head
        assert f"the head {head} drafts for this model" in caplog.text
