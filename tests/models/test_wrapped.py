"""Checkpoints that read pictures too run as language models: texts equal transformers', and pictures are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.models.config import DecoderConfig
from forerun.models.families import WRAPPED
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.shapes import check_shapes
from tests.models.tiny_checkpoints import VOCAB, make_decoder, score_chain
from tests.models.tiny_folder import LETTERS, add_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 40}
_DELTA_NET = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3, "rope_parameters": {
        "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4,
        "partial_rotary_factor": 0.5},
}  # fmt: skip
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 24,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        _SIGLIP,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"hidden_size": 48, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3], "rope_theta": 1e4}},
        {**_QWEN, "out_hidden_size": 48, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"head_dim": 16, "rope_parameters": {
            "rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_theta": 1e4}},
        {**_QWEN, "deepstack_visual_indexes": [0]},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
    ),
    "mistral3-ministral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "head_dim": 12, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e3,
            "llama_4_scaling_beta": 0.5}},
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "rope_parameters": {
            "rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_theta": 1e4}},
        {**_QWEN, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {"head_dim": 10, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 2], "rope_theta": 1e3}},
        {**_QWEN, "out_hidden_size": 40},
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {"head_dim": 16, "rope_parameters": {
            "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e3, "partial_rotary_factor": 0.5},
         "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "routed_scaling_factor": 1.7},
        {**_QWEN, "out_hidden_size": 40},
    ),
    "gemma4": (  # as E2B
        "Gemma4ForConditionalGeneration",
        {"num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB,
         "final_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"hidden_size": 48, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3], "rope_theta": 1e4}},
        {"embed_dim": 16, "hidden_size": 48, "depth": 1, "num_heads": 2},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {**_DELTA_NET, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {**_QWEN, "num_position_embeddings": 16},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {**_DELTA_NET, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
         "shared_expert_intermediate_size": 28},
        {**_QWEN, "num_position_embeddings": 16},
    ),
}  # fmt: skip
TEXT = [2 + 7 * i % (VOCAB - 2) for i in range(30)]
Make = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """transformers' model with random weights, and the folder that it saved, with a tokenizer of letters."""
    found: dict[str, tuple[Any, Path]] = {}

    def made(name: str) -> tuple[Any, Path]:
        if name not in found:
            kind, text, vision = SETTINGS[name]
            torch.manual_seed(len(name))
            settings = {"text_config": {**_TEXT, **text}, "vision_config": vision}
            config = transformers.AutoConfig.for_model(name.partition("-")[0], **settings)
            model = getattr(transformers, kind)(config).float().eval()
            with torch.no_grad():
                for key, weight in model.named_parameters():
                    weight.normal_(0.0, 0.6 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.2)
                    if "norm" in key:
                        weight.add_(1.0)
                for key, buffer in model.named_buffers():
                    if key.endswith("e_score_correction_bias"):
                        buffer.normal_(0.0, 0.3)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            add_tokenizer(folder, json.loads((folder / "config.json").read_text()), LETTERS[1])
            found[name] = model, folder
        return found[name]

    return made


def _logits_of(folder: Path) -> Tensor:
    checkpoint = open_checkpoint(str(folder))
    check_shapes(DecoderConfig.from_hf(checkpoint.config), checkpoint.weights)
    return score_chain(make_decoder(checkpoint.config, dict(checkpoint.weights)), TEXT, 11, 40)


def _must_agree(folder: Path, model: Any) -> None:
    with torch.no_grad():
        wanted = model(torch.tensor([TEXT]), use_cache=False).logits[0, 11:]
    torch.testing.assert_close(_logits_of(folder), wanted, atol=1e-4, rtol=0)


def test_every_wrapped_type_is_here() -> None:
    assert {name.partition("-")[0] for name in SETTINGS} == set(WRAPPED)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_equal_transformers(name: str, make: Make) -> None:
    model, folder = make(name)
    _must_agree(folder, model)


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_equal_transformers_and_pictures_are_refused(name: str, make: Make) -> None:
    model, folder = make(name)
    prompt = "the cat. the cat. the"
    ids = torch.tensor([[LETTERS.index(letter) for letter in prompt]])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
    out = model.generate(ids, max_new_tokens=30, use_cache=False, **given)[0, ids.shape[1] :].tolist()
    wanted = [token for token in out if token != 1]
    for drafter in ("none", "ngram"):
        with LLM(str(folder), drafter=drafter, device="cpu") as llm:
            (done,) = llm.generate([prompt], SamplingParams(max_tokens=30, temperature=0.0))
            assert [token for token in done.token_ids if token != 1] == wanted, drafter
            picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
            with pytest.raises(InvalidInput, match=r"'image_url' cannot be read.*only text"):
                llm.chat([{"role": "user", "content": [{"type": "text", "text": "hi"}, picture]}])


def _copied(folder: Path, into: Path, config: dict[str, Any], rename: Callable[[str], str]) -> Path:
    into.mkdir()
    (into / "config.json").write_text(json.dumps(config))
    weights = {rename(key): weight.clone() for key, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, into / "model.safetensors")
    return into


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_first_files_have_no_settings_of_their_own_for_text(name: str, make: Make, tmp_path: Path) -> None:
    """Qwen2-VL and 2.5 as they were released: flat, another rope's name, and names without `language_model`."""
    model, folder = make(name)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [1, 2, 3]}
    del text["rope_parameters"], text["model_type"]
    flat = {**text, **config, "rope_theta": 1e4, "rope_scaling": rope, "tie_word_embeddings": False}
    old = _copied(folder, tmp_path / "old", flat, lambda key: key.replace("model.language_model.", "model."))
    _must_agree(old, model)


def test_experts_of_the_first_files_are_stacked_the_other_way_round(make: Make, tmp_path: Path) -> None:
    """Qwen3-VL as it was released: [E, inputs, outputs], where transformers saves [E, outputs, inputs]."""
    model, folder = make("qwen3_vl_moe")
    old = _copied(folder, tmp_path / "old", json.loads((folder / "config.json").read_text()), str)
    weights = load_file(old / "model.safetensors")
    stacks = {key: one.transpose(1, 2).contiguous() for key, one in weights.items() if ".experts." in key}
    assert len(stacks) == 6
    save_file({**weights, **stacks}, old / "model.safetensors")
    _must_agree(old, model)


def test_a_head_in_the_file_is_read_where_the_settings_do_not_say(make: Make, tmp_path: Path) -> None:
    """Mistral Small 3.1 as it was released."""
    model, folder = make("mistral3")
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings")
    config["text_config"].pop("tie_word_embeddings", None)

    def rename(key: str) -> str:
        return key.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision")

    old = _copied(folder, tmp_path / "old", config, rename)
    weights = load_file(old / "model.safetensors")
    head = weights["language_model.model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**weights, "language_model.lm_head.weight": head}, old / "model.safetensors")
    with torch.no_grad():
        rows = model.model(input_ids=torch.tensor([TEXT]), use_cache=False).last_hidden_state[0, 11:]
    torch.testing.assert_close(_logits_of(old), rows @ head.t(), atol=1e-4, rtol=0)


def test_a_language_part_that_is_not_ours_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModel, match="cohere2"):
        DecoderConfig.from_hf({"model_type": "mistral3", "text_config": {**_TEXT, "model_type": "cohere2"}})
    with pytest.raises(DamagedFile, match="text_config"):
        DecoderConfig.from_hf({"model_type": "qwen3_vl", "text_config": 5})
