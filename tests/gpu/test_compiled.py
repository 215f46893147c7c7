"""Models of one-byte and four-bit weights by products compiled ahead: near what their numbers say, own bits.

The oracle is transformers in float32 with the weights' numbers as they were rounded.
"""

import random

import pytest
import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda import pool
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Strips, WeightKind, pack_strips
from forerun.models.load.quantized.layouts import in_bytes, in_four_bits
from forerun.testing import FakeSeq, path_to, random_tree
from tests.gpu.test_bits import WIDTHS
from tests.gpu.tiny import VOCAB, make_reference, make_target, need_cuda, weights_of

KINDS: list[WeightKind] = ["int8", "fp8", "w4"]
NAMES = ["large", "odd", "wide-split", "wide-qwen2", "wide-qwen3", "with-large-gemma2", "with-large-gemma3"]


def rounded(weight: Tensor, kind: WeightKind, head: bool = False) -> Tensor:
    """The numbers that a weight of this kind stands for."""
    if kind == "w4" and not head:
        numbers, scales = in_four_bits(weight)
        return ((numbers.float() - 8).unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]).flatten(1)
    data, by_output = in_bytes(weight, "int8" if kind == "w4" else kind)
    return data.float() * by_output[:, None]


def _target(name: str, kind: WeightKind) -> CudaDecoder:
    need_cuda()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    target = make_target(name, "cuda", torch.bfloat16, "triton", weight_kind=kind)
    assert type(target.passes.steps).__name__ == "CompiledSteps"
    return target


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def _score(target: CudaDecoder, seqs: list[FakeSeq], trees: TreeBatch) -> Tensor:
    return target.score(seqs, trees, Needs()).required_logits.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_rounded_weights(name: str, kind: WeightKind) -> None:
    target, rng = _target(name, kind), random.Random(1)
    reference = make_reference(name)
    with torch.no_grad():
        for key, weight in reference.named_parameters():
            if weight.dim() > 1 and "embed" not in key:
                weight.copy_(rounded(weight.bfloat16(), kind, "lm_head" in key))
            else:
                weight.copy_(weight.bfloat16())
    text = _text(rng, 90)
    with torch.no_grad():
        wanted = reference.cuda()(torch.tensor([text], device="cuda")).logits[0]
    seq = FakeSeq(1, text[:31], max_length=300)
    target.prefill([seq], Needs())
    got = _score(target, [seq], TreeBatch.chains([text[30:]]))
    off = float((got - wanted[30:]).norm() / wanted[30:].norm())
    most = {"int8": 0.015, "w4": 0.015, "fp8": 0.09}  # e4m3 rows: 7% were measured
    assert off < most[kind], f"off by {off:.2%}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["large", "wide-split", "with-large-gemma3"])
def test_a_node_has_the_same_bits_in_any_company(name: str, kind: WeightKind) -> None:
    target, rng = _target(name, kind), random.Random(7)
    alone = _target(name, kind)
    seqs = [FakeSeq(i, _text(rng, length), max_length=2000) for i, length in enumerate([2, 129, 700, 60])]
    target.prefill(seqs, Needs())
    grown = [random_tree(rng, seq.tokens[-1], VOCAB, 24) for seq in seqs]
    trees = TreeBatch.trees(grown)
    logits = _score(target, seqs, trees)
    for b, (seq, (tokens, parents)) in enumerate(zip(seqs, grown, strict=True)):
        single = _score(target, [seq], TreeBatch.trees([(tokens, parents)]))
        assert torch.equal(single, logits[trees.starts[b] : trees.starts[b + 1]]), "a tree differs in a batch"
        for node in rng.sample(range(len(tokens)), min(4, len(tokens))):
            path = [tokens[i] for i in path_to(parents, node)]
            plain = FakeSeq(100 + node, [*seq.tokens, *path], max_length=2000)
            alone.prefill([plain], Needs())
            root = _score(alone, [plain], TreeBatch.chains([plain.tokens[-1:]]))
            alone.release(plain)
            assert torch.equal(root[0], single[node]), f"node {node} differs alone"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_at_every_width(kind: WeightKind) -> None:
    target, rng = _target("large", kind), random.Random(3)
    seqs = [FakeSeq(i, _text(rng, length), max_length=900) for i, length in enumerate([300, 2, 129, 600])]
    target.prefill(seqs, Needs())
    chains = [[seq.tokens[-1], *_text(rng, 255)] for seq in seqs]
    wanted = _score(target, seqs, TreeBatch.chains(chains))
    assert len(wanted) == MAX_ROWS
    for count in WIDTHS:
        some = [chain for i, one in enumerate(chains) if (chain := one[: max(0, count - 256 * i)])]
        got = _score(target, seqs[: len(some)], TreeBatch.chains(some))
        assert torch.equal(got, wanted[:count]), f"{int((got != wanted[:count]).sum())} differ at {count} rows"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_a_packed_head_are_its_numbers(kind: WeightKind) -> None:
    torch.manual_seed(3)
    weight = torch.randn(200, 384).bfloat16()
    packed = pack_strips(weight, kind, "head")
    some = torch.tensor([0, 7, 8, 15, 16, 133, 199])
    assert packed.shape == weight.shape
    assert torch.equal(packed[some], rounded(weight, kind, head=True)[some])


def test_four_bits_take_the_scale_with_the_smallest_error() -> None:
    torch.manual_seed(5)
    weight = torch.randn(64, 256)
    weight[:, ::128] *= 2  # a number apart from the others, which a smaller scale may cut off
    off = (rounded(weight, "w4") - weight).norm() / weight.norm()
    most = weight.unflatten(1, (-1, 128)).abs().amax(2).div(7).bfloat16().float()[..., None]
    nearest = (weight.unflatten(1, (-1, 128)) / most).round().clamp(-8, 7) * most
    assert off < (nearest.flatten(1) - weight).norm() / weight.norm() * 0.98
    zeros = pack_strips(torch.zeros(32, 128), "w4")
    assert isinstance(zeros, Strips)
    assert zeros.sides is not None
    assert bool(zeros.sides.view(torch.bfloat16).isfinite().all())


def test_what_four_bits_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = weights_of(make_reference("qwen3"))[0]

    def tried(kind: WeightKind, given: DecoderConfig = config) -> bool:
        return pool.has_compiled(kind, given, torch.device("cuda"), "triton")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not tried("int8")
    with pytest.raises(UnsupportedModel, match="Hopper"):
        tried("w4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UnsupportedModel, match="multiples of 128"):
        tried("w4")
    assert not tried("plain")
    large = weights_of(make_reference("large"))[0]
    assert all(tried(kind, large) for kind in KINDS), "the compiled kernels come with the package"
