"""GGUF files of hybrids, of latent attention and of layers of different sizes against transformers' own checkpoints."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.layers import unpair
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.quants import dequantize
from forerun.models.load.shapes import check_shapes
from forerun.models.load.weights import GgufWeights
from forerun.models.native.target import choose_mode, native_decoder
from tests.models.gguf_writer import ARCHITECTURES, converted, write_gguf
from tests.models.tiny_checkpoints import (
    FAMILIES,
    LATENT,
    VOCAB,
    make_decoder,
    make_reference,
    reference_logits,
    save,
    score_chain,
)
from tests.native.blocks import needs_native

pytestmark = needs_native
NAMES = [
    "lfm2", "qwen3_next", "qwen3_5", "qwen3_5_moe", "granite4", "granite4-experts", "nemotron_h", "nemotron_h-experts",
    "deepseek_v2",
    "deepseek_v2-groups", "deepseek_v3", "deepseek_v3-wide", "glm4_moe_lite", "glm4_moe", "glm4_moe-groups", "gemma4",
    "gemma4-equal", "gemma4-odd", "gemma4-experts",
    "lfm2_moe", "minimax_m2", "dots1", "exaone_moe", "olmoe", "granitemoe", "granitemoeshared", "arcee", "ministral3",
    "gemma", "seed_oss", "ernie4_5", "exaone4",
]  # fmt: skip
TEXT = random.Random(11).choices(range(VOCAB), k=40)
CLOSE, FAR = 1e-4, 1e-2
Made = tuple[Any, dict[str, Any], dict[str, Tensor]]
# what llama.cpp's files cannot say, or say for all layers alike
YARN = {**LATENT["deepseek_v3"]["rope_parameters"], "mscale": 1.3}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": []},
    "dots1": {"max_window_layers": 62},
    "exaone4": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ministral3": {
        "rope_parameters": {**FAMILIES["ministral3"]["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "nemotron_h": {"time_step_min": 0.001},
    "granite4-experts": {"mamba_proj_bias": False},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v3-wide": {"attention_bias": False},
    "gemma4-equal": {"attention_bias": False},
    "deepseek_v2-groups": {"rope_parameters": YARN},
    "deepseek_v3": {"rope_parameters": YARN},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    found: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in found:
            model = make_reference(name, SETTINGS.get(name))
            found[name] = model, *save(model, tmp_path_factory.mktemp(name))
        return found[name]

    return make


def off(model: Any, config: dict[str, Any], weights: Any, native: bool) -> float:
    """How far logits of a prompt and a chain behind it are from transformers'."""
    check_shapes(DecoderConfig.from_hf(config), weights)
    got = score_chain(make_decoder(config, weights, native=native), TEXT, 13, len(TEXT))
    return float((got - reference_logits(model, TEXT)[13:]).abs().max())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_files_equal_transformers(name: str, native: bool, made: Callable[[str], Made], tmp_path: Path) -> None:
    model, config, weights = made(name)
    opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights))
    wanted, found = DecoderConfig.from_hf(config), DecoderConfig.from_hf(opened.config)
    assert found.features == wanted.features
    if found.recurrent is not None:
        found = replace(found, recurrent=replace(found.recurrent, in_turns=False))
    assert replace(found, names=wanted.names, family=wanted.family, inner=wanted.inner) == replace(
        wanted, max_length=found.max_length
    )
    assert off(model, opened.config, opened.weights, native) < CLOSE


@pytest.mark.parametrize(
    ("name", "change"),
    [("qwen3_next", {"plus_one": False}), ("granite4-experts", {"heads": 0}), ("nemotron_h", {"negative_exp": False})],
)
def test_a_change_of_the_converter_that_is_not_undone_is_caught(
    name: str, change: dict[str, Any], made: Callable[[str], Made], tmp_path: Path
) -> None:
    model, config, weights = made(name)
    opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights))
    whole = opened.weights
    assert isinstance(whole, GgufWeights)
    wrong = {key: replace(origin, **change) for key, origin in whole.origins.items()}
    assert wrong != whole.origins
    assert not off(model, opened.config, GgufWeights(whole.file, wrong, whole.family), native=True) < FAR


@pytest.mark.parametrize("native", [True, False])
def test_value_heads_in_the_order_of_other_files_are_caught(
    native: bool, made: Callable[[str], Made], tmp_path: Path
) -> None:
    model, config, weights = made("qwen3_5")
    opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights))
    assert not off(model, opened.config | {"linear_heads_in_turns": False}, opened.weights, native) < FAR


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "qwen3_next",
        "qwen3_5",
        "granite4-experts",
        "nemotron_h-experts",
        "deepseek_v3",
        "glm4_moe",
        "gemma4",
        "gemma4-experts",
    ],
)
def test_blocks_stay_packed(name: str, kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Rows are rounded to eight bits before packed weights, so logits are near those of the same numbers in float32."""
    _, config, weights = made(name)
    opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights, kind))
    found = opened.weights
    assert isinstance(found, GgufWeights)
    for key, origin in found.origins.items():
        assert torch.equal(dequantize(found.blocks(key)) - int(origin.plus_one), found[key]), key
    parsed = DecoderConfig.from_hf(opened.config)
    assert choose_mode(parsed, found, "auto") == "gguf"
    made_of = (native_decoder(parsed, found, mode, None, None) for mode in ("gguf", "float32"))
    got, wanted = (score_chain(one, TEXT, 13, len(TEXT)) for one in made_of if one is not None)
    errors = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    # a row whose routing is a near-tie picks another expert, which states, or six layers of such, carry on
    assert 0 < float(errors.median()) < (0.3 if parsed.moe and (parsed.recurrent or parsed.varied) else 0.05)


@pytest.mark.parametrize(("name", "arch"), [("qwen2", "QWEN2VL"), ("qwen3", "QWEN3VL"), ("qwen3_moe", "QWEN3VLMOE")])
def test_files_of_models_that_read_pictures_have_the_language_part(
    name: str, arch: str, made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config, weights = made(name)
    monkeypatch.setitem(ARCHITECTURES, name, arch)
    sections = {"rope.dimension_sections": [2, 1, 1, 0]}
    opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights, **sections))
    assert opened.config["model_type"] == name
    assert off(model, opened.config, opened.weights, native=True) < CLOSE


def test_neighbours_that_the_converter_made_halves(made: Callable[[str], Made], tmp_path: Path) -> None:
    """GLM-4.1V's files, whose architecture is GLM-4's; the control reads them as these."""
    model, config, weights = made("glm4")
    parsed, turned = DecoderConfig.from_hf(config), dict(weights)
    for key in weights:
        if ".q_proj." in key or ".k_proj." in key:
            turned[key] = unpair(weights[key], parsed.head_dim, parsed.ropes[0].dims)
    found = []
    for sections in ([1, 1, 1, 0], [0, 0, 0, 0]):
        path = write_gguf(tmp_path / "tiny.gguf", config, turned, **{"rope.dimension_sections": sections})
        opened = open_checkpoint(path)
        found.append(off(model, opened.config, opened.weights, native=True))
    assert found[0] < CLOSE
    assert found[1] > FAR


def test_layers_of_exaone_slide_by_the_rule_where_a_file_lists_none(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    _, config, weights = made("exaone4")
    pattern = "attention.sliding_window_pattern"
    for more, windows in (
        ({pattern: None}, (6, 6, 6)),
        ({pattern: None, "attention.sliding_window": None}, (None,) * 3),
    ):
        opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights, **more))
        found = DecoderConfig.from_hf(opened.config)
        assert (found.windows, None in found.layer_ropes) == (windows, False)


def test_layers_that_only_draft_are_left_out(made: Callable[[str], Made], tmp_path: Path) -> None:
    model, config, weights = made("glm4_moe")
    beside = {f"blk.3.{name}.weight": torch.ones(32) for name in ("nextn.enorm", "attn_norm")}
    path = write_gguf(tmp_path / "tiny.gguf", config, weights | beside, block_count=4, nextn_predict_layers=1)
    opened = open_checkpoint(path)
    assert off(model, opened.config, opened.weights, native=True) < CLOSE


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_older_files_have_one_expanding_weight(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    model, config, weights = made(name)
    whole = {
        f"blk.{i}.attn_kv_b.weight": weights[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
        for i in range(config["num_hidden_layers"])
    }
    opened = open_checkpoint(write_gguf(tmp_path / "both.gguf", config, weights | whole))
    assert off(model, opened.config, opened.weights, native=True) < CLOSE
    rest = {key: weight for key, weight in weights.items() if "kv_b_proj" not in key}
    keys: dict[str, Any] = {"attention.key_length_mla": None, "attention.value_length_mla": None}
    keys |= {"attention.key_length": 18, "attention.value_length": 14, "expert_gating_func": None}
    keys["expert_gating_func"] = 2 if name == "deepseek_v3" else None
    opened = open_checkpoint(write_gguf(tmp_path / "old.gguf", config, rest | whole, **keys))
    assert off(model, opened.config, opened.weights, native=True) < CLOSE


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("qwen3_5", {"ssm.inner_size": 47}, "inner_size"),
        ("qwen3_5", {"ssm.group_count": 4}, "tensor"),
        ("gemma4", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("gemma4", {"attention.head_count_kv": [2, 2]}, "by layer"),
        ("lfm2", {"shortconv.l_cache": None}, "l_cache"),
        ("deepseek_v3", {"attention.kv_lora_rank": 13}, "kv_a_mqa"),
        ("granite4", {"block_count": 5}, "layers"),
    ],
)
def test_damaged_files_are_refused_by_name(
    name: str, keys: dict[str, Any], said: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    _, config, weights = made(name)
    with pytest.raises(DamagedFile, match=said):
        load(write_gguf(tmp_path / "odd.gguf", config, weights, **keys))


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("lfm2", "conv.conv.weight", lambda one: one[:, None].repeat(1, 2, 1)),
        ("qwen3_next", "conv1d.weight", lambda one: one[:, None].repeat(1, 2, 1)),
        ("qwen3_next", "shared_expert_gate.weight", lambda one: one.repeat(2, 1)),
        ("gemma4-experts", "gate_up_exps.weight", lambda one: torch.cat((one, one[:, :1]), 1)),
    ],
)
def test_tensors_of_other_shapes_are_refused_by_name(
    name: str,
    part: str,
    change: Callable[[Tensor], Tensor],
    made: Callable[[str], Made],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, config, weights = made(name)

    def changed(*given: Any) -> Iterator[tuple[str, Tensor]]:
        return ((key, change(one) if key.endswith(part) else one) for key, one in converted(*given))

    monkeypatch.setattr("tests.models.gguf_writer.converted", changed)
    with pytest.raises(DamagedFile, match=r"blk\.\d"):
        load(write_gguf(tmp_path / "odd.gguf", config, weights))


def test_numbers_of_layers_that_no_model_has_are_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    _, config, weights = made("lfm2")
    odd = {f"blk.{'9' * 5000}.attn_q.weight": torch.ones(2)}
    with pytest.raises(UnsupportedModel, match="not known"):
        load(write_gguf(tmp_path / "odd.gguf", config, weights | odd))


def load(path: str) -> Decoder:
    opened = open_checkpoint(path)
    check_shapes(DecoderConfig.from_hf(opened.config), opened.weights)
    return make_decoder(opened.config, opened.weights)
