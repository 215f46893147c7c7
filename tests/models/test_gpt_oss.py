"""gpt-oss: MXFP4 experts against transformers' own dequantisation, files as they are published, damage, controls."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forerun import LLM, SamplingParams
from forerun.core.errors import DamagedFile
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.quantized.unstacked import UnstackedExperts, unstack
from forerun.models.load.shapes import check_shapes
from tests.models.tiny_checkpoints import VOCAB, make_reference, reference_logits, save, score_chain
from tests.models.tiny_folder import LETTERS, add_tokenizer

TEXT = random.Random(3).choices(range(VOCAB), k=40)
CLOSE, FAR = 1e-4, 1e-2
STACKS = ("gate_up_proj", "down_proj")


def random_mxfp4(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of [E, outputs, inputs], of numbers about as large as a model's."""
    made = torch.Generator().manual_seed(seed)
    *rows, inputs = shape
    blocks = torch.randint(0, 256, (*rows, inputs // 32, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(121, 125, (*rows, inputs // 32), dtype=torch.uint8, generator=made)
    return blocks, scales


def write_mxfp4(folder: Path, name: str = "gpt_oss-packed") -> Any:
    """A folder whose experts are MXFP4, as the published ones are; transformers' model of the same numbers."""
    model = make_reference(name)
    config, weights = save(model, folder)
    for at, key in enumerate(key for key in list(weights) if key.endswith(STACKS)):
        experts, inputs, outputs = weights.pop(key).shape
        blocks, scales = random_mxfp4(at, experts, outputs, inputs)
        weights |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        with torch.no_grad():
            model.get_parameter(key).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config))
    add_tokenizer(folder, config, LETTERS[1])
    return model


def test_mxfp4_is_dequantised_as_transformers_does() -> None:
    blocks, _ = random_mxfp4(0, 3, 10, 96)
    scales = torch.randint(0, 254, (3, 10, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales[0, 0] = torch.tensor([0, 1, 2])  # below what float32 holds with all its bits
    at = "model.layers.0.mlp.experts."
    stored = {
        f"{at}{stack}_{part}": some for stack in STACKS for part, some in (("blocks", blocks), ("scales", scales))
    }
    ours = unstack("gpt_oss", stored)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float64).float().transpose(1, 2)  # [E, 10, 96]
    for expert in range(3):
        assert torch.equal(ours[f"{at}{expert}.down_proj.weight"], wanted[expert])
        assert torch.equal(ours[f"{at}{expert}.gate_proj.weight"], wanted[expert, ::2])
        assert torch.equal(ours[f"{at}{expert}.up_proj.weight"], wanted[expert, 1::2])


def test_a_folder_of_mxfp4_equals_transformers(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    opened = open_checkpoint(str(tmp_path))
    config = DecoderConfig.from_hf(opened.config)
    check_shapes(config, opened.weights)
    assert str(opened.weights.quantization) == "FP4 (mxfp4, groups of 32)"
    decoder = Decoder(config, opened.weights, dtype=torch.float32, device="cpu", kv_slots=None)
    got = score_chain(decoder, TEXT, 13, len(TEXT))
    torch.testing.assert_close(got, reference_logits(model, TEXT)[13:], atol=CLOSE, rtol=0)


@pytest.mark.slow(keep=1)
def test_texts_of_a_folder_of_mxfp4_equal_transformers_plain_and_drafted(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    prompts, params = ["abcabcabcabc", "the cat. the cat. the", "Q"], SamplingParams(max_tokens=40, temperature=0.0)
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([[LETTERS.index(letter) for letter in prompt]])
        out = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=1, pad_token_id=0)
        wanted.append([token for token in out[0, ids.shape[1] :].tolist() if token != 1])
    for drafter in ("none", "ngram"):
        with LLM(str(tmp_path), drafter=drafter, device="cpu", dtype="float32") as llm:
            done = llm.generate(prompts, params)
        assert [[token for token in one.token_ids if token != 1] for one in done] == wanted, drafter


def _without_scales(weights: dict[str, Tensor], key: str) -> None:
    del weights[f"{key}_scales"]


def _fewer_scales(weights: dict[str, Tensor], key: str) -> None:
    weights[f"{key}_scales"] = weights[f"{key}_scales"][:, 1:].contiguous()


def _not_numbers(weights: dict[str, Tensor], key: str) -> None:
    weights[f"{key}_scales"][1, 2, 0] = 255


def _other_type(weights: dict[str, Tensor], key: str) -> None:
    weights[f"{key}_blocks"] = weights[f"{key}_blocks"].to(torch.int32)


def _short_blocks(weights: dict[str, Tensor], key: str) -> None:
    weights[f"{key}_blocks"] = weights[f"{key}_blocks"][..., :8].contiguous()


def _no_bias(weights: dict[str, Tensor], key: str) -> None:
    del weights[f"{key}_bias"]


DAMAGE = [_without_scales, _fewer_scales, _not_numbers, _other_type, _short_blocks, _no_bias]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("stack", STACKS)
def test_damaged_experts_are_an_error(
    damage: Callable[[dict[str, Tensor], str], None], stack: str, tmp_path: Path
) -> None:
    write_mxfp4(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    damage(weights, f"model.layers.1.mlp.experts.{stack}")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DamagedFile, match=r"experts\.([0-9]\.)?(gate|down|up)"):
        LLM(str(tmp_path), device="cpu")


CONTROLS: dict[str, Callable[[DecoderConfig], DecoderConfig]] = {
    "no sinks": lambda config: replace(config, sinks=False),
    "a window that is one short": lambda config: replace(config, windows=tuple(w and w - 1 for w in config.windows)),
    "a window that is one long": lambda config: replace(config, windows=tuple(w and w + 1 for w in config.windows)),
    "windows in the other layers": lambda config: replace(config, windows=(None, 6, None)),
    "a gate without a limit": lambda config: replace(config, moe=replace(config.moe, clamp=(1e9, config.moe.clamp[1]))),
    "another alpha": lambda config: replace(config, moe=replace(config.moe, clamp=(config.moe.clamp[0], 1.0))),
    "plain gates": lambda config: replace(config, moe=replace(config.moe, clamp=None)),
    "no biases of experts": lambda config: replace(config, moe=replace(config.moe, biases=False)),
    "a rope with rounded bounds": lambda config: replace(config, ropes=(replace(config.ropes[0], truncate=True),)),
}


def target_is_off(
    make: Callable[[DecoderConfig, dict[str, Tensor]], Decoder], folder: Path, control: str | None
) -> float:
    """How far logits are from transformers', with one part of the description wrong."""
    model = make_reference("gpt_oss")
    settings, weights = save(model, folder)
    config = DecoderConfig.from_hf(settings)
    assert config.moe is not None
    config = config if control is None else CONTROLS[control](config)
    got = score_chain(make(config, weights), TEXT, 13, len(TEXT))
    return float((got - reference_logits(model, TEXT)[13:]).abs().max())


def _in_torch(config: DecoderConfig, weights: dict[str, Tensor]) -> Decoder:
    return Decoder(config, weights, dtype=torch.float32, device="cpu", kv_slots=None)


@pytest.mark.parametrize("control", CONTROLS)
def test_negative_control(control: str, tmp_path: Path) -> None:
    assert target_is_off(_in_torch, tmp_path, control) > FAR


def test_without_a_control_there_is_no_difference(tmp_path: Path) -> None:
    assert target_is_off(_in_torch, tmp_path, None) < CLOSE


def test_a_published_config_is_read() -> None:
    """The settings of openai/gpt-oss-20b, as its config.json writes them."""
    config = DecoderConfig.from_hf(
        {
            "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880, "num_attention_heads": 64,
            "max_position_embeddings": 131072, "num_experts_per_tok": 4, "num_hidden_layers": 24, "rope_theta": 150000,
            "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05, "sliding_window": 128,
            "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": False,
            },
        }
    )  # fmt: skip
    assert config.windows == (128, None) * 12
    assert config.max_length == 131072
    assert config.moe is not None
    assert (config.moe.clamp, config.moe.inner, config.moe.per_token) == ((7.0, 1.702), 2880, 4)
    assert (config.ropes[0].kind, config.ropes[0].truncate, config.ropes[0].theta) == ("yarn", False, 150000.0)
    left_out = {"vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64}
    left_out |= {"intermediate_size": 2880, "num_local_experts": 32}
    assert DecoderConfig.from_hf({"model_type": "gpt_oss", **left_out}) == config


def test_experts_are_left_as_they_are_where_a_file_has_them_one_by_one() -> None:
    named = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    assert unstack("gpt_oss", named) is named
    stacked = {"model.layers.0.mlp.experts.down_proj": torch.zeros(2, 4, 6)}
    assert unstack("qwen3_moe", stacked) is stacked
    assert isinstance(unstack("gpt_oss", stacked), UnstackedExperts)


def test_transformers_reads_the_same_experts_from_the_folder(tmp_path: Path) -> None:
    """The folder of these tests is one that transformers takes for MXFP4; bf16 holds these numbers exactly."""
    write_mxfp4(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = open_checkpoint(str(tmp_path)).weights
    for layer in range(3):
        experts = loaded.model.layers[layer].mlp.experts
        for expert in range(4):
            at = f"model.layers.{layer}.mlp.experts.{expert}."
            assert torch.equal(ours[at + "down_proj.weight"].t(), experts.down_proj[expert].float())
            assert torch.equal(ours[at + "gate_proj.weight"].t(), experts.gate_up_proj[expert, :, ::2].float())
            assert torch.equal(ours[at + "up_proj.weight"].t(), experts.gate_up_proj[expert, :, 1::2].float())
