"""Families beyond Llama's parts on the C kernels against transformers: logits, greedy texts, drafts, GGUF, controls.

Each control computes with one part of the description wrong; logits must then differ from transformers'.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native.target import NativeDecoder, choose_mode
from forerun.testing import FakeSeq
from tests.models.tiny_checkpoints import (
    RELATIVES,
    VOCAB,
    in_tiers,
    make_reference,
    reference_logits,
    save,
    score_chain,
)
from tests.models.tiny_folder import LETTERS, make_tiny_folder
from tests.models.tiny_gguf import gguf
from tests.native.blocks import needs_native

pytestmark = needs_native
NEW = [
    "gemma2",
    "gemma3",
    "gemma3-odd",
    "olmo2",
    "olmo3",
    "granite",
    "glm",
    "glm4",
    "gpt_oss",
    "gpt_oss-packed",
    "gpt_oss-odd",
    "glm4_moe",
    "glm4_moe-groups",
    "gemma4",
    "gemma4-equal",
    "gemma4-odd",
    "gemma4-experts",
    "deepseek_v2",
    "deepseek_v2-groups",
    "deepseek_v3",
    "deepseek_v3-wide",
    "glm4_moe_lite",
    "arcee",
    "exaone4",
    "flex_olmo",
    "granitemoeshared",
    "minimax_m2",
    "ministral3",
]
IN_BOTH_TIERS = in_tiers([*NEW, *RELATIVES])
TEXT = random.Random(7).choices(range(VOCAB), k=40)
CLOSE, FAR = 1e-4, 1e-2
Made = tuple[Any, dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    found: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in found:
            model = make_reference(name)
            found[name] = model, *save(model, tmp_path_factory.mktemp(name))
        return found[name]

    return make


def _off(model: Any, config: DecoderConfig, weights: Any) -> float:
    """How far logits of a prompt and a chain behind it are from transformers'."""
    target = NativeDecoder(config, weights, mode="float32", kv_slots=None)
    got = score_chain(target, TEXT, 13, len(TEXT))
    return float((got - reference_logits(model, TEXT)[13:]).abs().max())


@pytest.mark.parametrize("name", [*NEW, *RELATIVES])
def test_logits_equal_transformers(name: str, made: Callable[[str], Made]) -> None:
    model, config, weights = made(name)
    assert _off(model, DecoderConfig.from_hf(config), weights) < CLOSE


def _shorter(config: DecoderConfig) -> DecoderConfig:
    return replace(config, windows=tuple(window and window - 1 for window in config.windows))


def _longer(config: DecoderConfig) -> DecoderConfig:
    return replace(config, windows=tuple(window and window + 1 for window in config.windows))


def _clamped(config: DecoderConfig, clamp: tuple[float, float] | None) -> DecoderConfig:
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, clamp=clamp))


def _unbiased(config: DecoderConfig) -> DecoderConfig:
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, biases=False))


def _routed(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, **changes))


def _varied(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    assert config.varied is not None
    return replace(config, varied=replace(config.varied, **changes))


def _other_source(config: DecoderConfig) -> DecoderConfig:
    """Layers that share read the keys and values of another layer, of the same size and with the same window."""
    return _varied(config, sources=(0, 1, 2, 1, 0, 1))


def _whole_rope(config: DecoderConfig) -> DecoderConfig:
    return replace(config, ropes=(replace(config.ropes[0], angles=config.ropes[0].dims // 2), config.ropes[1]))


CONTROLS: dict[str, tuple[str, Callable[[DecoderConfig], DecoderConfig]]] = {
    "a window that is one short": ("gemma3", _shorter),
    "a window that is one long": ("gemma2", _longer),
    "a window of two for one": ("gemma3-odd", _longer),
    "no cap of scores": ("gemma2", lambda config: replace(config, attention_softcap=None)),
    "no cap of logits": ("gemma2", lambda config: replace(config, logit_softcap=None)),
    "no offset of norms": ("gemma3", lambda config: replace(config, norm_offset=False)),
    "no scale of the embedding": ("gemma3", lambda config: replace(config, embedding_scale=1.0)),
    "another scale of scores": ("gemma3", lambda config: replace(config, attention_scale=config.head_dim**-0.5)),
    "another activation": ("gemma3", lambda config: replace(config, activation="silu")),
    "one rope for all layers": ("gemma3", lambda config: replace(config, layer_ropes=(0,) * 3)),
    "ropes the other way round": ("olmo3", lambda config: replace(config, ropes=config.ropes[::-1])),
    "no scale of residuals": ("granite", lambda config: replace(config, residual_scale=1.0)),
    "no scale of logits": ("granite", lambda config: replace(config, logit_scale=1.0)),
    "halves for neighbours": ("glm4", lambda config: replace(config, rope_pairs="halves")),
    "a window of gpt-oss that is one short": ("gpt_oss", _shorter),
    "no sinks": ("gpt_oss", lambda config: replace(config, sinks=False)),
    "no sinks before a window of one": ("gpt_oss-odd", lambda config: replace(config, sinks=False)),
    "a gate without a limit": ("gpt_oss", lambda config: _clamped(config, (1e9, 1.702))),
    "another alpha": ("gpt_oss-odd", lambda config: _clamped(config, (0.4, 1.702))),
    "plain gates": ("gpt_oss", lambda config: _clamped(config, None)),
    "a router without a bias": ("gpt_oss", _unbiased),
    "a softmax for sigmoids that are corrected": ("glm4_moe", lambda config: _routed(config, sigmoid=False)),
    "no groups of experts": ("glm4_moe-groups", lambda config: _routed(config, groups=(1, 1))),
    "no scale of experts": ("glm4_moe", lambda config: _routed(config, scale=1.0)),
    "no shared experts": ("glm4_moe-groups", lambda config: _routed(config, shared_inner=None)),
    "queries and keys without norms": ("glm4_moe", lambda config: replace(config, qk_norm=None)),
    "another layer's keys": ("gemma4", _other_source),
    "no inputs of layers": ("gemma4", lambda config: _varied(config, input_width=0)),
    "a window of Gemma 4 that is one short": ("gemma4", _shorter),
    "a window of Gemma 4 that is one long": ("gemma4-odd", _longer),
    "all pairs rotate": ("gemma4", _whole_rope),
    "ropes of two sizes the other way round": ("gemma4-equal", lambda config: replace(config, layer_ropes=(0, 1) * 3)),
    "scaled scores": ("gemma4", lambda config: replace(config, attention_scale=0.25)),
    "rows of latents that do not rotate": ("deepseek_v3", lambda config: replace(config, layer_ropes=(None,) * 3)),
    "halves for neighbours in latents": ("deepseek_v2", lambda config: replace(config, rope_pairs="halves")),
    "a scale of scores by the cached row": ("deepseek_v3-wide", lambda c: replace(c, attention_scale=c.head_dim**-0.5)),
    "a scale of scores without YaRN's": ("deepseek_v2-groups", lambda c: replace(c, attention_scale=18**-0.5)),
    "no groups of a softmax router": ("deepseek_v2-groups", lambda config: _routed(config, groups=(1, 1))),
    "positions in layers without a window": ("exaone4", lambda config: replace(config, layer_ropes=(0,) * 3)),
    "no positions without any window": ("exaone4-no-window", lambda c: replace(c, layer_ropes=(None,) * 3)),
    "a window of CWM that is one short": ("cwm", _shorter),
    "all of a head rotates": ("minimax_m2", lambda c: replace(c, ropes=(replace(c.ropes[0], dims=16),))),
    "another scale of scores of Gemma": ("gemma", lambda config: replace(config, attention_scale=1.0)),
    "halves for neighbours of ERNIE": ("ernie4_5", lambda config: replace(config, rope_pairs="halves")),
    "picked weights that sum to 1": ("olmoe", lambda config: _routed(config, renormalise=True)),
    "picked weights that do not": ("granitemoe", lambda config: _routed(config, renormalise=False)),
    "no shared experts of Granite": ("granitemoeshared", lambda config: _routed(config, shared_inner=None)),
    "a choice of GLM's without groups": ("exaone_moe", lambda config: _routed(config, groups=(1, 1))),
    "no norm behind experts": ("flex_olmo", lambda c: replace(c, norms=c.norms._replace(after_mlp=None))),
    "no window of dots.llm": ("dots1", lambda c: replace(c, windows=(None,) * 3)),
    "no norm behind attention": ("gemma4", lambda c: replace(c, norms=c.norms._replace(after_attention=None))),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_negative_control(control: str, made: Callable[[str], Made]) -> None:
    name, change = CONTROLS[control]
    model, config, weights = made(name)
    assert _off(model, change(DecoderConfig.from_hf(config)), weights) > FAR


def test_queries_that_are_scaled_by_their_positions_are_not_reached(made: Callable[[str], Made]) -> None:
    """Ministral 3's texts end where the scale begins to differ from 1; the control goes on."""
    model, settings, weights = made("ministral3")
    config = DecoderConfig.from_hf(settings)
    ropes = settings["rope_parameters"]
    assert config.max_length == ropes["original_max_position_embeddings"] == 256
    text = (TEXT * 7)[:280]
    off = score_chain(NativeDecoder(config, weights, mode="float32", kv_slots=None), text, 200, len(text))
    off = (off - reference_logits(model, text)[200:]).abs().amax(-1)
    assert float(off[: 256 - 200].max()) < CLOSE
    assert float(off[256 - 200 :].max()) > FAR
    unscaled = {**settings, "rope_parameters": {**ropes, "llama_4_scaling_beta": None}}
    assert DecoderConfig.from_hf(unscaled).max_length == 4096


def test_layers_with_and_without_gates_are_told_apart(made: Callable[[str], Made]) -> None:
    _, settings, weights = made("arcee")
    config = DecoderConfig.from_hf(settings)
    assert not config.gated
    with pytest.raises(DamagedFile, match="gate_proj"):
        NativeDecoder(replace(config, gated=True), weights, mode="float32", kv_slots=None)
    with pytest.raises(UnsupportedModel, match="hidden_act='silu'"):
        DecoderConfig.from_hf({**settings, "hidden_act": "silu"})


@pytest.mark.parametrize(
    "part", ["layer_scalar", "per_layer_projection_norm", "embed_tokens_per_layer", "per_layer_model"]
)
def test_a_part_of_layer_inputs_that_is_left_out_is_caught(part: str, made: Callable[[str], Made]) -> None:
    model, config, weights = made("gemma4")
    changed = {key: torch.ones_like(w) if "scalar" in part else w * 0 for key, w in weights.items() if part in key}
    assert changed
    assert _off(model, DecoderConfig.from_hf(config), weights | changed) > FAR


def test_weights_of_latents_are_kept_in_eight_bits(made: Callable[[str], Made]) -> None:
    """Rows are rounded before them; all numbers of attention's weights lie in blocks of 32."""
    _, settings, weights = made("glm4_moe_lite")
    config = replace(DecoderConfig.from_hf(settings), moe=None, sparse=(False,) * 3)  # no near-ties of routers
    for i in (0, 2):
        weights = weights | {
            f"model.layers.{i}.mlp.{key.split('mlp.')[1]}": w for key, w in weights.items() if "layers.1.mlp" in key
        }
    packed, plain = (NativeDecoder(config, weights, mode=mode, kv_slots=None) for mode in ("q8", "float32"))
    got, wanted = (score_chain(one, TEXT, 13, len(TEXT)) for one in (packed, plain))
    assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.08
    assert packed.weight_bytes < 0.4 * plain.weight_bytes


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe-groups", "minimax_m2"])
def test_a_choice_without_the_correction_is_caught(name: str, made: Callable[[str], Made]) -> None:
    model, config, weights = made(name)
    without = {key: weight * 0 if "correction" in key else weight for key, weight in weights.items()}
    assert _off(model, DecoderConfig.from_hf(config), without) > FAR


@pytest.mark.parametrize("name", IN_BOTH_TIERS)
def test_a_second_text_that_starts_alike_has_the_same_bits(name: str, made: Callable[[str], Made]) -> None:
    _, settings, weights = made(name)
    config, text = DecoderConfig.from_hf(settings), (TEXT * 4)[:150]
    fresh, target = (NativeDecoder(config, weights, mode="q8", kv_slots=None) for _ in range(2))
    first = FakeSeq(1, [*text[:130], 5], max_length=200, cache_salt="")
    target.prefill([first], Needs())
    target.release(first)
    results = []
    for one in (fresh, target):
        seq = FakeSeq(2, list(text), max_length=200, cache_salt="")
        one.prefill([seq], Needs())
        results.append(one.score([seq], TreeBatch.chains([text[-1:]]), Needs()).required_logits)
    assert target.reused_tokens(seq) >= 128
    assert torch.equal(*results)


@pytest.mark.parametrize("name", IN_BOTH_TIERS)
def test_greedy_texts_equal_transformers_plain_and_drafted(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_folder(tmp_path, name)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **eager).float().eval()
    prompts = ["abcabcabcabc", "the cat. the cat. the", "Q"]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([[LETTERS.index(letter) for letter in prompt]])
        # without its cache, which keeps too much of a window of one
        out = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=1, pad_token_id=0, use_cache=False)
        wanted.append([token for token in out[0, ids.shape[1] :].tolist() if token != 1])
    params = SamplingParams(max_tokens=40, temperature=0.0)
    for drafter in ("none", "ngram"):
        with LLM(folder, drafter=drafter, device="cpu") as llm:
            done = llm.generate(prompts, params)
            assert [[token for token in one.token_ids if token != 1] for one in done] == wanted, drafter


ARCHITECTURES = {
    "gemma2": "GEMMA2", "gemma3": "GEMMA3", "olmo2": "OLMO2", "granite": "GRANITE", "glm4": "GLM4",
    "gpt_oss": "GPT_OSS", "gpt_oss-packed": "GPT_OSS",
}  # fmt: skip
KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
}  # fmt: skip


def as_converted(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss's weights as llama.cpp's converter has them: gates and ups apart, outputs first, sinks a weight."""
    found = dict[str, Tensor]()
    for key, weight in weights.items():
        stem, bias = key.removesuffix("_bias"), ".bias" if key.endswith("_bias") else ".weight"
        turned = weight.transpose(-1, -2) if weight.dim() == 3 else weight
        if stem.endswith("experts.gate_up_proj"):
            at = stem.removesuffix("gate_up_proj")
            found |= {f"{at}gate_proj{bias}": turned[:, ::2], f"{at}up_proj{bias}": turned[:, 1::2]}
        elif stem.endswith("experts.down_proj"):
            found[stem + bias] = turned
        else:
            found[f"{key}.weight" if key.endswith("sinks") else key] = weight
    return found


def _write(path: Path, name: str, config: dict[str, Any], weights: dict[str, Tensor], packs: bool = False) -> str:
    """As llama.cpp's converter writes it, under gguf's own names; `packs`: experts in MXFP4."""
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[name]]
    arch, parsed = gguf.MODEL_ARCH_NAMES[architecture], DecoderConfig.from_hf(config)
    names = gguf.get_tensor_name_map(architecture, parsed.layers)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(parsed.layers)
    writer.add_context_length(parsed.max_length)
    writer.add_embedding_length(parsed.width)
    writer.add_feed_forward_length(parsed.inner)
    writer.add_head_count(parsed.heads)
    writer.add_head_count_kv(parsed.kv_heads)
    writer.add_key_length(parsed.head_dim)
    writer.add_layer_norm_rms_eps(parsed.norm_eps)
    writer.add_rope_freq_base(parsed.ropes[0].theta)
    writer.add_rope_dimension_count(parsed.ropes[0].dims)
    if any(parsed.windows):
        writer.add_sliding_window(max(filter(None, parsed.windows)))
    if parsed.moe is not None:
        writer.add_expert_count(parsed.moe.experts)
        writer.add_expert_used_count(parsed.moe.per_token)
        writer.add_expert_feed_forward_length(parsed.moe.inner)
    if parsed.ropes[0].kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parsed.ropes[0].factor)
        writer.add_rope_scaling_orig_ctx_len(parsed.ropes[0].context)
        writer.add_rope_scaling_yarn_beta_fast(parsed.ropes[0].betas[0])
    for key, ours in KEYS.items():
        if config.get(key) is not None:
            writer.add_float32(f"{arch}.{ours}", float(config[key]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([])
    if name.startswith("gpt_oss"):
        weights = as_converted(weights)
    for key, weight in weights.items():
        if key.endswith("norm.weight") and name.startswith("gemma"):
            weight = weight + 1
        if name == "granite" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = parsed.heads if "q_proj" in key else parsed.kv_heads
            weight = weight.view(heads, 2, -1, parsed.width).transpose(1, 2).reshape(weight.shape)
        ours = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert ours is not None, key
        numbers = weight.float().contiguous().numpy()
        if packs and ours.endswith("_exps.weight"):
            packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.MXFP4)
            writer.add_tensor(ours, packed, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(ours, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_files_equal_transformers(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    model, config, weights = made(name)
    if name == "gemma3":  # GGUF has no list of layers, no scaled ropes of this kind, and derives the scale of scores
        model = make_reference("gemma3")
        model.config.rope_parameters["full_attention"] = {"rope_type": "default", "rope_theta": 1e6}
        own = model.config.to_dict() | {"layer_types": None, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}
        model = type(model)._from_config(type(model.config)(**own), attn_implementation="eager").float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0.0, 0.25)
        config, weights = save(model, tmp_path / "folder")
    if name == "gemma2":
        config = {**config, "query_pre_attn_scalar": config["head_dim"]}
        for layer in model.model.layers:
            layer.self_attn.scaling = config["head_dim"] ** -0.5
    if name.startswith("gpt_oss"):  # GGUF has no settings of gates
        for layer in model.model.layers:
            layer.mlp.experts.limit, layer.mlp.experts.alpha = 7.0, 1.702
    opened = open_checkpoint(_write(tmp_path / "tiny.gguf", name, config, weights))
    parsed = DecoderConfig.from_hf(opened.config)
    assert parsed.features == DecoderConfig.from_hf(config).features
    assert _off(model, parsed, opened.weights) < CLOSE


def test_mxfp4_in_a_gguf_file_is_kept_packed(made: Callable[[str], Made], tmp_path: Path) -> None:
    """As gguf's own library packs and unpacks it; rows are rounded to eight bits before packed weights."""
    _, config, weights = made("gpt_oss-packed")
    opened = open_checkpoint(_write(tmp_path / "tiny.gguf", "gpt_oss-packed", config, weights, packs=True))
    parsed = DecoderConfig.from_hf(opened.config)
    assert choose_mode(parsed, opened.weights, "auto") == "gguf"
    target = NativeDecoder(parsed, opened.weights, mode="gguf", kv_slots=None)
    widened = NativeDecoder(parsed, opened.weights, mode="float32", kv_slots=None)
    got, wanted = (score_chain(one, TEXT, 13, len(TEXT)) for one in (target, widened))
    errors = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0 < float(errors.median()) < 0.05  # a row whose routing is a near-tie may pick another expert
    experts = 3 * 4 * 3 * 96 * 32  # layers, experts, projections
    saved = sum(one.nbytes for one in widened._kept if isinstance(one, Tensor))
    saved -= sum(one.nbytes for one in target._kept if isinstance(one, Tensor))
    assert saved == experts * 4 - experts * 18 // 32
