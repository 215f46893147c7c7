"""Damage that was once let through: lying counts, NaN in weights, impossible values, half characters, stale caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.build.engine import load_target
from forerun.core.errors import DamagedFile, ModelError, UnsupportedModel
from forerun.core.params import EngineConfig
from forerun.models.config import DecoderConfig
from forerun.models.layers import check_numbers
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.shapes import expected_shapes
from forerun.models.load.tokenizer import tokenizer_from_folder
from tests.models.test_decoder_config import SMOLLM2
from tests.models.tiny_checkpoints import FAMILIES, in_tiers, make_reference, save
from tests.models.tiny_gguf import VOCAB, WIDTH, write_tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_a_lying_head_count_allocates_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lie = {"attention.head_count": 65536, "attention.key_length": 64, "rope.dimension_count": 64}
    path = write_tiny(tmp_path / "m.gguf", family, layers=1, keys=lie)
    checkpoint, largest = open_checkpoint(str(path)), [0]
    monkeypatch.setattr(torch, "empty", _counting(torch.empty, largest))
    monkeypatch.setattr(torch, "zeros", _counting(torch.zeros, largest))
    with pytest.raises(DamagedFile, match=r"tensor 'blk\.0\.attn_q\.weight' is"):
        load_target(checkpoint, EngineConfig(device="cpu", kv_slots=4096))
    assert largest[0] < 1 << 20


def _counting(make: Any, largest: list[int]) -> Any:
    def made(*sizes: Any, **options: Any) -> torch.Tensor:
        on_meta = make(*sizes, **{**options, "device": "meta"})
        largest[0] = max(largest[0], on_meta.numel())
        return make(*sizes, **options)

    return made


@pytest.mark.parametrize("name", in_tiers(sorted(FAMILIES)))
def test_every_family_has_the_shapes_that_are_checked(name: str, tmp_path: Path) -> None:
    save(make_reference(name), tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    config = DecoderConfig.from_hf(checkpoint.config)
    named = dict(expected_shapes(config, checkpoint.weights))
    assert {name: checkpoint.weights.shape(name) for name in named} == named
    assert set(checkpoint.weights) - set(named) == set()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # the native kernels, and torch
def test_weights_that_are_no_numbers_are_said(family: str, value: float, tmp_path: Path) -> None:
    bad = np.full((VOCAB, WIDTH), value, np.float32)
    path = write_tiny(tmp_path / "m.gguf", family, layers=1, extra={"output.weight": bad})
    llm = LLM.load(str(path), drafter="none")
    for params in (SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=1.0, seed=1)):
        with pytest.raises(ModelError, match="not numbers"):
            llm.generate([3, 4, 5], params)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 3.0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 2},
        {"head_dim": -8},
        {"head_dim": 7},
        {"vocab_size": "61"},
        {"hidden_size": True},
        {"intermediate_size": 2**70},
        {"max_position_embeddings": float("nan")},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": []},
        {"rope_theta": {"a": 1}},
        {"rope_theta": -1.0},
        {"rope_scaling": 7},
        {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -4}},
        {"partial_rotary_factor": 2.0},
        {"model_type": "mistral", "sliding_window": -3},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
        {"model_type": "gemma3", "text_config": 5},
        {"model_type": ["llama"]},
        {"hidden_act": ["silu"]},
        {"hidden_act": "x" * 5000},
    ],
)
def test_impossible_values_in_a_config_are_one_line(change: dict[str, Any]) -> None:
    with pytest.raises((DamagedFile, UnsupportedModel)) as raised:
        DecoderConfig.from_hf({**SMOLLM2, **change})
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_ids_that_no_vocabulary_has_end_nothing(tmp_path: Path) -> None:
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    generation = {"eos_token_id": [-1, 1, 2**40, True, [0]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "\\ud800", "chat_template": "\\ud800"}')
    found = tokenizer_from_folder(tmp_path, {})
    assert found.eos_ids == frozenset({1})
    assert found.bos_id is None
    assert not found.has_chat_template


def test_a_flipped_letter_in_the_tokenizer_cache_is_noticed(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=1)
    right = open_checkpoint(str(path)).tokenizer().encode("a ab b")  # "ab" is a token of its own
    (kept,) = (tmp_path / "cache" / "tokenizers").iterdir()
    text = kept.read_text("utf-8")
    kept.write_text(text.replace('"a":2', '"a":3').replace('"b":3', '"b":2'), "utf-8")
    assert kept.read_text("utf-8") != text
    assert open_checkpoint(str(path)).tokenizer().encode("a ab b") == right


def test_a_sound_model_passes_all_of_it(tmp_path: Path) -> None:
    """The negative control: the same checks on undamaged files refuse nothing."""
    save(make_reference("smollm2"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight * 1e3 for name, weight in weights.items()}, tmp_path / "model.safetensors")
    target = load_target(open_checkpoint(str(tmp_path)), EngineConfig(device="cpu"))
    assert target.vocab_size == 61


@pytest.mark.parametrize("bad", [(float("nan"),), (float("inf"), float("-inf"))])
def test_a_row_that_is_not_numbers_is_refused_wherever_it_is(bad: tuple[float, ...]) -> None:
    logits = torch.randn(3, 8)
    logits[0, 0] = float("-inf")  # a token that is ruled out
    assert check_numbers(logits) is logits
    logits[2, 4 : 4 + len(bad)] = torch.tensor(bad)
    with pytest.raises(ModelError, match="not numbers"):
        check_numbers(logits)
