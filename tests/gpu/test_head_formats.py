"""Heads in fp8 and four bits: the products of targets in these formats, and texts that are those of plain decoding.

The compiled products need a Hopper GPU. On a CPU all around them runs in Triton's interpreter, with torch in their
place: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_head_formats.py
"""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.errors import UnsupportedModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.tree import chain_of
from forerun.core.types import Budget, Request
from forerun.drafters.device import head as device_heads
from forerun.drafters.device.eagle import KINDS, on_device
from forerun.drafters.device.head import HeadNet, make_net
from forerun.drafters.heads.eagle_head import EagleConfig, write_head
from forerun.models.cuda import weights as cuda_weights
from forerun.models.cuda.cubin.packing import BLOCK
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import Span, plan_pass
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Strips, WeightKind
from forerun.verify.greedy import walk_by_torch
from tests.gpu import tiny
from tests.gpu.heads import both_drafters, make_head
from tests.gpu.test_compiled import rounded
from tests.gpu.tiny import SHAPES, VOCAB, make_target, need_cuda, where_kernels_run

BLOCKS = {**SHAPES["llama"], "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"depth": 2, "norm_before_residual": True, "draft_vocab": 130},
    {"eagle": "eagle"},
    {"eagle": "mtp", "norm_output": True, "qk_norm": True},
]


def numbers_of(weight: Strips) -> Tensor:
    """[N, K] what a packed weight stands for."""
    if weight.format != "e4m3":
        return weight[torch.arange(weight.outputs)].double()
    blocks, outputs = weight.blocks, torch.arange(BLOCK)[:, None]
    lines = weight.data.view(blocks, -1, BLOCK, 8, 16)
    place = (torch.arange(8)[None] ^ (outputs % 8))[..., None].expand(lines.shape)
    wide = lines.gather(3, place).view(torch.float8_e4m3fn).float().view(blocks, -1, BLOCK)
    assert weight.channel is not None
    wide = wide.permute(1, 0, 2).reshape(-1, blocks * BLOCK)[: weight.outputs, : weight.depth]
    return wide.double() * weight.channel[:, None]


class TorchProducts:
    """Stands in for the products compiled ahead: each row by itself."""

    def __init__(self, device: torch.device) -> None:
        self.made: set[str] = set()

    def reserve(self, weight: Strips, most: int) -> None: ...

    def multiply(
        self, weight: Strips, rows: Tensor, count: int, out: Tensor, *, scales: Tensor | None, norm: Any = None
    ) -> None:
        self.made.add(weight.format)
        given = rows[:count].float()
        if scales is not None:
            given = rows[:count].view(torch.float8_e4m3fn).float() * scales[:, :count].t().repeat_interleave(BLOCK, 1)
        numbers = numbers_of(weight)
        sums = torch.stack([(numbers * row).sum(1) for row in given.double()])
        if norm is not None:
            squares = norm.squares[:count, : norm.pieces].sum(1, keepdim=True)
            sums = sums * (squares / norm.width + norm.eps).rsqrt()
        if weight.gated:  # eight gates, their eight ups
            gates, ups = sums.unflatten(1, (-1, 2, 8)).unbind(2)
            sums = (F.silu(gates) * ups).flatten(1)
        out.view(-1)[: sums.numel()].view(sums.shape).copy_(sums)


def quantise_by_torch(rows: Tensor, count: int, out: Tensor, scales: Tensor) -> None:
    parts = rows[:count].float().unflatten(1, (-1, BLOCK))
    by = parts.abs().amax(2).clamp(min=1e-12) / 448.0
    out[:count] = (parts / by[..., None]).flatten(1).to(torch.float8_e4m3fn).view(torch.uint8)
    scales[:, :count] = by.t()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> CudaDecoder:
    """A target on a CPU that passes for one on a Hopper GPU; torch multiplies, and rows are of 32 bits."""
    if where_kernels_run().type == "cuda":
        pytest.skip("the tests below do this on a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr("forerun.models.cuda.steps.compiled.Products", TorchProducts)
    monkeypatch.setattr("forerun.models.cuda.steps.compiled.quantise_rows", quantise_by_torch)
    monkeypatch.setitem(SHAPES, "of-blocks", BLOCKS)
    monkeypatch.setattr(device_heads, "has_compiled", lambda kind, *_: kind != "plain")  # of rows in fp32
    target = make_target("of-blocks", "cpu", seed=1)
    target.kernels = "triton"
    return target


def logits_of(net: HeadNet, count: int) -> Tensor:
    """A chain through a head."""
    config, rng = net.model.config, random.Random(2)
    tokens = [rng.randrange(VOCAB) for _ in range(128)]
    carried = torch.randn(128, config.width, generator=torch.Generator().manual_seed(3))
    nodes = 64 // (1 << (config.heads // config.kv_heads - 1).bit_length())
    plan = plan_pass([Span(tokens[:count], chain_of(count), range(2), 0)], nodes)
    net.buffers.send(plan)
    model = net.model
    net.run(Run.of(plan.size, net.buffers.ints), carried[: plan.size.rows].to(model.device, model.dtype))
    return net.logits[:count].float().cpu()


def with_rounded(
    head: tuple[EagleConfig, dict[str, Tensor]], kind: WeightKind, target: CudaDecoder
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """The head with the numbers that its weights have in a format."""
    config, weights = head
    packed = {
        name: rounded(weight.to(target.model.dtype), kind, "lm_head" in name).to(weight)
        for name, weight in weights.items()
        if name.endswith("_proj.weight") or "lm_head" in name or (name == "fc.weight" and config.kind == "mtp")
    }
    return config, {**weights, **packed}


def off_by(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "w4"])
@pytest.mark.parametrize("more", VARIANTS, ids=str)
def test_what_is_around_the_products_is_that_of_the_plain_head(
    interpreted: CudaDecoder, more: dict[str, Any], kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the interpreter runs it: gates, norms and inputs of every layer, and each row by itself."""
    head = make_head(interpreted, **more)
    net = make_net(*head, interpreted, kind)[0]
    assert type(net.steps).__name__ == "CompiledHeadSteps"
    got = logits_of(net, 9)
    assert net.steps.products.made == ({"e4m3", "e4m3_weights"} if kind == "fp8" else {"int4", "int8"})  # type: ignore[attr-defined]
    interpreted.kernels = "torch"
    wanted = logits_of(make_net(*with_rounded(head, kind, interpreted), interpreted, "plain")[0], 9)
    assert off_by(got, wanted) < {"fp8": 0.2, "w4": 1e-5}[kind]  # e4m3 rounds rows too: 8% of one layer were measured
    for count in (1, 5):
        assert torch.equal(logits_of(net, count), got[:count]), f"bits differ at {count} rows"
    monkeypatch.setattr(cuda_weights, "pair_gates", lambda given: given)
    interpreted.kernels = "triton"
    assert off_by(logits_of(make_net(*head, interpreted, kind)[0], 9), wanted) > 0.5, "a wrong order is not seen"


def texts_of(target: CudaDecoder, drafter: str, batch: int) -> list[list[int]]:
    """Texts of one engine, alone or together; every one that a head drafts for was drafted for."""
    engine = make_engine(target, frozenset({1}), SpeculativeConfig(drafter="none", controller="fixed"))
    engine.max_batch, drafted = batch, 0
    if drafter != "none":
        kind = KINDS[drafter]  # type: ignore[index]
        engine.drafters.add("device", both_drafters(target, kind, borrows=True)[0])
    name, params = "none" if drafter == "none" else "device", SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [(3, 4, 5), (7,), tuple(range(2, 150))]
    ids = [engine.submit(Request(prompt, params, drafter=name, budget=Budget(9, 3, 3))) for prompt in prompts]
    found: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    while engine.busy:
        drafted += sum(seq.stats.drafted for seq in engine.running)
        for event in engine.step():
            found[event.seq_id] += event.tokens
    assert (drafted > 0) == (drafter != "none")
    return list(found.values())


def accepts_all(
    trees: Tensor, ancestors: Tensor, argmax: Tensor, paths: Tensor, accepted: Tensor, bonus: Tensor
) -> None:
    """A verifier that takes every draft."""
    roots = torch.stack((trees[0], torch.full_like(trees[1], -1)))
    walk_by_torch(roots, ancestors, argmax, paths, accepted, bonus)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_texts_are_those_of_plain_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_texts("llama", "cpu", torch.float32, kind, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "fp8", "w4"])
@pytest.mark.parametrize("name", ["large", "of-blocks"])
def test_texts_of_every_format_are_those_of_plain_decoding(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _need_hopper()
    monkeypatch.setitem(SHAPES, "of-blocks", BLOCKS)
    _check_texts(name, "cuda", torch.bfloat16, kind, monkeypatch)


def _check_texts(name: str, device: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(name, device, dtype, seed=1)
    wanted = texts_of(target, "none", 1)
    assert texts_of(target, kind, 1) == wanted
    assert texts_of(target, kind, 3) == wanted
    monkeypatch.setattr(tiny, "device_walk", lambda device: accepts_all)
    assert texts_of(make_target(name, device, dtype, seed=1), kind, 1) != wanted, "these texts would not show a fault"


def _need_hopper() -> None:
    need_cuda()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "w4"])
@pytest.mark.parametrize("more", VARIANTS, ids=str)
def test_compiled_products_of_a_head_are_its_rounded_weights_and_keep_their_bits(
    more: dict[str, Any], kind: WeightKind
) -> None:
    _need_hopper()
    fused, plain = (make_target("large", "cuda", torch.bfloat16, way) for way in ("triton", "torch"))  # type: ignore[arg-type]
    head = make_head(fused, **more)
    net = make_net(*head, fused, kind)[0]
    assert type(net.steps).__name__ == "CompiledHeadSteps"
    got = logits_of(net, 100)
    wanted = logits_of(make_net(*with_rounded(head, kind, plain), plain, "plain")[0], 100)
    assert off_by(got, wanted) < {"fp8": 0.2, "w4": 0.03}[kind]
    # what an EAGLE-1 head mixes its inputs with is a product of the library's, in 16 bits: good enough for drafts
    for count in () if more.get("eagle") == "eagle" else (1, 8, 9, 17, 33, 64, 65):
        assert torch.equal(logits_of(net, count), got[:count]), f"bits differ at {count} rows"
    unlike = make_net(*head, fused, "plain")[0]
    assert not torch.equal(logits_of(unlike, 100), got), "the format changes nothing"


def test_a_format_that_cannot_be_held_is_refused_by_its_setting(tmp_path: Path) -> None:
    target = make_target("llama", "cpu")
    config, weights = make_head(target, borrows=True)
    with pytest.raises(UnsupportedModel, match=r"Hopper.*use draft_dtype='int8' or 'bfloat16'"):
        make_net(config, weights, target, "w4")
    write_head(tmp_path / "head", config, weights)
    with pytest.raises(UnsupportedModel, match="draft_dtype='fp8' cannot be used: the target is not our decoder"):
        on_device(tmp_path / "head", object(), lambda: pytest.fail("no second way"), dtype="fp8")  # type: ignore[arg-type]
    held = on_device(tmp_path / "head", target, lambda: pytest.fail("not needed"), dtype="fp8")
    assert held is not None
    assert held.draft.net.model.kind == "fp8"
    odd = replace(config, kind="eagle", layers=(-1,))
    assert not make_net(odd, make_head(target, eagle="eagle")[1], target, "int8")[0].model.whole, "rows of 16 bits"
