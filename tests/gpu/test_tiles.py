"""How products of few rows are cut up: shapes that were measured keep their cuts, few programs fetch more at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun.models.config import DecoderConfig
from forerun.models.cuda.steps.tiles import (
    ALL_SHARED,
    SHARED,
    Tile,
    choose_tile,
    outputs_per_tile,
    rows_per_tile,
    stages_of,
)


@pytest.mark.parametrize(
    ("outputs", "depth", "splits"),
    [
        (6144, 4096, 1), (4096, 4096, 2), (28672, 4096, 1), (4096, 14336, 2),  # 8B
        (2048, 1536, 4), (1536, 1536, 4), (17920, 1536, 1), (1536, 8960, 5),  # 1.5B: 70 steps are not cut into four
        (1152, 896, 1), (896, 4864, 4),  # 0.5B: 38 steps are not cut into four either, 76 half as deep are
        (1536, 3840, 5),
    ],
)  # fmt: skip
def test_splits_of_known_shapes(outputs: int, depth: int, splits: int) -> None:
    tile = choose_tile(outputs, depth, 64)
    assert tile.splits == splits
    assert depth % (tile.splits * tile.depth) == 0


def test_one_program_to_a_multiprocessor_fetches_all_that_fits() -> None:
    tile, stage = Tile(64, 128, 5, 4), 20 << 10
    assert stages_of(tile, 8960, stage, ALL_SHARED, 4) == ALL_SHARED // stage == 9
    assert stages_of(tile, 8960, stage, 0, 4) == 4  # not alone, or on a GPU with less
    assert stages_of(tile, 8960, 48 << 10, 0, 4) == SHARED // (48 << 10) == 2
    assert stages_of(Tile(64, 128, 4, 4), 1536, stage, ALL_SHARED, 4) == 4  # three steps: no more than before
    assert stages_of(Tile(64, 128, 1, 4), 896, stage, ALL_SHARED, 4) == 7


def test_rows_side_by_side() -> None:
    assert [rows_per_tile(rows) for rows in (1, 16, 17, 33, 65, 1000)] == [16, 16, 32, 64, 128, 128]
    assert [rows_per_tile(rows, whole=True) for rows in (1, 9, 65)] == [8, 16, 64]


@pytest.mark.parametrize(("picked", "width"), [(8, 64), (1, 16)])
def test_experts_alone_make_a_large_model_too(picked: int, width: int) -> None:
    """OLMoE's files say no other size than that of its experts."""
    sizes: dict[str, Any] = {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": picked, "num_attention_heads": 16, "num_hidden_layers": 2, "vocab_size": 50304,
    }  # fmt: skip
    assert outputs_per_tile(SimpleNamespace(config=DecoderConfig.from_hf(sizes))) == width  # type: ignore[arg-type]
