"""Quantised safetensors on the C kernels: packed with the very numbers of the files, or in float32; near the oracle."""

from __future__ import annotations

import hashlib
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from forerun import LLM, SamplingParams
from forerun.build.engine import held_as, load_target
from forerun.core.params import Dtype, EngineConfig
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.quantized.layouts import Numbers
from forerun.models.load.quants import LAYOUTS, dequantize
from forerun.models.native import library as native_library
from forerun.models.native.target import NativeDecoder
from forerun.testing import FakeSeq, check_target, path_to, random_tree
from tests.models import quantized_folders as made
from tests.models.quantized_folders import Format, Quantise
from tests.models.test_quantized import AWQ, FORMATS, GPTQ, TEXT, W4, W4_ZEROS, W8, W8_PACKED
from tests.models.tiny_checkpoints import reference_logits, score_chain
from tests.native.blocks import needs_native

gguf = pytest.importorskip("gguf")

pytestmark = needs_native
PATHS = [name for name, has in native_library.paths().items() if has]
SIZES: dict[str, Any] = {"spread": 0.06}  # so that what rounds rows does not grow from layer to layer


def in_16_bits(config: dict[str, Any]) -> Quantise:
    """compressed-tensors' own files with scales of bfloat16, as of most models; its own numbers in float32."""
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert isinstance(group, QuantizationScheme)
    compressor: Any = BaseCompressor.get_value_from_registry(str(config["format"]))

    def quantise(weight: Tensor) -> tuple[made.Parts, Tensor]:
        scale, zero = made._scales(weight, group.weights)
        given = {"weight": weight, "weight_scale": scale.bfloat16().float(), "weight_zero_point": zero}
        parts = {key: tensor for key, tensor in compressor.compress(given, group).items() if tensor is not None}
        meant: Tensor = compressor.decompress(dict(parts), group)["weight"]
        return {**parts, "weight_scale": scale.bfloat16()}, meant

    return quantise


PACKED = {  # with what GGUF calls the type that holds the numbers
    "w4": (Format(W4, in_16_bits(W4), "", **SIZES), "Q4_0"),
    "w4-zeros": (Format(W4_ZEROS, in_16_bits(W4_ZEROS), "", family="qwen2", **SIZES), "Q5_0"),
    "w8a16": (Format(W8_PACKED, in_16_bits(W8_PACKED), "", **SIZES), "Q8_0"),
    "w8a8": (Format(W8, in_16_bits(W8), "", family="qwen3", **SIZES), "Q8_0"),
    "awq": (Format(AWQ, made.awq(32), "", family="qwen2", **SIZES), "Q5_0"),
    "gptq": (Format(GPTQ, made.gptq(4, 32, less=1), "", **SIZES), "Q5_0"),
    "gptq-channel": (Format(GPTQ | {"group_size": -1}, made.gptq(4, -1, less=1), "", **SIZES), "Q5_0"),
}
WIDENED = ("fp8-channel", "fp8-blocks", "w4-act-order", "gptq-act-order", "gptq-8", "w8a16-zeros", "w4")


def load(folder: Path, dtype: Dtype = "auto") -> NativeDecoder:
    target = load_target(open_checkpoint(str(folder)), EngineConfig(device="cpu", kv_slots=2048, dtype=dtype))
    assert isinstance(target, NativeDecoder)
    return target


@pytest.mark.parametrize("name", PACKED)
def test_blocks_have_the_numbers_of_the_files(name: str, tmp_path: Path) -> None:
    """By the gguf package's own reader."""
    model = made.write(tmp_path, PACKED[name][0])
    weights, packed = open_checkpoint(str(tmp_path)).weights, 0
    for key, meant in model.state_dict().items():
        if (blocks := weights.blocks(key)) is None:
            assert "layers" not in key or "norm" in key or "bias" in key
            continue
        layout, packed = LAYOUTS[blocks.kind], packed + 1
        assert layout.name in {PACKED[name][1], "Q4_0"}, "a weight may happen to have no number beyond these"
        rows = blocks.data.view(len(meant), -1).numpy()
        found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[layout.name])
        assert torch.equal(torch.from_numpy(found), meant), key
        assert torch.equal(weights[key], meant), key
    assert packed == 14


@pytest.mark.parametrize("name", PACKED)
def test_logits_are_near_transformers_with_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    """Rows are rounded to eight bits in front of packed weights, as for GGUF files."""
    model = made.write(tmp_path, PACKED[name][0])
    packed, plain = load(tmp_path), load(tmp_path, "float32")
    assert (packed.mode, plain.mode) == ("gguf", "float32")
    wanted = reference_logits(model, TEXT)[1:]
    found, exact = (score_chain(target, TEXT, 1, 64) for target in (packed, plain))
    torch.testing.assert_close(exact, wanted, rtol=1e-4, atol=1e-4)
    off = float((found - wanted).norm() / wanted.norm())
    assert 1e-5 < off < 0.02, f"off by {off:.2%}"
    in_layers = [target.weight_bytes - 64 * made.WIDTH * 4 for target in (packed, plain)]
    assert in_layers[0] < (0.2 if PACKED[name][1] == "Q4_0" else 0.3) * in_layers[1]  # ARM has Q5_0 in bytes


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["w4", "awq", "w8a8"])
def test_a_row_has_its_bits_in_any_company(name: str, path: str, tmp_path: Path) -> None:
    made.write(tmp_path, PACKED[name][0])
    best = native_library.isa()
    assert native_library.library().fr_choose(path.encode()) == 0
    try:
        target, alone, rng = load(tmp_path), load(tmp_path), random.Random(3)

        def hashed(tokens: list[int]) -> str:
            seq = FakeSeq(100, tokens, max_length=90)
            alone.prefill([seq], Needs())
            logits = alone.score([seq], TreeBatch.chains([tokens[-1:]]), Needs()).required_logits
            alone.release(seq)
            return hashlib.sha256(logits[0].numpy().tobytes()).hexdigest()

        seqs = [FakeSeq(b, rng.choices(range(64), k=n), max_length=90) for b, n in enumerate((12, 5, 33))]
        target.prefill(seqs, Needs())
        for nodes in (1, 5, 17, 33):
            grown = [random_tree(rng, seq.tokens[-1], 64, nodes) for seq in seqs]
            trees = TreeBatch.trees(grown)
            logits = target.score(seqs, trees, Needs()).required_logits
            for b, (seq, (tokens, parents)) in enumerate(zip(seqs, grown, strict=True)):
                for i in {0, len(tokens) // 2, len(tokens) - 1}:
                    path_of = [tokens[j] for j in path_to(parents, i)]
                    bits = hashlib.sha256(logits[trees.starts[b] + i].numpy().tobytes()).hexdigest()
                    assert hashed([*seq.tokens, *path_of]) == bits
                    assert hashed([*seq.tokens, *path_of, 1]) != bits
    finally:
        native_library.library().fr_choose(best.encode())


def test_packed_targets_are_targets_to_the_bit(tmp_path: Path) -> None:
    made.write(tmp_path, PACKED["awq"][0])
    check_target(lambda: load(tmp_path), vocab_size=64, rounds=3, needs=Needs((-1, 1)), atol=0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["w4", "gptq", "w8a16"])
def test_drafted_texts_are_the_plain_ones(name: str, temperature: float, tmp_path: Path) -> None:
    made.write(tmp_path, PACKED[name][0])
    texts = []
    for drafter in ("none", "ngram"):
        always = {"controller": "fixed", "budget": 6}
        with LLM(str(tmp_path), device="cpu", drafter=drafter, speculative_config=always) as llm:
            params = SamplingParams(max_tokens=40, temperature=temperature, seed=2, ignore_eos=True)
            done = llm.generate([TEXT * 3, TEXT[:5] * 4, [7]], params)
            texts.append([one.token_ids for one in done])
            assert (llm.engine.stats.drafted > 0) == (drafter == "ngram")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", WIDENED)
def test_what_no_kernel_holds_is_in_float32(name: str, tmp_path: Path) -> None:
    """FP8, columns out of order, zero points of eight bits, and scales in 32 bits."""
    made.write(tmp_path, FORMATS[name])
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.weights.packed_kinds() == set()
    assert load(tmp_path).mode == "float32"
    said = held_as(checkpoint, DecoderConfig.from_hf(checkpoint.config), "auto", torch.device("cpu"))
    assert said == f"{FORMATS[name].said}, dequantised to float32"


def test_a_scale_that_16_bits_do_not_hold_widens_its_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = made.write(tmp_path, PACKED["w8a8"][0])
    name = "model.layers.1.mlp.down_proj"
    made.change(
        tmp_path, None, **{f"{name}.weight_scale": torch.full((made.WIDTH, 1), 1.0078125 * 2.0**-20).bfloat16()}
    )
    with caplog.at_level(logging.WARNING):
        target = load(tmp_path)
    assert target.mode == "gguf"
    said = [record.getMessage() for record in caplog.records if "no kernel holds" in record.getMessage()]
    assert said == [f"{tmp_path}: weights such as {name}.weight have numbers that no kernel holds: float32"]
    weights = open_checkpoint(str(tmp_path)).weights
    assert weights.blocks(f"{name}.weight") is None
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    wanted = reference_logits(model, TEXT)[1:]
    assert float((score_chain(target, TEXT, 1, 64) - wanted).norm() / wanted.norm()) < 0.02


def test_every_number_and_scale_at_the_edge_is_held_or_refused() -> None:
    scale = torch.tensor([[2.0**-24], [1.0], [8000.0]])
    for low, high, zero, kind in (
        (0, 15, 8, "Q4_0"), (0, 15, 0, "Q5_0"), (0, 15, 16, "Q5_0"), (0, 15, 15, "Q5_0"), (0, 255, 128, "Q8_0"),
        (0, 255, 127, None),
    ):  # fmt: skip
        data = torch.arange(low, high + 1).repeat(32)[: 32 * 8].repeat(3, 1).to(torch.uint8)
        numbers = Numbers(data, scale, torch.full((1, 1), zero), None)
        blocks = numbers.blocks()
        assert (None if blocks is None else LAYOUTS[blocks.kind].name) == kind
        if blocks is not None:
            assert torch.equal(dequantize(blocks), numbers.widened())
    for wrong in (2.0**-25, 8192.0, 65504.0, 1.0 + 2.0**-11):
        assert Numbers(data % 16, torch.full((3, 1), wrong), torch.full((1, 1), 8), None).blocks() is None
    groups = torch.arange(256) // 32
    by_group = Numbers(data % 16, torch.rand(3, 8).half().float(), torch.full((1, 1), 8), groups)
    held = by_group.blocks()
    assert held is not None
    assert torch.equal(dequantize(held), by_group.widened())
    assert Numbers(data % 16, by_group.scales, by_group.zeros, groups.flip(0).roll(1)).blocks() is None
    assert Numbers(data[:, :40] % 16, scale, by_group.zeros, None).blocks() is None
