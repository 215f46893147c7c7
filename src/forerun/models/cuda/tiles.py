"""How products of few rows are cut up: tiles of outputs, splits of the depth, rows side by side.

Splits depend on the weight's shape alone and never on the number of rows, because sums depend on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.models.cuda.network import Model

SHARED = 104 << 10  # bytes of shared memory that one program may fill: two to a multiprocessor
ALL_SHARED = 192 << 10  # where there is one to each, on GPUs that have so much
FEW = 132  # programs: as many as an H200 has multiprocessors
MANY = 90  # programs that keep the memory busy, where each has a multiprocessor for itself
LEAST = 512  # of the depth: of a split, where there would be few programs


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

    Splits along the depth make up for few tiles, to about one program per multiprocessor, which then has all of its
    shared memory. All of it was found by measuring on an H200. Where bytes are multiplied (`whole`), a step is twice as
    deep, and there are about two programs.
    """
    step = next(size for size in (128, 64, 32, 16) if depth % size == 0)
    if whole and tile == 64 and depth % 256 == 0:
        step = 256
    if tile < 64:
        splits = 2 if depth >= 12 * step and depth % (2 * step) == 0 else 1
        return Tile(tile, step, splits, depth // step // splits, 2)
    tiles, splits = outputs // tile, 1
    enough = 145 if whole else MANY
    while splits < 8 and tiles * splits < enough and depth % (splits * 2 * step) == 0:
        splits *= 2
    for size in () if whole else dict.fromkeys((step, min(step, 64))):
        if tiles * splits < FEW // 2:
            step, splits = max([(step, splits), *_finer(tiles, depth, size)], key=lambda cut: cut[1])
    return Tile(tile, step, splits, 4)


def _finer(tiles: int, depth: int, step: int) -> list[tuple[int, int]]:
    """Steps and splits, also of numbers that are no power of two, which make about one program per multiprocessor."""
    counts = [count for count in range(3, 9) if tiles * count <= FEW and depth % (count * step) == 0]
    return [(step, count) for count in counts if depth // count >= LEAST]


def stages_of(tile: Tile, depth: int, stage: int, alone: int, deep: int) -> int:
    """Steps of a product that are fetched at once: `deep`, as far as two programs fit a multiprocessor.

    Where there is no more than one program to each, it may have `alone` bytes (0 = there are more), and needs them: its
    own reads are all that keeps the memory busy. `stage`: bytes of one step.
    """
    if alone > SHARED:
        deep = max(deep, depth // tile.depth // tile.splits)
    return max(2, min(deep, max(alone, SHARED) // stage))


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


def power_of_two(value: int) -> int:
    """The power of two that is no less."""
    return 1 << max(0, value - 1).bit_length()
