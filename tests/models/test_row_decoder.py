"""Latent attention and layers of different sizes in our own decoder: against transformers, and to the bit."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.params import SpeculativeConfig
from forerun.core.types import Needs, TreeBatch
from forerun.models import decoder as decoder_module
from forerun.models import layers
from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import check_supported
from forerun.models.decoder import Decoder
from forerun.models.hybrid import attention as attention_module
from forerun.models.hybrid import rows as rows_module
from forerun.models.hybrid.target import RowDecoder
from forerun.models.load.shapes import expected_shapes
from forerun.models.native import library as native
from forerun.models.native.target import NativeDecoder
from forerun.models.pages import PAGE
from forerun.models.slots import slot_bytes
from forerun.testing import FakeSeq, check_target, path_to, random_tree, tree_of
from tests.models import tiny_checkpoints
from tests.models.test_hybrid import fresh, play, text
from tests.models.tiny_checkpoints import LATENT, SIZED, VOCAB, make_reference, reference_logits, save
from tests.models.tiny_folder import LETTERS, make_tiny_folder

ALL = sorted({**LATENT, **SIZED})
make_decoder = partial(tiny_checkpoints.make_decoder, native=False)
TREES = ["deepseek_v2-groups", "deepseek_v3", "gemma4"]  # one of each kind
# the fast tier has those of them that are not among TREES, which it compares with transformers anyway
SPREAD = [
    "glm4_moe_lite",
    "deepseek_v3-wide",
    "deepseek_v2",
    TREES[0],
    "deepseek_v3-odd",
    TREES[1],
    "gemma4-equal",
    "gemma4-odd",
    "gemma4-experts",
    TREES[2],
]
assert sorted(SPREAD) == ALL
IN_C = sorted({*ALL} - {"deepseek_v3-odd"})
Made = Callable[[str], tuple[Any, dict[str, Any], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    known: dict[str, tuple[Any, dict[str, Any], dict[str, Tensor]]] = {}

    def make(name: str) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
        if name not in known:
            model = make_reference(name)
            known[name] = model, *save(model, tmp_path_factory.mktemp(name))
        return known[name]

    return make


def far_from(model: Any, target: Decoder, tokens: list[int]) -> float:
    """The largest difference from transformers' logits."""
    return float((fresh(target, tokens, len(tokens)) - reference_logits(model, tokens)).abs().max())


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", SPREAD)
def test_logits_of_prompts_and_chains_equal_transformers(name: str, made: Made) -> None:
    model, config, weights = made(name)
    target, tokens = make_decoder(config, weights), text(1, 150)
    wanted = reference_logits(model, tokens)
    for cached in (0, 1, 70, 149):
        got = fresh(target, tokens, len(tokens) - cached)
        torch.testing.assert_close(got, wanted[cached:], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", TREES)
def test_trees_equal_transformers_along_every_path(name: str, made: Made) -> None:
    model, config, weights = made(name)
    target, rng = make_decoder(config, weights), random.Random(3)
    seqs = [FakeSeq(b, text(b, n), max_length=200) for b, n in enumerate((30, 1, 9))]
    target.prefill(seqs, Needs())
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 8) for seq in seqs])
    logits = target.score(seqs, trees, Needs()).required_logits
    for b, seq in enumerate(seqs):
        tokens, parents = tree_of(trees, b)
        for i in range(len(tokens)):
            wanted = reference_logits(model, seq.tokens + [tokens[j] for j in path_to(parents, i)])[-1]
            torch.testing.assert_close(logits[trees.starts[b] + i], wanted, atol=2e-4, rtol=0)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3", *(n for n in ALL if n not in ("gemma4", "deepseek_v3"))])
def test_they_are_targets_to_the_bit(name: str, made: Made) -> None:
    _, config, weights = made(name)
    check_target(lambda: make_decoder(config, weights), vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=9, atol=0.0)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "name", ["gemma4", "deepseek_v3-wide", *(n for n in IN_C if n not in ("gemma4", "deepseek_v3-wide"))]
)
def test_on_the_native_kernels_they_are_targets_to_the_bit(name: str, made: Made) -> None:
    _, config, weights = made(name)
    make = partial(tiny_checkpoints.make_decoder, config, weights)
    if native.available():
        assert isinstance(make(), NativeDecoder)
    check_target(make, vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=9, atol=0.0)
    if name in SIZED:
        check_target(make, vocab_size=VOCAB, needs=Needs((4,)), nodes=9, atol=0.0)  # behind the last layer with keys


def test_they_are_targets_to_the_bit_without_native_kernels(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config, weights = made("deepseek_v3")
    monkeypatch.setattr(native, "available", lambda: False)
    check_target(lambda: make_decoder(config, weights), vocab_size=VOCAB, rounds=4, atol=0.0)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("name", "in_c"), [
    *((name, False) for name in ("gemma4", "gemma4-equal", "deepseek_v3-odd", "deepseek_v2")),
    *((name, True) for name in IN_C),
])  # fmt: skip
def test_rollbacks_turns_and_chunks_change_no_bit(
    name: str, in_c: bool, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, weights = made(name)
    make = partial(tiny_checkpoints.make_decoder, config, weights, native=in_c)
    target, plain = make(), make()
    seqs = play(target, plain, 5, seed=5)
    for seq in seqs:
        target.release(seq)
    for seq in seqs:
        again = FakeSeq(seq.id + 10, [*seq.tokens, 7, 8], max_length=400, cache_salt="")
        target.prefill([again], Needs())
        assert target.reused_tokens(again) == len(seq.tokens) - 1
        got = target.score([again], TreeBatch.chains([[8]]), Needs()).required_logits
        assert torch.equal(got, fresh(plain, again.tokens))
    wanted = fresh(plain, text(9, 140), 3)
    monkeypatch.setattr(decoder_module, "CHUNK", 11)
    assert torch.equal(fresh(make(), text(9, 140), 3), wanted)


def test_prefixes_that_end_within_a_page_are_found(made: Made) -> None:
    _, config, weights = made("deepseek_v3")
    target, plain, tokens = make_decoder(config, weights), make_decoder(config, weights), text(4, 200)
    first = FakeSeq(1, tokens[:150], max_length=400, cache_salt="")
    target.prefill([first], Needs())
    target.release(first)
    for ends in (149, 100, 2 * PAGE, 63):
        seq = FakeSeq(2, [*tokens[:ends], 3], max_length=400, cache_salt="")
        target.prefill([seq], Needs())
        assert target.reused_tokens(seq) == ends
        got = target.score([seq], TreeBatch.chains([[3, 4]]), Needs()).required_logits
        assert torch.equal(got, fresh(plain, [*tokens[:ends], 3, 4], 2))
        target.kv.release(seq.id)


def test_a_token_takes_one_short_row_of_every_layer(made: Made) -> None:
    _, config, weights = made("deepseek_v3")
    parsed = DecoderConfig.from_hf(config)
    assert slot_bytes(parsed, torch.float32) == 3 * (12 + 8) * 4  # latent and rotated part, not four heads of both
    assert make_decoder(config, weights, kv_slots=PAGE).kv.data.shape == (3, 1, 1, PAGE, 20)


def leave(*_: Any) -> Any:
    """In place of a rotation: rows as they are."""


def all_groups(scores: Tensor, config: Any) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool)


def test_norms_of_latents_have_an_epsilon_of_their_own(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, weights = made("deepseek_v3-wide")
    monkeypatch.setattr(attention_module, "EPS", config["rms_norm_eps"])
    assert far_from(model, make_decoder(config, weights), text(1, 60)) > 1e-2


@pytest.mark.parametrize("wrong", ["rotation", "correction", "groups", "scale", "shared", "pairs", "dense", "mscale"])
def test_a_part_that_is_left_out_is_caught(wrong: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, weights = made("deepseek_v3")
    tokens, changed = text(1, 60), dict(weights)
    assert far_from(model, make_decoder(config, weights), tokens) < 2e-4
    if wrong == "rotation":
        monkeypatch.setattr(attention_module, "rotate_", leave)
    elif wrong == "correction":
        changed |= {key: one * 0 for key, one in weights.items() if "correction" in key}
    elif wrong == "groups":
        monkeypatch.setattr(layers, "in_best_groups", all_groups)
    elif wrong == "shared":
        changed |= {key: one * 0 for key, one in weights.items() if "shared_experts.down" in key}
    elif wrong == "dense":
        changed |= {key: one * 0 for key, one in weights.items() if "layers.0.mlp.down" in key}
    elif wrong == "scale":
        config = {**config, "routed_scaling_factor": 1.0}
    elif wrong == "pairs":
        config = {**config, "rope_interleave": False}
    else:
        config = {**config, "rope_parameters": {**config["rope_parameters"], "mscale_all_dim": 0}}
    assert far_from(model, make_decoder(config, changed), tokens) > 1e-2


def share_less(config: DecoderConfig) -> DecoderConfig:
    """Layers that share read the keys and values of another layer of the same size."""
    assert config.varied is not None
    shifted = tuple(one if own else one % 2 for one, own in zip(config.varied.sources, config.varied.owns, strict=True))
    return replace(config, varied=replace(config.varied, sources=shifted))


def no_inputs(config: DecoderConfig) -> DecoderConfig:
    assert config.varied is not None
    return replace(config, varied=replace(config.varied, input_width=0))


SIZED_CONTROLS: dict[str, Callable[[DecoderConfig], DecoderConfig]] = {
    "a window that is one long": lambda config: replace(config, windows=tuple(w and w + 1 for w in config.windows)),
    "another layer's keys": share_less,
    "no inputs of layers": no_inputs,
    "all pairs rotate": lambda c: replace(c, ropes=(replace(c.ropes[0], angles=c.ropes[0].dims // 2), c.ropes[1])),
    "one rope": lambda config: replace(config, ropes=(config.ropes[0], replace(config.ropes[1], theta=60.0))),
    "scaled scores": lambda config: replace(config, attention_scale=0.25),
    "no norm behind attention": lambda c: replace(c, norms=c.norms._replace(after_attention=None)),
}


@pytest.mark.parametrize("wrong", SIZED_CONTROLS)
def test_a_part_of_gemma_4_that_is_wrong_is_caught(wrong: str, made: Made) -> None:
    model, config, weights = made("gemma4")
    changed = SIZED_CONTROLS[wrong](DecoderConfig.from_hf(config))
    target = RowDecoder(changed, weights, dtype=torch.float32, device="cpu", kv_slots=None)
    assert far_from(model, target, text(1, 60)) > 1e-3


@pytest.mark.parametrize("part", ["router.scale", "per_expert_scale", "layernorm_1.weight", "layernorm_2.weight"])
def test_a_part_of_gemma_4s_experts_that_is_left_out_is_caught(part: str, made: Made) -> None:
    model, config, weights = made("gemma4-experts")
    wrong = {key: torch.ones_like(weight) if key.endswith(part) else weight for key, weight in weights.items()}
    target = RowDecoder(DecoderConfig.from_hf(config), wrong, dtype=torch.float32, device="cpu", kv_slots=None)
    assert far_from(model, target, text(1, 60)) > 1e-3


def test_a_norm_before_experts_without_weight_is_refused(made: Made) -> None:
    _, config, weights = made("gemma4-experts")
    name = "model.layers.2.pre_feedforward_layernorm_2.weight"
    wrong = {**weights, name: torch.zeros_like(weights[name])}
    with pytest.raises(UnsupportedModel, match="norm before experts"):
        RowDecoder(DecoderConfig.from_hf(config), wrong, dtype=torch.float32, device="cpu", kv_slots=None)


def test_gemma_4_keeps_keys_of_some_layers_only(made: Made, tmp_path: Path) -> None:
    config = DecoderConfig.from_hf(made("gemma4")[1])
    assert (config.kv_layers, config.layers) == (3, 6)
    with pytest.raises(InvalidInput, match="layers of different sizes") as raised:
        LLM(make_tiny_folder(tmp_path, "gemma4"), device="cpu", tensor_parallel_size=2)
    assert "\n" not in str(raised.value)


def test_gemma_4_as_released_is_read(made: Made) -> None:
    """Nested settings, global sizes by name, and unread keys of layers that share."""
    _, config, weights = made("gemma4")
    nested = {key: value for key, value in config.items() if key != "per_layer_config"} | {"global_head_dim": 16}
    nested["use_bidirectional_attention"] = "vision"
    renamed = {"model.language_model." + key.removeprefix("model."): one for key, one in weights.items()}
    extra = {"model.language_model.layers.5.self_attn.k_proj.weight": torch.zeros(32, 32)}
    outer, tokens = {"model_type": "gemma4", "text_config": nested}, text(5, 12)
    got = fresh(make_decoder(outer, renamed | extra), tokens)
    assert torch.equal(got, fresh(make_decoder(config, weights), tokens))
    read = dict(expected_shapes(DecoderConfig.from_hf(outer), renamed | extra))  # type: ignore[arg-type]
    assert {key: tuple(one.shape) for key, one in (renamed | extra).items()} == read


def test_rows_that_share_calls_are_caught(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers over all rows of a pass have other bits: the control of the tests to the bit."""
    _, config, weights = made("deepseek_v3")
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(rows_module, "by_rows", lambda function, *inputs, size=None: function(*inputs))
    with pytest.raises(AssertionError):
        check_target(lambda: make_decoder(config, weights), vocab_size=VOCAB, nodes=9, atol=0.0)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3", *(n for n in ALL if n not in ("gemma4", "deepseek_v3"))])
def test_greedy_texts_equal_transformers_plain_and_drafted(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, prompts, wanted = make_tiny_folder(tmp_path, name), ["abcabcabcabc", "the cat. the cat. the", "Q"], []
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    for prompt in prompts:
        ids = torch.tensor([[LETTERS.index(letter) for letter in prompt]])
        out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=0, use_cache=False)
        wanted.append([token for token in out[0, ids.shape[1] :].tolist() if token != 1])
    for drafter in ("none", "ngram", "suffix"):
        config = SpeculativeConfig(drafter=drafter, controller="fixed", budget=8)
        with LLM(folder, speculative_config=config, device="cpu") as llm:
            done = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0))
            assert (llm.engine.stats.drafted > 0) == (drafter != "none")
        assert [[token for token in one.token_ids if token != 1] for one in done] == wanted, drafter


def test_block_fp8_checkpoints_are_read(made: Made, tmp_path: Path) -> None:
    model = made("deepseek_v3")[0]
    folder = Path(make_tiny_folder(tmp_path, "deepseek_v3"))
    held, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        held[name] = meant[name] = weight
        if "_proj" in name:  # blocks of 16 x 16, the last ones smaller
            padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 16, 0, -weight.shape[0] % 16))
            blocks = padded.view(len(padded) // 16, 16, -1, 16)
            scales = blocks.abs().amax((1, 3)) / 448
            numbers = (blocks / scales[:, None, :, None]).view_as(padded)[: len(weight), : weight.shape[1]]
            held[name] = numbers.contiguous().to(torch.float8_e4m3fn)
            held[name + "_scale_inv"] = scales
            wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: len(weight), : weight.shape[1]]
            meant[name] = held[name].float() * wide
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(written))
    with LLM(str(folder), device="cpu", speculative_config=SpeculativeConfig(drafter="none")) as llm:
        got = fresh(llm.engine.target, text(1, 20), 20)  # type: ignore[arg-type]
    plain = make_decoder(written, meant)
    torch.testing.assert_close(got, fresh(plain, text(1, 20), 20), atol=1e-5, rtol=0)
    assert far_from(model, plain, text(1, 20)) > 1e-3  # numbers of 8 bits show


@pytest.mark.parametrize(("setting", "said"), [
    ({"topk_method": "greedy"}, "topk_method"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"moe_layer_freq": 2}, "moe_layer_freq"),
])  # fmt: skip
def test_other_routers_are_refused(setting: dict[str, Any], said: str, made: Made) -> None:
    with pytest.raises(UnsupportedModel, match=said) as raised:
        DecoderConfig.from_hf({**made("deepseek_v3")[1], **setting})
    assert "\n" not in str(raised.value)


def test_what_cannot_run_latent_attention_says_so(made: Made, tmp_path: Path) -> None:
    config = DecoderConfig.from_hf(made("deepseek_v2")[1])
    assert "latent attention" in config.features
    with pytest.raises(UnsupportedModel, match="GPU decoder cannot"):
        check_supported(config)
    folder = make_tiny_folder(tmp_path, "deepseek_v2")
    with pytest.raises(Exception, match="latent attention") as raised:
        LLM(folder, device="cpu", tensor_parallel_size=2)
    assert "\n" not in str(raised.value)


def test_kimi_k2_is_read_as_deepseek_v3(made: Made) -> None:
    _, config, weights = made("deepseek_v3")
    tokens = text(5, 12)
    renamed = make_decoder({**config, "model_type": "kimi_k2"}, weights)
    assert torch.equal(fresh(renamed, tokens), fresh(make_decoder(config, weights), tokens))
