"""Products of few rows in tiles of 64 and of 128 outputs write the same: residual stream, norms, queries, keys, values.

Runs on a GPU, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_linear_tiles.py
Numbers are small and whole, so that every sum is exact and what is compared is where it goes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.tiny import where_kernels_run

DEPTH, ROWS, HEADS, KV_HEADS, DIM, SLOTS = 256, 5, 2, 1, 128, 64
QKV, RESIDUAL = 0, 2


def _product(mode: int, outputs: int, tile: int, splits: int) -> dict[str, Tensor]:
    device = where_kernels_run()
    from forerun.models.cuda.kernels.linear import linear

    numbers = torch.Generator().manual_seed(outputs + mode)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=numbers).float().to(device)

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows, weight = whole(16, DEPTH).to(dtype), whole(outputs, DEPTH).to(dtype)
    tiles, wide = outputs // 64, 16
    found: dict[str, Tensor] = {"x": whole(16, outputs), "out": torch.zeros(16, outputs, device=device).to(dtype)}
    # of the rows that go in, then of those that come out
    found["squares"] = whole(16, 32).abs().double() + DEPTH
    found["kv"] = torch.zeros(2, KV_HEADS, SLOTS, DIM, device=device).to(dtype)
    norm, positions = whole(outputs).to(dtype), torch.arange(16, dtype=torch.int32, device=device)
    slots = torch.tensor([7, 3, -1, 40, 5] + [-1] * 11, dtype=torch.int32, device=device)
    rope = torch.ones(16, DIM // 2, 2, device=device)
    rope[..., 1] = 2.0
    partial = torch.empty(outputs * wide * splits, device=device)
    counters = torch.zeros(64, dtype=torch.int32, device=device)
    settings: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False} if device.type == "cuda" else {}
    unused = found["squares"]
    linear[(1, outputs // tile, splits)](
        rows, weight, weight, unused, found["out"], found["x"], found["squares"], unused, norm, found["kv"][0],
        found["kv"][1], unused, unused, rope, positions, slots, partial, counters, *[unused] * 7, ROWS, 1e-5,
        SLOTS * DIM, N=outputs, K=DEPTH, MODE=mode, BN=tile, BK=64, SPLIT=splits, MT=wide, TILES=tiles, TILES_UP=32,
        H=HEADS, HKV=KV_HEADS, D=DIM, ROT=DIM // 2, BIAS=False, HEAD_NORM=False, ROPE=True, TMA=False, PDL=False,
        W8=False, NORMED=mode == QKV, ROOM=0, RANK=0, ADAPTED_ROOM=0, GELU=False, SUMS=False, SHARE=1.0, **settings,
    )  # fmt: skip
    assert not counters.any()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("mode", "outputs"), [(RESIDUAL, 384), (QKV, (HEADS + 2 * KV_HEADS) * DIM)])
def test_wider_tiles_write_the_same(mode: int, outputs: int, splits: int) -> None:
    narrow, wide = (_product(mode, outputs, tile, splits) for tile in (64, 128))
    for name, values in narrow.items():
        assert torch.equal(values, wide[name]), name
    if mode == RESIDUAL:
        sums = narrow["x"][:ROWS].double().square().view(ROWS, -1, 64).sum(-1)
        assert torch.equal(wide["squares"][:ROWS, : outputs // 64], sums)
    else:
        assert narrow["kv"][:, :, [7, 3, 40, 5]].any(-1).all()
        assert int(narrow["kv"].any(-1).sum()) == 2 * 4  # rows without a slot are written nowhere
