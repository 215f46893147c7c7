"""Products by the vendor's library: taken where they pay and have our bits, and never where they have others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from tests.gpu.tiny import make_target, need_cuda

if TYPE_CHECKING:
    from forerun.models.cuda.steps.fused import FusedSteps

pytestmark = pytest.mark.gpu


def _steps() -> FusedSteps:
    need_cuda()
    from forerun.models.cuda.steps.fused import FusedSteps

    steps = make_target("wide-split", "cuda", torch.bfloat16, "triton").passes.steps
    assert isinstance(steps, FusedSteps)
    if steps.wide is None:
        pytest.skip("this GPU has no kernels for many rows")
    return steps


def test_what_the_library_does_is_right() -> None:
    steps = _steps()
    assert steps.wide is not None
    taken = {place: tile for place, tile in steps.wide.tiles.items() if tile.library}
    if not taken:
        pytest.skip("this library adds in another order")
    layer = steps.model.layers[-1]
    for (name, count), tile in taken.items():
        weight = {"qkv": layer.qkv, "o": layer.o, "down": layer.down}[name]
        assert isinstance(weight, Tensor)
        rows = torch.randn(count, weight.shape[1], device="cuda").to(weight.dtype)
        wanted = rows.double() @ weight.double().T
        assert torch.allclose(steps.wide.total(count, rows, weight, tile).double(), wanted, atol=1e-3, rtol=1e-3)


def test_a_library_that_adds_otherwise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm

    def other(left: Tensor, columns: Tensor, kind: torch.dtype, *, out: Tensor) -> None:
        right(left, columns, kind, out=out)
        out[0, 0] = torch.nextafter(out[0, 0], out[0, 0] + 1)  # a single number, by its last bit

    monkeypatch.setattr(torch, "mm", other)
    steps = _steps()
    assert steps.wide is not None
    assert not any(tile.library for tile in steps.wide.tiles.values())
