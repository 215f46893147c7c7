"""How products of more than 64 rows are cut into tiles (wide.py), and which the vendor's library does.

Which splits a weight has was decided for few rows (fused.py) and stays, because sums depend on it. What is chosen here
changes only their speed: tiles of 128 outputs for all rows of a pass of up to 256 rows, so that a weight is
read once; splits in parallel where there are too few tiles to keep every multiprocessor busy, else one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.models.cuda.kernels_wide import STEP
from forerun.models.cuda.tiles import MANY

SHARED = 227 << 10  # bytes of shared memory that a program may have
LIBRARY_FROM = 192  # rows
PARTS, GATED, LOGITS = range(3)  # as in kernels_wide
PIECES = {  # rows of a tile as powers of two
    64: (64, 0, 0),
    96: (64, 32, 0),
    128: (128, 0, 0),
    160: (128, 32, 0),
    192: (128, 64, 0),
    224: (128, 64, 32),
    256: (256, 0, 0),
}


@dataclass(frozen=True, slots=True)
class WideTile:
    """How a wide product is cut up."""

    outputs: int
    rows: int
    parallel: int = 1  # splits by programs of their own, whose sums another kernel adds up
    sequential: int = 1  # splits one after another in one program
    stages: int = 8  # at most; as many as shared memory holds
    library: bool = False  # by the vendor's library, so many rows at once

    def tall(self, rows: int) -> int:
        """So many rows, and those that the last tile has beyond them."""
        return -(-rows // self.rows) * self.rows

    def stages_for(self, mode: int, depth: int) -> int:
        left = SHARED - 2048 - (self.outputs * PIECES[self.rows][0] if mode == GATED else 0)
        held = left // ((self.outputs + self.rows) * STEP * 2)
        return min(self.stages, held, depth // self.parallel // STEP)


def choose_wide(name: str, rows: int, outputs: int, splits: int) -> WideTile:
    """Found by measuring an 8B shape on an H200 (`python -m forerun.bench.gpu --products --sweep`)."""
    if name in ("gate", "head"):  # no parts: what follows needs the whole sum
        if splits > 1:
            return WideTile(128, _tile_rows(rows, 192), 1, splits)
        if rows <= 128 or (rows > 256 and name == "gate"):
            return WideTile(256, min(rows, 128))
        if rows == 224 and name == "gate":
            return WideTile(128, 256)  # three pieces cost more than unused rows
        return WideTile(128, _tile_rows(rows, 256))
    if splits == 1:
        return WideTile(128, _half(rows) if rows <= 512 else rows // 8)
    if rows <= 512:
        parallel = WideTile(128, rows if rows <= 128 else _half(rows), splits)
        few = outputs // 128 * 4 < MANY or name == "down"  # programs, if each had 128 rows and all splits
        return parallel if rows < 512 or few else WideTile(128, 128, 1, splits)
    if rows == 1024 and name == "down":
        return WideTile(128, 256, splits)
    return WideTile(128, 192 if rows == 768 else 128, 1, splits)


def choose_library(name: str, rows: int, splits: int) -> WideTile | None:
    """Where the vendor's library is faster, measured as above; None elsewhere.

    By 10 to 17% for queries, keys and values; not with a call for each of two splits.
    """
    if splits > 1 or name == "head":
        return None
    if name == "gate":  # its sums go through memory: not all at once, so that most of them stay in the cache
        return WideTile(0, rows if rows <= 512 else rows // 2, library=True) if rows >= 512 else None
    return WideTile(0, rows, library=True) if rows >= LIBRARY_FROM else None


def _half(rows: int) -> int:
    """The smallest tile of which two hold so many rows."""
    return next(size for size in PIECES if 2 * size >= rows)


def _tile_rows(rows: int, most: int) -> int:
    """The tallest tile of which a number makes these rows; all of them where none does."""
    return max((size for size in PIECES if rows % size == 0 and size <= most), default=rows)
