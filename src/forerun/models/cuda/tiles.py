"""How products of few rows are cut up: tiles of outputs, splits of the depth, rows side by side.

Splits depend on the weight's shape alone and never on the number of rows, because sums depend on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.models.cuda.network import Model


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut up."""

    outputs: int  # BN
    depth: int  # BK
    splits: int
    stages: int
    warps: int = 4


def choose_tile(outputs: int, depth: int, tile: int, whole: bool = False) -> Tile:
    """Tiles of 64 outputs keep the memory busy where weights are large; 16 give more programs where not.

    Splits along the depth make up for few tiles, to about two programs per multiprocessor. All of it was found
    by measuring on an H200. Where bytes are multiplied (`whole`), a step is twice as deep.
    """
    step = next(size for size in (128, 64, 32, 16) if depth % size == 0)
    if whole and tile == 64 and depth % 256 == 0:
        step = 256
    if tile < 64:
        splits = 2 if depth >= 12 * step and depth % (2 * step) == 0 else 1
        return Tile(tile, step, splits, depth // step // splits, 2)
    tiles, splits = outputs // tile, 1
    while splits < 8 and tiles * splits * 2 <= 288 and depth % (splits * 2 * step) == 0:
        splits *= 2
    return Tile(tile, step, splits, 4)


def outputs_per_tile(model: Model) -> int:
    """One width of tile for all products of a model, because norms are handed on tile by tile."""
    config = model.config
    most = 64 if config.width * config.inner >= 1 << 22 else 16
    sizes = config.width, 2 * config.inner, config.kv_heads * config.head_dim, config.heads * config.head_dim
    return math.gcd(most, *sizes)


def rows_per_tile(rows: int, whole: bool = False) -> int:
    """The width of a product: it changes its speed, not its result. Rows of two bytes count twice."""
    sizes = (8, 16, 32, 64) if whole else (16, 32, 64, 128)
    return next((size for size in sizes if rows <= size), sizes[-1])
