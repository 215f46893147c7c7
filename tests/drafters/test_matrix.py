"""Packed weights of heads: near enough, and only where they pay."""

from __future__ import annotations

import pytest
import torch

from forerun.drafters.heads.formats import Matrix
from forerun.models.native import library as native


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_a_large_matrix_is_multiplied_to_within_int8(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(512, 160), torch.randn(rows, 160)
    wanted = x @ weight.t()
    off = (Matrix(weight).times(x) - wanted).abs().max() / wanted.abs().max()
    assert float(off) < 0.02
    torch.testing.assert_close(Matrix(weight, packed=False).times(x), wanted, rtol=1e-4, atol=1e-4)
    onto = torch.ones(rows, 512)
    torch.testing.assert_close(Matrix(weight).add_to(onto.clone(), x), onto + Matrix(weight).times(x))


def test_small_and_odd_matrices_stay_as_they_are() -> None:
    x = torch.randn(3, 8)
    weight = torch.randn(5, 8)
    torch.testing.assert_close(Matrix(weight).times(x), x @ weight.t())
    if native.available():
        assert Matrix(torch.randn(512, 160))._plain is None
    assert Matrix(torch.randn(4096, 33))._plain is not None
