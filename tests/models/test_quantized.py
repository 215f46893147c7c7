"""Quantised safetensors checkpoints: weights, logits and texts are those of the dequantised model in transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

from forerun import LLM, SamplingParams
from forerun.build.engine import load_target
from forerun.cli import doctor
from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.core.params import EngineConfig
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.quantized.scheme import describe
from forerun.models.load.shapes import check_shapes
from tests.models import quantized_folders as made
from tests.models.quantized_folders import Format
from tests.models.tiny_checkpoints import reference_logits, score_chain

FP8_CHANNEL = made.compressed("float-quantized", num_bits=8, type="float", strategy="channel")
FP8_TENSOR = made.compressed("float-quantized", static=True, num_bits=8, type="float", strategy="tensor")
W8 = made.compressed("int-quantized", num_bits=8, type="int", strategy="channel")
W4 = made.compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
GROUP = W4["config_groups"]["group_0"]
ORDERED = GROUP | {"weights": GROUP["weights"] | {"actorder": "group"}}  # as older versions of the library wrote it
W4_ORDER = W4 | {"config_groups": {"group_0": ORDERED}}
W4_ZEROS = made.compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False)
W4_CHANNEL = made.compressed("pack-quantized", num_bits=4, strategy="channel")
W8_PACKED = made.compressed("pack-quantized", num_bits=8, strategy="group", group_size=32)
W8_ZEROS = made.compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False)
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
GPTQ_ORDER = GPTQ | {"desc_act": True, "checkpoint_format": "gptq"}
FORMATS = {
    "fp8-channel": Format(FP8_CHANNEL, made.by_library(FP8_CHANNEL), "FP8 (compressed-tensors, per channel)"),
    "fp8-tensor": Format(FP8_TENSOR, made.by_library(FP8_TENSOR), "FP8 (compressed-tensors, per tensor)"),
    "w8a8": Format(W8, made.by_library(W8), "8-bit (compressed-tensors, per channel)", family="qwen2"),
    "w4": Format(W4, made.by_library(W4), "4-bit (compressed-tensors, groups of 32)"),
    "w4-act-order": Format(W4_ORDER, made.reordered(W4), "4-bit (compressed-tensors, groups of 32, act-order)"),
    "w4-zeros": Format(
        W4_ZEROS, made.by_library(W4_ZEROS), "4-bit (compressed-tensors, groups of 32, zero points)", family="qwen2"
    ),
    "w4-channel": Format(W4_CHANNEL, made.by_library(W4_CHANNEL), "4-bit (compressed-tensors, per channel)"),
    "w8a16": Format(W8_PACKED, made.by_library(W8_PACKED), "8-bit (compressed-tensors, groups of 32)"),
    "w8a16-zeros": Format(W8_ZEROS, made.by_library(W8_ZEROS), "8-bit (compressed-tensors, per channel, zero points)"),
    "fp8-blocks": Format(BLOCKS, made.block_fp8, "FP8 (fp8, blocks of 128 x 128)"),
    "fp8-autofp8": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, made.tensor_fp8, "FP8 (fp8, per tensor)"
    ),
    "awq": Format(AWQ, made.awq(32), "4-bit (AWQ, groups of 32, zero points)", family="qwen2"),
    "awq-mixed": Format(
        AWQ | {"group_size": -1, "modules_to_not_convert": ["o_proj"]}, made.awq(-1),
        "4-bit (AWQ, per channel, zero points)", plain=("lm_head", "embed_tokens", "o_proj"),
    ),
    "gptq": Format(GPTQ, made.gptq(4, 32, less=1, with_bias=True), "4-bit (GPTQ, groups of 32, zero points)"),
    "gptq-8": Format(
        GPTQ | {"bits": 8, "group_size": -1}, made.gptq(8, -1, less=1), "8-bit (GPTQ, per channel, zero points)",
        plain=("embed_tokens",),  # the LM head too
    ),
    "gptq-v2": Format(
        GPTQ | {"checkpoint_format": "gptq_v2"}, made.gptq(4, 32, less=0), "4-bit (GPTQ, groups of 32, zero points)"
    ),
    "gptq-act-order": Format(
        GPTQ_ORDER, made.gptq(4, 32, less=1, act_order=True), "4-bit (GPTQ, groups of 32, zero points, act-order)",
        family="qwen2",
    ),
}  # fmt: skip
PACKED = ("awq", "awq-mixed", "gptq", "gptq-v2")  # on a CPU: scales of 16 bits, see tests/native/test_packed_files.py
MODULE = "model.layers.1.mlp.down_proj"
TEXT = [3, 9, 27, 14, 5, 40, 33, 8, 21, 17, 2, 6]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def logits_of(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(str(folder))
    config = DecoderConfig.from_hf(checkpoint.config)
    check_shapes(config, checkpoint.weights)
    decoder = Decoder(config, checkpoint.weights, dtype=torch.float32, device="cpu", kv_slots=64)
    return score_chain(decoder, TEXT, 1, 64)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_logits_and_texts_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    model = made.write(tmp_path, FORMATS[name])
    checkpoint = open_checkpoint(str(tmp_path))
    meant = model.state_dict()
    assert set(checkpoint.weights) == set(meant)
    for key, weight in meant.items():
        assert checkpoint.weights.shape(key) == tuple(weight.shape)
        assert torch.equal(checkpoint.weights[key], weight), key
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(model, TEXT)[1:], rtol=1e-4, atol=1e-4)
    expected = model.generate(torch.tensor([TEXT]), max_new_tokens=24, do_sample=False, eos_token_id=1)[0, len(TEXT) :]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM(str(tmp_path), device="cpu", dtype="float32", drafter="ngram") as llm:
        assert llm.generate([TEXT], params)[0].token_ids == expected.tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_said_in_one_line(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made.write(tmp_path, FORMATS[name])
    assert describe(json.loads((tmp_path / "config.json").read_text())) == FORMATS[name].said
    with caplog.at_level(logging.INFO):
        load_target(open_checkpoint(str(tmp_path)), EngineConfig(device="cpu", kv_slots=64))
    lines = [record.getMessage() for record in caplog.records if FORMATS[name].said in record.getMessage()]
    held = "kept packed" if name in PACKED else "dequantised to float32"
    assert lines == [f"{tmp_path}: {FORMATS[name].said}, {held}"]
    unused = [record.getMessage() for record in caplog.records if "are ignored" in record.getMessage()]
    static = name in ("fp8-tensor", "fp8-autofp8")
    assert unused == (
        [f"{tmp_path}: scales of activations are ignored: activations stay in 16 or 32 bits"] if static else []
    )


def test_the_library_reads_the_files_of_awq_and_block_fp8_as_the_test_does() -> None:
    """An outside reader of the two layouts that this test writes itself."""
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    parts, meant = made.awq(32)(weight)
    converted = AutoAWQConverter(group_size=32).process({f"a.{part}": tensor for part, tensor in parts.items()})
    numbers = unpack_from_int32(converted["a.weight_packed"], 4, torch.Size((96, 64))).float()
    zeros = unpack_from_int32(converted["a.weight_zero_point"], 4, torch.Size((96, 2)), packed_dim=0).float()
    scales = converted["a.weight_scale"].float()
    wide = (numbers.view(96, 2, 32) - zeros[..., None]) * scales[..., None]
    assert torch.equal(wide.flatten(1), meant)
    weight = torch.randn(200, 136, generator=torch.Generator().manual_seed(0))
    parts, meant = made.block_fp8(weight)
    reader = FP8BlockDequantizer(dtype=torch.float32)
    assert torch.equal(reader.process({f"a.{part}": tensor for part, tensor in parts.items()})["a.weight"], meant)


@pytest.mark.parametrize(
    ("told", "written"),
    [
        (Format(AWQ, made.awq(32), ""), made.awq(32, order=tuple(range(8)))),
        (Format(GPTQ, made.gptq(4, 32, less=1), ""), made.gptq(4, 32, less=0)),
        (Format(GPTQ | {"checkpoint_format": "gptq_v2"}, made.gptq(4, 32, less=0), ""), made.gptq(4, 32, less=1)),
    ],
)
def test_negative_control_another_order_or_zero_point_changes_the_logits(
    told: Format, written: made.Quantise, tmp_path: Path
) -> None:
    """The comparison above would find them."""
    model = made.write(tmp_path / "right", told)
    made.write(tmp_path / "wrong", Format(told.config, written, ""))
    expected = reference_logits(model, TEXT)[1:]
    torch.testing.assert_close(logits_of(tmp_path / "right"), expected, rtol=1e-4, atol=1e-4)
    assert (logits_of(tmp_path / "wrong") - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "part", "tensor", "said"),
    [
        ("fp8-channel", "weight_scale", None, "is missing"),
        ("fp8-channel", "weight_scale", torch.ones(7, 1), r"is of \(7, 1\) where its weight needs \(160, 1\)"),
        ("fp8-tensor", "weight_scale", torch.ones(160, 1), r"needs \(1, 1\)"),
        ("fp8-tensor", "weight_scale", torch.tensor([float("nan")]), "not finite"),
        ("fp8-channel", "weight_scale", torch.ones(160, 1, dtype=torch.int32), "is int32, not float16"),
        ("fp8-channel", "weight_scale", torch.zeros(160, 1), "is 0 throughout, and its weight is not"),
        ("w4", "weight_scale", torch.zeros(160, 7), "is 0 throughout"),
        ("fp8-channel", "weight", torch.zeros(160, 224), "has scales, but its weight is F32"),
        ("fp8-channel", "weight", torch.zeros(160, 224, dtype=torch.int8), "is int8, not float8_e4m3fn"),
        ("fp8-blocks", "weight_scale_inv", None, "weight_scale' is missing"),
        ("fp8-blocks", "weight_scale_inv", torch.ones(2, 1), r"needs \(2, 2\)"),
        ("w4", "weight_scale", None, "is missing"),
        ("w4", "weight_shape", None, "is missing"),
        ("w4", "weight_shape", torch.tensor([160, 225]), "weight_packed' is"),
        ("w4", "weight_packed", torch.zeros(160, 27, dtype=torch.int32), "does not hold"),
        ("w4-zeros", "weight_zero_point", None, "is missing"),
        ("w4-zeros", "weight_zero_point", torch.zeros(160, 7, dtype=torch.int32), r"needs \(20, 7\)"),
        ("w4-act-order", "weight_g_idx", None, "is missing"),
        ("awq", "scales", None, "is missing"),
        ("awq", "qzeros", None, "is missing"),
        ("awq", "qzeros", torch.zeros(7, 19, dtype=torch.int32), r"needs \(7, 20\)"),
        ("awq", "scales", torch.full((7, 160), float("inf"), dtype=torch.float16), "not finite"),
        ("gptq-act-order", "g_idx", None, "is missing"),
        ("gptq-act-order", "g_idx", torch.full((224,), 7, dtype=torch.int32), "beyond the 7 that there are"),
        ("gptq", "scales", torch.ones(4, 160, dtype=torch.float16), r"needs \(7, 160\)"),
    ],
)
def test_missing_and_damaged_parts_are_named(
    name: str, part: str, tensor: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    made.write(tmp_path, FORMATS[name])
    made.change(tmp_path, **{f"{MODULE}.{part}": tensor})
    with pytest.raises(DamagedFile, match=said) as error:
        load_target(open_checkpoint(str(tmp_path)), EngineConfig(device="cpu", kv_slots=64))
    assert MODULE in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_weight_that_no_config_explains_is_damaged(kind: torch.dtype, tmp_path: Path) -> None:
    """Neither scales nor a quantization_config: read as they lie, its numbers would write a wrong text."""
    folder = tmp_path / "model"
    made.write_plain(folder, made.make_model("llama"))
    logits_of(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {f"{MODULE}.weight": torch.ones(160, 224).to(kind)}, file)
    with pytest.raises(DamagedFile, match=r"down_proj\.weight' is \w+, and config\.json has no quantization_config"):
        open_checkpoint(str(folder))


def test_a_weight_of_zeros_may_have_scales_of_zero(tmp_path: Path) -> None:
    made.write(tmp_path, FORMATS["fp8-channel"])
    zeros = torch.zeros(160, 224)
    made.change(
        tmp_path, **{f"{MODULE}.weight": zeros.to(torch.float8_e4m3fn), f"{MODULE}.weight_scale": torch.zeros(160, 1)}
    )
    assert torch.equal(open_checkpoint(str(tmp_path)).weights[f"{MODULE}.weight"], zeros)


def test_zero_points_of_0_in_the_first_format_of_gptq(tmp_path: Path) -> None:
    """Its libraries disagree about them: read where the config names the writer, else refused."""
    made.write(tmp_path, FORMATS["gptq"])
    zeros = torch.full((7, 20), 0x22222220, dtype=torch.int32)  # the first of eight is 0, and the others 2
    made.change(tmp_path, **{f"{MODULE}.qzeros": zeros - 0x11111111})
    with pytest.raises(UnsupportedModel, match=r"down_proj\.qzeros' has a zero point of 0"):
        logits_of(tmp_path)
    made.change(tmp_path, {"meta": {"quantizer": ["gptqmodel:4.0.0"]}})
    found = open_checkpoint(str(tmp_path)).weights[f"{MODULE}.weight"]
    made.change(tmp_path, {"checkpoint_format": "gptq_v2"}, **{f"{MODULE}.qzeros": zeros})
    assert torch.equal(found, open_checkpoint(str(tmp_path)).weights[f"{MODULE}.weight"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"bits": 4}, "quant_method=None"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (GPTQ | {"bits": 2}, "GPTQ of 2 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "layout 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "marlin"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "AWQ in the layout 'gemv'"),
        (AWQ | {"bits": 8}, "AWQ of 8 bits"),
        (W4 | {"format": "marlin-24", "config_groups": {"a": GROUP | {"format": None}}}, "marlin-24"),
        (W4 | {"config_groups": {"a": GROUP | {"format": "nvfp4-pack-quantized"}}}, "nvfp4"),
        (W4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (W4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transforms"),
        (W4 | {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, "other things than weights"),
    ],
)  # fmt: skip
def test_formats_that_are_not_known_are_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    made.write(tmp_path, Format(config, made.block_fp8, ""))
    with pytest.raises(UnsupportedModel, match=said) as error:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    ["yes", GPTQ | {"bits": None}, GPTQ | {"group_size": "x"}, AWQ | {"group_size": 0}, W4 | {"config_groups": 3},
     GPTQ | {"bits": float("inf")}, W4 | {"config_groups": {"a": GROUP | {"targets": ["re:("]}}},
     {"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "fp8", "weight_block_size": [0, 0]}],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_line(config: Any, tmp_path: Path) -> None:
    made.write(tmp_path, Format(config, made.block_fp8, ""))
    with pytest.raises(DamagedFile, match=r"quantization_config.*fetch it again") as error:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_setting_that_is_missing_is_named(tmp_path: Path) -> None:
    made.write(tmp_path, Format({key: W4[key] for key in W4 if key != "config_groups"}, made.block_fp8, ""))
    with pytest.raises(DamagedFile, match=r"it has no 'config_groups'"):
        open_checkpoint(str(tmp_path))


def test_blocks_and_groups_larger_than_a_weight_are_one(tmp_path: Path) -> None:
    """A damaged config may say any size: nothing is allocated by it."""
    model = made.write(tmp_path, Format(AWQ | {"group_size": 1 << 80}, made.awq(-1), ""))
    assert torch.equal(
        open_checkpoint(str(tmp_path)).weights[f"{MODULE}.weight"], model.state_dict()[f"{MODULE}.weight"]
    )
    made.write(tmp_path, Format({"quant_method": "fp8", "weight_block_size": [1 << 50, 128]}, made.block_fp8, ""))
    with pytest.raises(DamagedFile, match=r"weight_scale_inv' is of \(2, 2\) where its weight needs \(1, 2\)"):
        logits_of(tmp_path)


def test_mixed_precision_takes_the_scheme_of_a_name_before_that_of_a_class(tmp_path: Path) -> None:
    """compressed-tensors with a group for down_proj alone, in 8 bits, and 4 bits for the others."""
    eight = W8_PACKED["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}
    config = W4 | {"format": "mixed-precision", "config_groups": {**W4["config_groups"], "group_1": eight}}

    def quantise(weight: torch.Tensor) -> tuple[made.Parts, torch.Tensor]:
        return made.by_library(W8_PACKED if weight.shape == (made.WIDTH, made.INNER) else W4)(weight)

    model = made.write(tmp_path, Format(config, quantise, ""))
    for key, weight in model.state_dict().items():
        assert torch.equal(open_checkpoint(str(tmp_path)).weights[key], weight), key
    assert describe({"quantization_config": config}) == "4-bit and 8-bit (compressed-tensors, groups of 32)"


def test_doctor_says_what_a_checkpoint_is_held_as(tmp_path: Path) -> None:
    made.write(tmp_path, FORMATS["awq"])
    assert doctor._weights(str(tmp_path)).found == f"{tmp_path}: {FORMATS['awq'].said}, kept packed"
    made.change(tmp_path, {"quant_method": "exl3"})
    refused = doctor._weights(str(tmp_path))
    assert not refused.ok
    assert "quant_method='exl3'" in refused.found


@pytest.mark.parametrize("dtype", ["q8", "bfloat16"])
def test_the_c_kernels_hold_them_in_the_format_asked_for(dtype: str, tmp_path: Path) -> None:
    """As a checkpoint with the same weights in float32 would be held."""
    model = made.write(tmp_path / "quantised", FORMATS["w4"])
    made.write_plain(tmp_path / "plain", model)
    texts = []
    for folder in ("quantised", "plain"):
        with LLM(str(tmp_path / folder), device="cpu", dtype=dtype, drafter="none") as llm:
            texts.append(llm.generate([TEXT], SamplingParams(max_tokens=16, temperature=0.0))[0].token_ids)
    assert texts[0] == texts[1]
