"""How products of few rows are cut up: shapes that were measured keep their cuts, few programs fetch more at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.bench.gpu.stand_ins import SHAPE_OF_0_5B, SHAPE_OF_1_5B, RandomWeights
from forerun.models.config import DecoderConfig
from forerun.models.cuda.tiles import (
    ALL_SHARED,
    SHARED,
    Tile,
    choose_tile,
    doubled_products,
    rows_per_tile,
    stages_of,
)
from forerun.models.inflate import PRESETS, Shape


@pytest.mark.parametrize(
    ("outputs", "depth", "splits"),
    [
        (6144, 4096, 2), (4096, 4096, 4), (28672, 4096, 1), (4096, 14336, 4),  # 8B
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


@pytest.mark.parametrize(
    ("shape", "doubled"),
    [
        (PRESETS["8b"], {"qkv", "o", "down"}),
        (SHAPE_OF_1_5B, set()),  # 48 to 64 programs would be too few
        (SHAPE_OF_0_5B, set()),
    ],
)
def test_large_models_alone_have_tiles_of_twice_as_many_outputs(shape: Shape, doubled: set[str]) -> None:
    config = DecoderConfig.from_hf(RandomWeights(shape, 1000, False, "cpu").config)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"qkv": (queries + 2 * keys, shape.width), "o": (shape.width, queries)}
    tiles = {name: choose_tile(*size, 64) for name, size in sizes.items()}
    tiles["down"] = choose_tile(shape.width, shape.inner, 64)
    assert doubled_products(config, tiles) == doubled
    assert "qkv" not in doubled_products(replace(config, qk_norm=True), tiles)


def test_rows_side_by_side() -> None:
    assert [rows_per_tile(rows) for rows in (1, 16, 17, 33, 65, 1000)] == [16, 16, 32, 64, 128, 128]
    assert [rows_per_tile(rows, whole=True) for rows in (1, 9, 65)] == [8, 16, 64]
