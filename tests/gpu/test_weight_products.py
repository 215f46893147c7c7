"""Products with weights of every format by the compiled kernels: right, and a row's bits are its own.

Packing is checked everywhere; products need a Hopper GPU and the compiled kernels (or nvcc, which makes them first).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.models.cuda.cubin import packing
from forerun.models.cuda.cubin.packing import pack_bf16, pack_bytes, pack_e4m3, pack_int4, pack_k, pair_gates
from forerun.models.cuda.cubin.products import FILES, Cut, Products, path_of, splits_of
from tests.gpu.packed_weights import FORMATS, Rows, make, multiply, new_out
from tools.cubins import build

LOGITS = 3


@pytest.fixture(scope="module")
def products() -> Products:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    missing = [name for name in ("quantise", *FILES) if not path_of(name).exists()]
    if missing:
        if shutil.which("nvcc") is None:
            pytest.skip(f"{missing[0]} is not compiled, and there is no nvcc")
        build(missing, [], jobs=8)
    return Products(torch.device("cuda"))


def _lanes() -> list[tuple[int, int, int, int, int]]:
    """Lane, register and half of a register by output of a strip and column of a step."""
    places = []
    for lane in range(32):
        for register in range(4):
            for odd in range(2):
                output, column = lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2) + odd
                places.append((lane, register, odd, output, column))
    return places


def test_bytes_lie_as_registers_want_them() -> None:
    weight = torch.randint(-128, 128, (130, 300), dtype=torch.int8)
    packed = pack_bytes(weight, torch.ones(130))
    assert packed.data.shape == (3, 16, 2048)
    wide = torch.zeros(256, 384, dtype=torch.int8)
    wide[:130, :300] = weight
    chunks = packed.data.view(torch.int8).view(3, 16, 4, 32, 2, 2, 4)
    for lane, register, odd, output, column in _lanes():
        found = chunks[:, :, :, lane, :, register // 2, odd * 2 + register % 2]
        wanted = wide.view(16, 16, 3, 4, 2, 16)[:, output, :, :, :, column]
        assert torch.equal(found, wanted.permute(1, 0, 2, 3))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_lie_as_registers_want_them(group: int) -> None:
    weight = torch.randint(0, 16, (128, 256), dtype=torch.uint8)
    scales, zeros = torch.rand(128, 256 // group).half(), torch.randint(0, 16, (128, 256 // group))
    packed = pack_int4(weight, scales, zeros)
    groups = 128 // group
    assert packed.data.shape == (2, 8, 1024)
    assert packed.sides is not None
    assert (packed.format, packed.group, packed.half_scales) == ("int4_zeros", group, True)
    words = packed.data.view(torch.int32).view(2, 8, 2, 32, 4)
    for lane, register, odd, output, column in _lanes():
        found = (words[:, :, :, lane, :] >> (4 * register + 16 * odd)) & 15
        wanted = weight.view(8, 16, 2, 2, 4, 16)[:, output, :, :, :, column].permute(1, 0, 2, 3)
        assert torch.equal(found, wanted.int())
    sides = packed.sides.view(torch.int16).view(2, 8, 2, groups, 8, 2)
    wanted = scales.view(torch.int16).view(8, 2, 8, 2, groups).permute(3, 0, 4, 2, 1)
    assert torch.equal(sides[:, :, 0], wanted)
    less = (-128 - zeros).bfloat16().view(torch.int16).view(8, 2, 8, 2, groups).permute(3, 0, 4, 2, 1)
    assert torch.equal(sides[:, :, 1], less)


@pytest.mark.parametrize("group", [16, 32])
def test_numbers_with_minima_lie_as_registers_want_them(group: int) -> None:
    """As the masks of source/decode.cuh cut them out of a word, with 16 or 64 in front."""
    most = 64 if group == 16 else 16
    weight = torch.randint(0, most, (128, 256))
    steps, lows = torch.randint(-128, 128, (128, 256 // group)), torch.randint(0, 64, (128, 256 // group))
    scales, minima = torch.rand(128, 2).half(), torch.rand(128, 2).half()
    packed = pack_k(weight, steps, lows, scales, minima)
    count = 128 // group
    assert packed.data.shape == (2, 8, 1024 if group == 32 else 2048)
    for lane, register, odd, output, column in _lanes():
        if group == 32:
            words = packed.data.view(torch.int32).view(2, 8, 2, 32, 4)[:, :, :, lane].long() & 0xFFFFFFFF
            turned = (words >> 4 * register) | (words << 32 - 4 * register)
            found = ((turned & 0x00780078) | 0x41804180) >> 16 * odd
            wanted = weight.view(8, 16, 2, 2, 4, 16)[:, output, :, :, :, column].permute(1, 0, 2, 3) + 16
        else:
            words = packed.data.view(torch.int32).view(2, 8, 4, 32, 2, 2)[:, :, :, lane, :, register // 2].long()
            found = (((words >> 8 * (register % 2)) & 0x007E007E) | 0x42804280) >> 16 * odd
            wanted = weight.view(8, 16, 2, 4, 2, 16)[:, output, :, :, :, column].permute(1, 0, 2, 3) + 64
        read = (found & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(read.float(), wanted.float())
    assert packed.sides is not None
    sides = packed.sides.view(2, 8, count + 2, 8, 4)
    for half in range(2):
        for at, table in ((half, steps), (2 + half, lows)):
            wanted = table.view(8, 2, 8, 2, count)[:, half].permute(2, 0, 3, 1) + 128
            assert torch.equal(sides[:, :, :count, :, at].long(), wanted)
        for word, of_block in enumerate((scales, minima)):
            pairs = sides[:, :, count + word].contiguous().view(torch.float16)
            assert torch.equal(pairs[..., half], of_block.view(8, 2, 8, 2)[:, half].permute(2, 0, 1))


def test_a_byte_times_a_number_is_exact() -> None:
    """The arithmetic of `byte_times`, in float64 and rounded once as by fma: no bit is lost for any byte and scale."""
    scales = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16)[::7].double()
    for byte in range(256):
        word = torch.tensor(0x47000000 | byte << 8, dtype=torch.int32).view(torch.float32).double()
        less = (scales * -32896.0).float()
        assert torch.equal(less.double(), scales * -32896.0)
        assert torch.equal((word * scales + less.double()).float().double(), (byte - 128) * scales)


def test_bf16_lies_as_registers_want_it() -> None:
    weight = torch.randn(128, 128).bfloat16()
    words = pack_bf16(weight).data.view(torch.int16).view(8, 8, 32, 4, 2)
    for lane, register, odd, output, column in _lanes():
        wanted = weight.view(torch.int16).view(8, 16, 8, 16)[:, output, :, column]
        assert torch.equal(words[:, :, lane, register, odd], wanted)


def test_lines_that_tensor_cores_read_have_their_pieces_exchanged() -> None:
    weight = torch.randint(0, 255, (128, 256), dtype=torch.uint8)
    lines = pack_e4m3(weight).data.view(2, 128, 8, 16)
    for output in range(128):
        for piece in range(8):
            wanted = weight.view(128, 2, 8, 16)[output, :, piece]
            assert torch.equal(lines[:, output, piece ^ (output % 8)], wanted)


def test_gates_lie_beside_their_other_halves() -> None:
    assert pair_gates(torch.arange(32)).tolist()[:16] == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]


def test_splits_follow_from_the_shape() -> None:
    """Of an 8B: queries, keys and values; what leaves attention; gates; what leaves the MLP; the LM head."""
    shapes = [(384, 32), (256, 32), (1792, 32), (256, 112), (8016, 32)]
    assert [splits_of(*shape) for shape in shapes] == [2, 4, 1, 4, 1]
    assert splits_of(4, 4) == 1
    assert packing.STRIP * 384 == 6144


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "depth"), [(256, 256), (4096, 4096), (6144, 1024), (1024, 1536)])
def test_a_product_is_right_and_a_row_has_its_own_bits(products: Products, name: str, outputs: int, depth: int) -> None:
    torch.manual_seed(outputs)
    weight, numbers = make(name, outputs, depth)
    rows = Rows(depth, 520)
    wanted = rows.numbers(weight) @ numbers.double().T

    def product(count: int, cut: Cut | None = None) -> Tensor:
        out = new_out(weight, count)
        multiply(products, weight, rows, count, out, cut)
        return out

    whole = product(520)
    off = float((whole.double() - wanted).norm() / wanted.norm())
    assert off < (3e-4 if "e4m3" in name and weight.format == "e4m3" else 1e-5), f"off by {off:.1e}"
    for count in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300):
        differ = int((product(count) != whole[:count]).sum())
        assert differ == 0, f"{differ} numbers of {count} rows differ"
    splits = products.choose(weight, 520).splits
    for cut in (
        Cut(splits, 132 // splits, 8),
        Cut(splits, 40 // splits, 16),
        Cut(splits, 132 // splits, 64, tall=8),
        Cut(splits, 100, 128, whole=True),
        Cut(splits, 132 // splits, 128),
    ):
        assert torch.equal(product(520, cut), whole), cut
    if weight.blocks % 16 == 0 and splits > 1:  # a negative control: other splits, other bits
        assert not torch.equal(product(520, Cut(splits * 2, 132 // splits // 2, 64)), whole)
    assert not products.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "e4m3_blocks"])
def test_gates_are_closed_where_they_are_multiplied(products: Products, name: str) -> None:
    weight, numbers = make(name, 2048, 1024, gated=True)
    rows = Rows(1024, 300)
    found = rows.numbers(weight) @ numbers.double().T
    wanted = torch.nn.functional.silu(found[:, 0::2]) * found[:, 1::2]
    outs = []
    for count in (300, 20, 5):
        outs.append(new_out(weight, count))
        multiply(products, weight, rows, count, outs[-1])
    off = float((outs[0].double() - wanted).norm() / wanted.norm())
    assert off < 3e-3, f"off by {off:.1e}"
    assert all(torch.equal(out, outs[0][: len(out)]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("outputs", "depth"), [(4096, 4096), (28672, 1024)])
def test_one_byte_gives_the_bits_of_the_same_numbers_in_bf16(
    products: Products, dtype: torch.dtype, outputs: int, depth: int
) -> None:
    """Also those of the Triton kernel of bf16, cut into as many splits."""
    data = torch.randn(outputs, depth, device="cuda").mul(40).clamp(-127, 127).to(dtype)
    rows, found = Rows(depth, 16), []
    bytes_ = replace(pack_bytes(data, torch.ones(outputs, device="cuda")), channel=None)
    for weight in (bytes_, pack_bf16(data.bfloat16())):
        found.append(new_out(weight, 16))
        multiply(products, weight, rows, 16, found[-1])
    assert torch.equal(*found)
    splits = products.choose(bytes_, 16).splits
    assert torch.equal(_by_triton(rows.plain, data.bfloat16(), splits), found[0])


def _by_triton(rows: Tensor, weight: Tensor, splits: int) -> Tensor:
    linear: Any = pytest.importorskip("forerun.models.cuda.kernels.linear").linear
    outputs, depth = weight.shape
    out = torch.empty(16, outputs, device="cuda")
    unused = torch.zeros(1 << 12, dtype=torch.float64, device="cuda")
    ints = torch.zeros(16, dtype=torch.int32, device="cuda")
    partial = torch.empty(outputs * 16 * splits, device="cuda")
    counters = torch.zeros(outputs // 64, dtype=torch.int32, device="cuda")
    linear[(1, outputs // 64, splits)](
        rows, weight, weight, unused, out, unused, unused, unused, unused, weight, weight, unused, unused, unused,
        ints, ints, partial, counters, *[unused] * 7, 16, 1e-5, 0, N=outputs, K=depth, MODE=LOGITS, BN=64, BK=64,
        SPLIT=splits, MT=16, TILES=32, TILES_UP=32, H=1, HKV=1, D=128, ROT=0, BIAS=False, HEAD_NORM=False, ROPE=False,
        TMA=False, PDL=False, W8=False, NORMED=True, ROOM=0, RANK=0, ADAPTED_ROOM=0, GELU=False, SUMS=False,
        SHARE=1.0, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@pytest.mark.gpu
def test_rows_in_e4m3_are_quantised_by_themselves(products: Products) -> None:
    rows = Rows(512, 40)
    scales = rows.plain.float().view(40, 4, 128).abs().amax(2) / 448
    torch.testing.assert_close(rows.scales.T, scales)
    numbers = rows.numbers(make("e4m3", 128, 512)[0])
    off = (numbers - rows.plain.double()).abs()
    assert bool((off <= rows.plain.double().abs() / 15 + scales.double().repeat_interleave(128, 1) / 512).all())


@pytest.mark.gpu
def test_a_captured_product_can_be_replayed(products: Products) -> None:
    weight, _ = make("int4_128", 1024, 1024)
    rows, out = Rows(1024, 4), new_out(weight, 4)
    multiply(products, weight, rows, 4, out)
    wanted, stream = out.clone(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        multiply(products, weight, rows, 4, out)
        multiply(products, weight, rows, 4, out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)
