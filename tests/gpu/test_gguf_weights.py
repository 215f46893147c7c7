"""GGUF files kept packed: what lies in memory stands for the gguf package's own numbers; a row's bits are its own."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.build.engine import _refuse_kv_dtype, held_as, keeps_packed
from forerun.build.load import bytes_packed
from forerun.cli import doctor
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.params import EngineConfig
from forerun.core.types import Needs, TreeBatch
from forerun.models.blocks import Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.cuda import pool
from forerun.models.cuda.cubin.packing import _widen
from forerun.models.cuda.file_weights import GgufNumbers, StoredBlocks, pack_gguf, weight_of
from forerun.models.cuda.network import Model
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Strips
from forerun.models.load.checkpoint import Checkpoint as Opened
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.quants import GROUPED, LAYOUTS, Blocks, Grouped, read_groups
from forerun.models.load.weights import GgufWeights
from forerun.testing import FakeSeq, random_tree
from forerun.verify.greedy import device_walk
from tests.gpu.tiny import need_cuda
from tests.models.gguf_blocks import MIXTURES, random_rows, write_mixture
from tests.models.tiny_gguf import VOCAB, write_tiny

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

CASES = [*((name, "llama", "Q6_K") for name in MIXTURES), ("Q4_K_M", "qwen2", None), ("Q8_0", "qwen2", "Q8_0")]
FORMATS = {  # of queries, keys and values together, what leaves attention, gates and ups, what leaves the MLP
    "Q4_K_M": ["bytes_k int4_k int4_k bytes_k", "int4_k int4_k int4_k int4_k"],
    "Q5_K_M": ["bytes_k bytes_k bytes_k bytes_k"] * 2,
    "Q6_K": ["bytes_k bytes_k bytes_k bytes_k"] * 2,
    "Q8_0": ["int8_groups int8_groups int8_groups int8_groups"] * 2,
    "Q4_0": ["int8_groups int4 int4 int4", "int4 int4 int4 int8_groups"],
    "Q4_1": ["int4_mins int4_mins int4_mins int4_mins", "None int4_mins None int4_mins"],
}


def opened(folder: Path, mixture: str, family: str = "llama", head: str | None = "Q6_K") -> tuple[Opened, GgufWeights]:
    checkpoint = open_checkpoint(str(write_mixture(folder / "model.gguf", mixture, family, head)))
    assert isinstance(checkpoint.weights, GgufWeights)
    return checkpoint, checkpoint.weights


def rows_of(packed: Strips) -> Tensor:
    """All rows, each strip widened once; some of them also as a model asks for them, a strip for every row."""
    found, some = _widen(packed)[: packed.outputs, : packed.depth], torch.arange(3, packed.outputs, 29)
    found = found if packed.channel is None else found * packed.channel[:, None]
    assert torch.equal(packed[some], found[some])
    return found


@pytest.mark.parametrize("name", GROUPED)
def test_groups_stand_for_the_numbers_of_the_gguf_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    rows = random_rows(name, 48, 512, np.random.default_rng(3))
    blocks = Blocks(int(kind), (48, 512), torch.from_numpy(rows.reshape(-1).copy()))
    wanted = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    numbers = read_groups(blocks)
    assert torch.equal(numbers.widened(), wanted)
    packed = pack_gguf(GgufNumbers(frozenset({name}), numbers), "layer")
    assert torch.equal(rows_of(packed), wanted)
    if name.endswith("_K") and name != "Q4_K":
        return
    assert packed.nbytes * 8 / wanted.numel() < {4: 5.1, 5: 8.6, 8: 8.6}[int(name[1])] * 128 / 48


@pytest.mark.parametrize(("mixture", "family", "head"), CASES)
def test_layers_stand_for_the_weights_of_the_file(mixture: str, family: str, head: str | None, tmp_path: Path) -> None:
    checkpoint, weights = opened(tmp_path, mixture, family, head)
    config, device = DecoderConfig.from_hf(checkpoint.config), torch.device("cpu")
    stored, plain = StoredBlocks(weights, config, device), Checkpoint(weights, config, torch.float32, device)
    for index in range(2):
        block, formats = plain.block(index), []
        for name, numbers in stored.block(index).items():
            if numbers is None:
                formats.append("None")
                continue
            packed = pack_gguf(numbers, "layer")
            assert torch.equal(rows_of(packed), weight_of(block, name)), name
            formats.append(packed.format)
        assert " ".join(formats) == FORMATS[mixture][index]
    of_head = stored.head()
    assert of_head is not None
    assert torch.equal(rows_of(pack_gguf(of_head, "head")), plain.head(plain.embedding()))


def test_gates_lie_beside_their_ups(tmp_path: Path) -> None:
    checkpoint, weights = opened(tmp_path, "Q4_K_M")
    config, device = DecoderConfig.from_hf(checkpoint.config), torch.device("cpu")
    numbers = StoredBlocks(weights, config, device).block(0)["gate_up"]
    assert numbers is not None
    gates, ups = weight_of(Checkpoint(weights, config, torch.float32, device).block(0), "gate_up").chunk(2)
    packed = pack_gguf(numbers, "gate")
    found = rows_of(packed).view(-1, 2, 8, config.width)
    assert packed.gated
    assert torch.equal(found[:, 0].flatten(0, 1), gates)
    assert torch.equal(found[:, 1].flatten(0, 1), ups)


@pytest.mark.parametrize(("mixture", "family", "head"), CASES)
def test_a_model_holds_every_weight_packed(mixture: str, family: str, head: str | None, tmp_path: Path) -> None:
    checkpoint, weights = opened(tmp_path, mixture, family, head)
    config = DecoderConfig.from_hf(checkpoint.config)
    model = Model(config, weights, torch.bfloat16, torch.device("cpu"), "file", compiled=True)
    assert isinstance(model.head, Strips)
    assert model.head.format == ("int8_groups" if head == "Q8_0" else "bytes_k")
    some = torch.tensor([3, 0, 17, VOCAB - 1])
    name = "model.embed_tokens.weight" if head is None else "lm_head.weight"
    assert torch.equal(model.head[some], weights[name][some])
    for layer, expected in zip(model.layers, FORMATS[mixture], strict=True):
        formats = [each.format for each in (layer.qkv, layer.o, layer.gate_up, layer.down) if isinstance(each, Strips)]
        assert " ".join(formats) == expected.replace("None", "bf16")


@pytest.mark.parametrize(("mixture", "family", "head"), CASES)
def test_doctor_says_how_many_bytes_a_model_takes_packed(
    mixture: str, family: str, head: str | None, tmp_path: Path
) -> None:
    checkpoint, weights = opened(tmp_path, mixture, family, head)
    config, device = DecoderConfig.from_hf(checkpoint.config), torch.device("cpu")
    model = Model(config, weights, torch.bfloat16, device, "file", compiled=True)
    held = [model.embedding, model.final_norm]
    for layer in model.layers:
        held += [layer.attention_norm, layer.mlp_norm, layer.qkv, layer.o, layer.gate_up, layer.down]  # type: ignore[list-item]
        held += [] if layer.qkv_bias is None else [layer.qkv_bias]
    of_head = model.head.nbytes * VOCAB // 128  # this one has rows for 128 tokens
    assert StoredBlocks(weights, config, device).nbytes() == sum(each.nbytes for each in held) + of_head
    file = str(tmp_path / "model.gguf")
    packed = bytes_packed(file)
    assert packed is not None
    assert packed[0] < packed[1] == sum(2 * weights[name].numel() for name in weights)
    said = [f"{size / 1e6:.0f} MB" for size in packed]
    ending = f"; a Hopper GPU would hold {said[0]} of them with --dtype gguf, {said[1]} in bfloat16"
    assert doctor._weights(file).found.endswith(ending)


def test_nothing_is_said_of_a_file_that_cannot_stay_packed(tmp_path: Path) -> None:
    """Its widths are no multiples of 128, or it has experts."""
    for name in ("llama", "mixtral"):
        file = write_tiny(tmp_path / f"{name}.gguf", name)
        assert bytes_packed(str(file)) is None
        assert "Hopper" not in doctor._weights(str(file)).found


def test_no_numbers_are_left_once_a_model_is_loaded(tmp_path: Path) -> None:
    """Commands load without a collector and freeze what is there then: two layers' numbers stayed on the GPU."""
    checkpoint, weights = opened(tmp_path, "Q4_K_M")
    gc.collect()
    gc.disable()
    try:
        model = Model(
            DecoderConfig.from_hf(checkpoint.config), weights, torch.bfloat16, torch.device("cpu"), "file", True
        )
        assert not [one for one in gc.get_objects() if type(one) is Grouped]
    finally:
        gc.enable()
    assert isinstance(model.head, Strips)


def test_scales_that_are_not_finite_are_damage(tmp_path: Path) -> None:
    checkpoint, weights = opened(tmp_path, "Q4_K_M")
    info = weights.file.tensors["blk.1.attn_q.weight"]
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    content[info.offset + 144 : info.offset + 146] = b"\x00\x7c"  # the second block's scale is infinite
    (tmp_path / "model.gguf").write_bytes(content)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    assert isinstance(checkpoint.weights, GgufWeights)
    stored = StoredBlocks(checkpoint.weights, DecoderConfig.from_hf(checkpoint.config), torch.device("cpu"))
    stored.block(0)
    with pytest.raises(DamagedFile, match=r"blk\.1\.attn_q\.weight.*not finite"):
        stored.block(1)


def test_a_file_stays_packed_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint, _ = opened(tmp_path, "Q4_K_M")
    config, gpu = DecoderConfig.from_hf(checkpoint.config), torch.device("cuda")
    monkeypatch.setattr(pool, "pick_kernels", lambda *_: "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert keeps_packed(checkpoint, config, "gguf", gpu), "the compiled kernels come with the package"
    types = "GGUF (F32, F16, Q4_K, Q6_K)"
    assert held_as(checkpoint, config, "gguf", gpu) == f"{types}, kept packed"
    assert held_as(checkpoint, config, "bfloat16", gpu) == f"{types}, dequantised to bfloat16"
    assert held_as(checkpoint, config, "auto", torch.device("cpu")) == f"{types}, kept packed"
    for kept in ("int8", "fp8"):
        _refuse_kv_dtype(checkpoint, EngineConfig(dtype="gguf", kv_dtype=kept), gpu)  # raises nothing
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not keeps_packed(checkpoint, config, "gguf", gpu)
    with pytest.raises(InvalidInput, match="Hopper GPU; use bfloat16"):
        held_as(checkpoint, config, "gguf", gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(("mixture", "family", "head"), CASES)
def test_texts_are_those_of_the_files_weights(mixture: str, family: str, head: str | None, tmp_path: Path) -> None:
    """Logits near transformers' in float32 with the file's weights; a node's bits are the same in any company."""
    need_cuda()
    checkpoint, weights = opened(tmp_path, mixture, family, head)
    config, device = DecoderConfig.from_hf(checkpoint.config), torch.device("cuda")
    if not keeps_packed(checkpoint, config, "gguf", device):
        pytest.skip("needs a Hopper GPU")
    target = CudaDecoder(
        config, weights, dtype=torch.bfloat16, device=device, kv_slots=8192, weight_kind="file",
        greedy_walk=device_walk(device),
    )  # fmt: skip
    assert type(target.passes.steps).__name__ == "CompiledSteps"
    rng = random.Random(3)
    text = [rng.randrange(VOCAB) for _ in range(90)]
    with torch.no_grad():
        wanted = _reference(checkpoint).cuda()(torch.tensor([text], device="cuda")).logits[0]
    seq = FakeSeq(1, text[:31], max_length=200)
    target.prefill([seq], Needs())
    got = target.score([seq], TreeBatch.chains([text[30:]]), Needs()).required_logits.clone()
    off = float((got - wanted[30:]).norm() / wanted[30:].norm())
    assert off < 0.02, f"off by {off:.2%}"
    others = [FakeSeq(2 + i, [rng.randrange(VOCAB) for _ in range(20 + i)], max_length=600) for i in range(3)]
    target.prefill(others, Needs())
    for size in (2, 9, 24, 60, 190):
        trees = [([text[30]], [-1]), *(random_tree(rng, one.tokens[-1], VOCAB, size) for one in others)]
        beside = target.score([seq, *others], TreeBatch.trees(trees), Needs()).required_logits
        assert torch.equal(beside[0], got[0]), f"a node differs beside trees of {size}"


def _reference(checkpoint: Opened) -> Any:
    settings = dict(checkpoint.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    state = {key: checkpoint.weights[key] for key in model.state_dict() if key in checkpoint.weights}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def test_types_are_those_of_the_layouts() -> None:
    assert set(GROUPED) <= {layout.name for layout in LAYOUTS.values()}
