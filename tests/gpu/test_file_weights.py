"""Quantised checkpoints whose numbers stay as they are: what is packed stands for the very weights of the files."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import keeps_packed
from forerun.core.types import Needs, TreeBatch
from forerun.models.blocks import Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.cuda.file_weights import StoredWeights, pack_numbers
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Strips, pack_strips
from forerun.models.layers import Mlp
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.quantized.layouts import Numbers
from forerun.models.load.quantized.writing import Rounding, write_rounded
from forerun.testing import FakeSeq, random_tree
from forerun.verify.greedy import device_walk
from tests.gpu.tiny import need_cuda
from tests.models import quantized_folders as made
from tests.models.quantized_folders import Format

SIZES, SPREAD = (256, 384), 0.04  # numbers that do not grow from layer to layer, as of real models
SIZED: dict[str, Any] = {"sizes": SIZES, "spread": SPREAD}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
FORMATS = {
    "fp8-blocks": Format(BLOCKS, made.block_fp8, "", **SIZED),
    "fp8-tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, made.tensor_fp8, "", **SIZED),
    "awq": Format(AWQ, made.awq(32), "", family="qwen2", **SIZED),
    "awq-64": Format(AWQ | {"group_size": 64}, made.awq(64), "", **SIZED),
    "awq-mixed": Format(
        AWQ | {"group_size": -1, "modules_to_not_convert": ["o_proj"]}, made.awq(-1), "",
        plain=("lm_head", "embed_tokens", "o_proj", "v_proj"), **SIZED,
    ),
    "gptq": Format(GPTQ, made.gptq(4, 128, less=1), "", **SIZED),
    "gptq-8": Format(GPTQ | {"bits": 8, "group_size": -1}, made.gptq(8, -1, less=1), "", **SIZED),
    "gptq-act-order": Format(
        GPTQ | {"desc_act": True, "checkpoint_format": "gptq"}, made.gptq(4, 128, less=1, act_order=True), "",
        **SIZED,
    ),
}  # fmt: skip
PACKED = {  # the format of gates, and of the others
    "fp8-blocks": "e4m3", "fp8-tensor": "e4m3", "awq": "int4_zeros", "awq-64": "int4_zeros", "awq-mixed": "int4_zeros",
    "gptq": "int4_zeros", "gptq-8": "bf16", "gptq-act-order": "bf16", "fp8": "e4m3", "int8": "int8", "w4": "int4",
}  # fmt: skip
OURS: list[Rounding] = ["fp8", "int8", "w4"]


def write(name: str, folder: Path) -> Path:
    if name in FORMATS:
        made.write(folder, FORMATS[name])
        return folder
    rounding = next(each for each in OURS if each == name)
    made.write_plain(folder / "plain", made.make_model("qwen3", *SIZES, SPREAD))
    write_rounded(open_checkpoint(str(folder / "plain")), folder / "out", rounding)
    return folder / "out"


def weights_of(mlp: object) -> tuple[Tensor, Tensor]:
    assert isinstance(mlp, Mlp)
    return mlp.gate_up, mlp.down


@pytest.mark.parametrize("name", PACKED)
def test_numbers_stand_for_the_weights_of_the_files(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write(name, tmp_path)))
    config, device = DecoderConfig.from_hf(checkpoint.config), torch.device("cpu")
    reader = StoredWeights(checkpoint.weights, config, device)
    stored = reader.block(1)
    assert reader._read.cache_info().currsize == 0, "numbers would stay on the GPU"
    block = Checkpoint(checkpoint.weights, config, torch.float32, device).block(1)
    gate_up, down = weights_of(block.mlp)
    wanted = {"qkv": block.qkv, "o": block.o, "gate_up": gate_up, "down": down}
    formats = dict[str, str]()
    for key, numbers in stored.items():
        if numbers is None:
            formats[key] = "bf16"
            continue
        width = wanted[key].shape[1] // numbers.scales.shape[1]
        groups = torch.arange(wanted[key].shape[1]) // width
        zeros = numbers.zeros
        found = Numbers(numbers.data, numbers.scales, zeros, groups if numbers.scales.shape[1] > 1 else None).widened()
        assert torch.equal(found, wanted[key]), key
        formats[key] = pack_numbers(replace(numbers), "gate" if key == "gate_up" else "layer").format
    assert formats["gate_up"] == formats["down"] == PACKED[name]
    mixed = {"o": "bf16", "qkv": "bf16"} if name == "awq-mixed" else {}
    assert formats == dict.fromkeys(wanted, PACKED[name]) | mixed


def test_rows_of_a_head_in_16_bits_are_its_own() -> None:
    weight = torch.randn(200, 384).bfloat16()
    some = torch.tensor([0, 7, 8, 15, 16, 133, 199])
    packed = pack_strips(weight, "file", "head")
    assert isinstance(packed, Strips)
    assert torch.equal(packed[some], weight[some])


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED)
def test_texts_are_those_of_the_files_weights(name: str, tmp_path: Path) -> None:
    """Logits near transformers' in float32, and the same bits for a node in any company."""
    need_cuda()
    folder = write(name, tmp_path)
    checkpoint = open_checkpoint(str(folder))
    config, device = DecoderConfig.from_hf(checkpoint.config), torch.device("cuda")
    if not keeps_packed(checkpoint, config, "auto", device):
        pytest.skip("needs a Hopper GPU")
    target = CudaDecoder(
        config, checkpoint.weights, dtype=torch.bfloat16, device=device, kv_slots=4096, weight_kind="file",
        greedy_walk=device_walk(device),
    )  # fmt: skip
    assert type(target.passes.steps).__name__ == "CompiledSteps"
    family = FORMATS[name].family if name in FORMATS else "qwen3"
    model = made.make_model(family, *SIZES, SPREAD)
    model.load_state_dict({key: checkpoint.weights[key].float() for key in model.state_dict()})
    rng = random.Random(3)
    text = [rng.randrange(64) for _ in range(90)]
    with torch.no_grad():
        wanted = model.cuda()(torch.tensor([text], device="cuda")).logits[0]
    seq = FakeSeq(1, text[:31], max_length=200)
    target.prefill([seq], Needs())
    got = target.score([seq], TreeBatch.chains([text[30:]]), Needs()).required_logits.clone()
    off = float((got - wanted[30:]).norm() / wanted[30:].norm())
    assert off < (0.09 if PACKED[name] == "e4m3" else 0.02), f"off by {off:.2%}"
    others = [FakeSeq(2 + i, [rng.randrange(64) for _ in range(20 + i)], max_length=200) for i in range(3)]
    target.prefill(others, Needs())
    trees = [([text[30]], [-1]), *(random_tree(rng, one.tokens[-1], 64, 24) for one in others)]
    beside = target.score([seq, *others], TreeBatch.trees(trees), Needs()).required_logits
    assert torch.equal(beside[0], got[0]), "a node differs in company"
