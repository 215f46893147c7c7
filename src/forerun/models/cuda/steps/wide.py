"""Products of more than 64 rows: how each is cut into tiles, and the launches (kernels/hopper/wide.py).

Which splits a weight has was decided for few rows (fused.py) and stays, because sums depend on it. What is chosen here
changes only their speed: tiles of 128 outputs for all rows of a pass of up to 256 rows, so that a weight is
read once; splits in parallel where there are too few tiles to keep every multiprocessor busy, else one after another.
Unfinished sums of many rows may come from the vendor's library, which is faster there, if its sums have the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from forerun.models.cuda.compile.together import compile_together
from forerun.models.cuda.kernels.hopper import wide as kernels_wide
from forerun.models.cuda.plan import MAX_ROWS, NARROW, ROW_SIZES
from forerun.models.cuda.steps.finish import Sums, or_unused
from forerun.models.cuda.steps.tiles import MANY
from forerun.models.cuda.weights import Weight

log = logging.getLogger(__name__)

SHARED = 227 << 10  # bytes of shared memory that a program may have
LIBRARY_FROM = 192  # rows of products that the vendor's library may do
PARTS, GATED, LOGITS = range(3)  # as in kernels_wide
_PIECES = {  # rows of a tile as powers of two
    64: (64, 0, 0),
    96: (64, 32, 0),
    128: (128, 0, 0),
    160: (128, 32, 0),
    192: (128, 64, 0),
    224: (128, 64, 32),
    256: (256, 0, 0),
}


class Cut(Protocol):
    """What fused.py says of a product: its outputs per tile, and into how many splits its depth is cut."""

    @property
    def outputs(self) -> int: ...
    @property
    def splits(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WideTile:
    """How a wide product is cut up."""

    outputs: int
    rows: int
    parallel: int = 1  # splits by programs of their own, whose sums another kernel adds up
    sequential: int = 1  # splits one after another in one program
    stages: int = 8  # at most; as many as shared memory holds
    library: bool = False  # by the vendor's library, all rows at once

    def tall(self, rows: int) -> int:
        """So many rows, and those that the last tile has beyond them."""
        return -(-rows // self.rows) * self.rows

    def stages_for(self, mode: int, depth: int) -> int:
        left = SHARED - 2048 - (self.outputs * _PIECES[self.rows][0] if mode == GATED else 0)
        held = left // ((self.outputs + self.rows) * kernels_wide.STEP * 2)
        return min(self.stages, held, depth // self.parallel // kernels_wide.STEP)


def choose_wide(name: str, rows: int, outputs: int, splits: int) -> WideTile:
    """Found by measuring an 8B shape on an H200 (`python -m lab.gpu --products --sweep`)."""
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


def library_pays(name: str, rows: int, splits: int) -> bool:
    """Is the vendor's library faster? Measured as above: for one split by 10 to 17%; not for two, nor for gates."""
    return splits == 1 and rows >= LIBRARY_FROM and name not in ("gate", "head")


def product_of(name: str) -> str:
    """Names of products of layers that differ in size end with their shape."""
    return name.partition(" ")[0]


def _half(rows: int) -> int:
    """The smallest tile of which two hold these rows."""
    return next(size for size in _PIECES if 2 * size >= rows)


def _tile_rows(rows: int, most: int) -> int:
    """The tallest tile of which a number makes these rows; all of them where none does."""
    return max((size for size in _PIECES if rows % size == 0 and size <= most), default=rows)


def fits(weights: Mapping[str, Weight], cuts: Mapping[str, Cut]) -> TypeGuard[Mapping[str, Tensor]]:
    """Can all products of a model be done here, with the bits they have for few rows?"""

    def fit(name: str, weight: Weight) -> bool:
        if not isinstance(weight, Tensor) or weight.element_size() != 2 or cuts[name].outputs < 64:
            return False  # narrower tiles use another instruction, whose sums may differ
        return weight.shape[1] % (kernels_wide.STEP * cuts[name].splits) == 0

    return all(fit(name, weight) for name, weight in weights.items())


class WideProducts:
    """Launches wide products of one model; sums that are not finished lie in `parts`."""

    def __init__(
        self, cuts: Mapping[str, Cut], weights: Mapping[str, Tensor], inverses: Tensor, gelu: bool = False
    ) -> None:
        """`gelu`: gates are GeGLU's."""
        device, self.inverses, self.gelu = inverses.device, inverses, gelu
        self.ones = torch.ones_like(inverses)  # factors of rows that come with their norm applied
        wide = [(name, rows) for name in cuts for rows in ROW_SIZES if rows > NARROW]
        self.tiles = {
            (name, rows): choose_wide(product_of(name), rows, len(weights[name]), cuts[name].splits)
            for name, rows in wide
        }
        libraries = {
            (name, rows): WideTile(0, rows, library=True)
            for name, rows in wide
            if library_pays(product_of(name), rows, cuts[name].splits)
        }
        most = max(
            tile.parallel * tile.tall(rows) * len(weights[name])
            for (name, rows), tile in [*self.tiles.items(), *libraries.items()]
            if product_of(name) not in ("gate", "head")
        )
        self.parts = torch.empty(most, device=device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._described: dict[tuple[int, ...], Any] = {}
        self._take(libraries, weights)

    def _take(self, tiles: Mapping[tuple[str, int], WideTile], weights: Mapping[str, Tensor]) -> None:
        """Take those of these tiles whose sums have the same bits as those that are chosen now.

        Which kernel the library takes, and so in which order it adds, follows from the shapes alone.
        """
        made = {
            name: (_random(MAX_ROWS, weights[name]), _random(len(weights[name]), weights[name])) for name, _ in tiles
        }

        def total(place: tuple[str, int], tile: WideTile) -> Tensor:
            name, count = place
            return self.total(count, *made[name], tile)

        def compile_ours() -> None:
            for place in tiles:
                total(place, self.tiles[place])

        compile_together(compile_ours)
        try:
            for place, tile in tiles.items():
                if torch.equal(total(place, self.tiles[place]), total(place, tile)):
                    self.tiles[place] = tile
        except RuntimeError as error:  # no memory to try it, or torch was told to be deterministic
            log.warning("all products by our own kernels: %s: %s", type(error).__name__, error)
        self._described.clear()  # of rows and weights that are no more

    def total(self, count: int, rows: Tensor, weight: Tensor, tile: WideTile) -> Tensor:
        """[count, N] as finishing kernels see it: the parts added from zero in order."""
        total = torch.zeros(count, len(weight), device=rows.device)
        _, number, apart = self._sums(tile, count, rows, weight)
        for part in self.parts[: number * apart * len(weight)].view(number, apart, -1):
            total += part[:count]
        return total

    def takes(self, count: int) -> bool:
        """Are passes of `count` rows done here?"""
        return ("gate", count) in self.tiles

    def sums(self, name: str, count: int, rows: Tensor, weight: Tensor) -> Sums:
        """Leave the parts [number, apart, N] of a product."""
        return self._sums(self.tiles[name, count], count, rows, weight)

    def _sums(self, tile: WideTile, count: int, rows: Tensor, weight: Tensor) -> Sums:
        if tile.library:
            into = self.parts[: count * len(weight)].view(count, -1)
            torch.mm(rows[:count], weight.T, torch.float32, out=into)
        else:
            self._launch(tile, PARTS, count, rows, weight, self.parts)
        return Sums(self.parts, tile.parallel, tile.tall(count))

    def gated(
        self,
        name: str,
        count: int,
        rows: Tensor,
        weight: Tensor,
        out: Tensor,
        delta: Tensor | None = None,
        normed: bool = False,
    ) -> None:
        self._launch(self.tiles[name, count], GATED, count, rows, weight, out, delta, normed)

    def logits(self, count: int, rows: Tensor, weight: Tensor, out: Tensor, normed: bool = False) -> None:
        self._launch(self.tiles["head", count], LOGITS, count, rows, weight, out, normed=normed)

    def _launch(
        self,
        tile: WideTile,
        mode: int,
        count: int,
        rows: Tensor,
        weight: Tensor,
        out: Tensor,
        delta: Tensor | None = None,
        normed: bool = False,
    ) -> None:
        outputs, depth = weight.shape
        pieces = _PIECES[tile.rows]
        row_tiles = tile.tall(count) // tile.rows
        units = -(-outputs // tile.outputs) * row_tiles * tile.parallel
        left = right = self._describe(weight, tile.outputs)
        if mode == GATED:  # gates and ups lie interleaved
            left, right = (self._describe(weight[i::2], tile.outputs // 2) for i in range(2))
        given = [self._describe(rows, piece or pieces[0]) for piece in pieces]
        into = given
        if mode == GATED:
            into = [self._describe(out, piece or pieces[0], tile.outputs // 2) for piece in pieces]
        kernels_wide.wide[(min(units, self.processors),)](
            left, right, *given, self.parts if mode == GATED else out, *into, self.ones if normed else self.inverses,
            or_unused(delta, self.inverses), units, tile.tall(count),
            N=outputs, K=depth, MODE=mode, BN=tile.outputs, P0=pieces[0], P1=pieces[1], P2=pieces[2],
            WARPS_N=2 if mode == GATED and tile.outputs == 128 else 1, ROW_TILES=row_tiles,
            PARALLEL=tile.parallel, SEQUENTIAL=tile.sequential, STAGES=tile.stages_for(mode, depth),
            ADAPTED=delta is not None, GELU=self.gelu, num_warps=8, enable_fp_fusion=False, launch_pdl=True,
        )  # fmt: skip

    def _describe(self, tensor: Tensor, rows: int, columns: int = kernels_wide.STEP) -> Any:
        key = tensor.data_ptr(), tensor.stride(0), rows, columns
        if key not in self._described:
            self._described[key] = kernels_wide.describe(tensor, rows, columns)
        return self._described[key]


def _random(rows: int, like: Tensor) -> Tensor:
    """[rows, K] of a weight's type: real weights may be zeros, whose sums say nothing."""
    seed = torch.Generator(like.device).manual_seed(rows)
    return torch.randn(rows, like.shape[1], generator=seed, device=like.device).to(like.dtype)
