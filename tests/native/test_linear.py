"""Packed linear layers: right numbers for every type and shape, the same bits however rows are put together."""

import random
from collections.abc import Iterator

import pytest
import torch

from forerun.models.load.quants import LAYOUTS, Blocks, dequantize
from forerun.models.native import library as native_library
from forerun.models.native.packing import (
    PackedWeight,
    as_q4_1,
    is_packable,
    pack_blocks,
    pack_floats,
    take_rows,
    unpack_rows,
)
from tests.native.blocks import HALVES, KINDS, as_int8, needs_native, random_blocks
from tests.native.packed_linear import apply

pytestmark = needs_native


PATHS = [name for name, has in native_library.paths().items() if has]


def _choose(path: str) -> None:
    assert native_library.library().fr_choose(path.encode()) == 0


@pytest.fixture
def chosen() -> Iterator[None]:
    """Puts the machine's own kernels back."""
    best = native_library.isa()
    yield
    _choose(best)


def _rows(rows: int, inputs: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))


def _compared(
    name: str, path: str, outputs: int, bias: torch.Tensor | None, x: torch.Tensor
) -> tuple[PackedWeight, torch.Tensor]:
    """Weights as `path` packs them, whose products with x are bit for bit those of plain C; and these."""
    _choose("generic")
    wanted = apply(_weight(name, outputs, x.shape[1], bias), x)
    _choose(path)
    packed = _weight(name, outputs, x.shape[1], bias)
    assert torch.equal(apply(packed, x), wanted)
    return packed, wanted


@pytest.mark.parametrize("name", sorted(HALVES))
def test_products_are_right(name: str) -> None:
    blocks = random_blocks(name, 70, 512)
    x, bias = _rows(9, 512), _rows(1, 70, 3)[0]
    got = apply(pack_blocks(blocks, bias), x).double()
    weight = dequantize(blocks).double()
    exact = as_int8(x) @ weight.T + bias
    torch.testing.assert_close(got, exact, atol=1e-4, rtol=2e-5)
    plain = x.double() @ weight.T + bias
    assert float((got - plain).norm() / plain.norm()) < 0.015  # what rounding rows to int8 costs


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "q8", "q4"])
def test_float_weights(mode: str) -> None:
    weight, x, bias = torch.randn(37, 96), _rows(5, 96), torch.randn(37)
    packed = pack_floats(weight, mode, bias)  # type: ignore[arg-type]
    wanted = x @ weight.T + bias
    tolerance = {"float32": 1e-6, "bfloat16": 0.005, "q8": 0.015, "q4": 0.12}[mode]
    assert float((apply(packed, x) - wanted).norm() / wanted.norm()) < tolerance


def test_four_bits_hold_what_has_sixteen_values() -> None:
    """Blocks whose numbers are fifteen equal steps apart lose nothing; a block of one number neither."""
    steps = torch.randint(0, 16, (40, 3, 32), generator=torch.Generator().manual_seed(4)).float()
    steps[:, :, 0], steps[:, :, 1] = 0.0, 15.0
    weight = steps * 0.25 - 2.0
    weight[5, 1] = 0.5
    weight = weight.view(40, 96)
    assert torch.equal(dequantize(as_q4_1(weight)), weight)


def test_odd_widths_stay_exact() -> None:
    weight, x = torch.randn(7, 45), _rows(3, 45)
    torch.testing.assert_close(apply(pack_floats(weight, "q8"), x), x @ weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*sorted(HALVES), "F32", "BF16"])
def test_fuzzed_shapes_rows_and_splits(name: str, path: str, chosen: None) -> None:
    """Bit-equal: plain C and every path of this machine, any number of rows, any way to cut them."""
    rng = random.Random(name)
    whole = LAYOUTS[KINDS[name]].weights if name in KINDS else 1
    for case in range(12):
        inputs = whole * rng.randint(1, 3) if name in KINDS else rng.randint(1, 200)
        outputs, rows = rng.randint(1, 45), case + 1 if case < 4 else rng.randint(1, 40)
        bias = torch.randn(outputs) if case % 2 else None
        x = _rows(rows, inputs, case)
        packed, wanted = _compared(name, path, outputs, bias, x)
        cut = rng.randint(1, rows)
        pieces = [apply(packed, x[:cut]), *(apply(packed, row[None]) for row in x[cut:])]
        assert torch.equal(torch.cat(pieces), wanted)
        order = torch.randperm(rows)
        assert torch.equal(apply(packed, x[order]), wanted[order])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(HALVES))
def test_many_rows_and_long_inputs(name: str, path: str, chosen: None) -> None:
    """Tiles of rows, whole and in part, by panels whose blocks are no multiple of what a kernel takes at once."""
    rng = random.Random(name)
    whole = LAYOUTS[KINDS[name]].weights
    for rows in (9, 13, 16, 17, 24, 31, 40, 64, 70):
        inputs = whole * (rng.randint(5, 20) if whole == 32 else rng.randint(1, 3))
        outputs = rng.randint(1, 90)
        x = _rows(rows, inputs, rows)
        packed, wanted = _compared(name, path, outputs, None, x)
        assert torch.equal(apply(packed, x[rows - 1 :]), wanted[rows - 1 :])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0", "Q6_K"])
def test_rows_of_every_magnitude(name: str, path: str, chosen: None) -> None:
    """Kernels that scale sums in one fused step must not round where plain C does not, whatever the scales are."""
    x = _rows(64, 512)
    x *= 10 ** (_rows(64, 512, 2) * 3).clamp(-25, 25)
    _choose("generic")
    wanted = apply(_weight(name, 40, 512, None), x)
    _choose(path)
    assert torch.equal(apply(_weight(name, 40, 512, None), x), wanted)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(HALVES))
def test_the_largest_integers_do_not_overflow(name: str, path: str, chosen: None) -> None:
    """All bits of the weights' integers set or clear, against rows at both ends of int8."""
    x = torch.ones(12, 512)
    x[1::2] = -1
    x[4:8, ::2] *= -1
    for byte in (0x00, 0xFF, 0x80, 0x7F):
        blocks = random_blocks(name, 20, 512)
        like = random_blocks(name, 20, 512, 1)
        blocks.data.fill_(byte)
        data, scales = (b.data.view(-1, LAYOUTS[KINDS[name]].bytes) for b in (blocks, like))
        for at in HALVES[name]:
            data[:, at : at + 2] = scales[:, at : at + 2]
        if name == "MXFP4":
            data[:, 0] = scales[:, 0]
        _choose("generic")
        wanted = apply(pack_blocks(blocks), x)
        exact = as_int8(x) @ dequantize(blocks).double().T
        torch.testing.assert_close(wanted.double(), exact, atol=1e-3, rtol=1e-4)
        _choose(path)
        assert torch.equal(apply(pack_blocks(blocks), x), wanted)


def test_weights_packed_for_another_path_are_still_right(chosen: None) -> None:
    """Nothing chooses a path after packing but tests; the plain code reads panels of every width."""
    x = _rows(3, 512)
    for name in sorted(HALVES):
        packed = {}
        for path in PATHS:
            _choose(path)
            packed[path] = _weight(name, 21, 512, None)
        wanted = apply(packed[PATHS[-1]], x)
        for path in PATHS:
            _choose(path)
            assert all(torch.equal(apply(weight, x), wanted) for weight in packed.values())


def _weight(name: str, outputs: int, inputs: int, bias: torch.Tensor | None) -> PackedWeight:
    if name in KINDS:
        return pack_blocks(random_blocks(name, outputs, inputs, outputs), bias)
    weight = _rows(outputs, inputs, outputs)
    return pack_floats(weight, "float32" if name == "F32" else "bfloat16", bias)


@pytest.mark.parametrize("name", sorted(HALVES))
def test_rows_can_be_read_alone(name: str) -> None:
    blocks, rows = random_blocks(name, 9, 512), torch.tensor([3, 8, 3, 0])
    assert torch.equal(unpack_rows(blocks, rows), dequantize(blocks)[rows])
    assert torch.equal(unpack_rows(blocks, rows.tolist()), dequantize(blocks)[rows])
    assert torch.equal(dequantize(take_rows(blocks, rows)), dequantize(blocks)[rows])
    for row in (9, -1):
        with pytest.raises(IndexError):
            unpack_rows(blocks, torch.tensor([0, row]))


def test_rows_of_zeros_and_of_large_numbers() -> None:
    packed = pack_blocks(random_blocks("Q4_1", 12, 64))
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e30), torch.full((64,), -1e-30)])
    got = apply(packed, x)
    assert torch.equal(got[0], torch.zeros(12))
    assert bool(got.isfinite().all())


def test_rows_that_are_not_numbers_do_not_spread() -> None:
    packed = pack_blocks(random_blocks("Q8_0", 12, 64))
    x = _rows(4, 64)
    wanted = apply(packed, x)
    x[2, 5] = float("nan")
    x[1, 40] = float("inf")
    got = apply(packed, x)
    assert torch.equal(got[[0, 3]], wanted[[0, 3]])
    assert not bool(got[1].isfinite().any())


def test_a_scale_too_large_for_its_offset_is_not_a_wrong_number() -> None:
    blocks = random_blocks("Q4_0", 4, 32)
    blocks.data.view(4, 18)[:, :2] = torch.tensor([60000.0]).half().view(torch.uint8)
    assert not bool(apply(pack_blocks(blocks), torch.ones(1, 32)).isfinite().any())


def test_types_without_a_packed_form_stay_exact() -> None:
    half = torch.randn(6, 32).half()
    packed = pack_blocks(Blocks(1, (6, 32), half.view(torch.uint8).flatten()))
    assert torch.equal(packed.data, half.float())
    assert is_packable(1)
    assert not is_packable(10)  # Q2_K
