"""Launches products of more than 64 rows (kernels_wide.py, kernels_rows.py), cut up as wide_tiles.py says.

The vendor's library does those that it is faster at, if its sums have the same bits here: that is tried when a model is
loaded. Such sums are finished by a kernel of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda import kernels_rows, kernels_wide
from forerun.models.cuda.compiling import compile_together
from forerun.models.cuda.network import Layer, Run
from forerun.models.cuda.packed import Weight
from forerun.models.cuda.plan import MAX_ROWS, NARROW, ROW_SIZES
from forerun.models.cuda.wide_tiles import GATED, LOGITS, PARTS, PIECES, WideTile, choose_library, choose_wide

GATED_UNITS = 1024  # of one program


class Parts(NamedTuple):
    """Sums that are not finished: how many there are of each number, and the rows from one to the next."""

    number: int
    apart: int


class Cut(Protocol):
    """What fused.py says of a product: its outputs per tile, and into how many splits its depth is cut."""

    @property
    def outputs(self) -> int: ...
    @property
    def splits(self) -> int: ...


def fits(weights: Mapping[str, Weight], cuts: Mapping[str, Cut]) -> TypeGuard[Mapping[str, Tensor]]:
    """Can all products of a model be done here, with the bits they have for few rows?"""

    def fit(name: str, weight: Weight) -> bool:
        if not isinstance(weight, Tensor) or weight.element_size() != 2 or cuts[name].outputs < 64:
            return False  # narrower tiles use another instruction, whose sums may differ
        return weight.shape[1] % (kernels_wide.STEP * cuts[name].splits) == 0

    return all(fit(name, weight) for name, weight in weights.items())


class WideProducts:
    """Launches wide products of one model; sums that are not finished lie in `parts`."""

    def __init__(self, cuts: Mapping[str, Cut], weights: Mapping[str, Tensor], inverses: Tensor) -> None:
        device, self.inverses = inverses.device, inverses
        wide = [(name, rows) for name in cuts for rows in ROW_SIZES if rows > NARROW]
        self.tiles = {
            (name, rows): choose_wide(name, rows, len(weights[name]), cuts[name].splits)
            for name, rows in wide
        }
        libraries = {(name, rows): choose_library(name, rows, cuts[name].splits) for name, rows in wide}
        chosen = {place: tile for place, tile in libraries.items() if tile is not None}
        needed = [(name, tile.parallel * tile.tall(rows)) for (name, rows), tile in self.tiles.items()]
        needed = [one for one in needed if one[0] not in ("gate", "head")]
        needed += [(name, tile.rows) for (name, _), tile in chosen.items()]
        self.parts = torch.empty(max(rows * len(weights[name]) for name, rows in needed), device=device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._described: dict[tuple[int, ...], Any] = {}
        self._take(chosen, weights)

    def _take(self, tiles: Mapping[tuple[str, int], WideTile], weights: Mapping[str, Tensor]) -> None:
        """Take those of these tiles whose results have the same bits as those that are chosen now.

        Which kernel the library takes, and so in which order it adds, follows from the shapes alone.
        """
        noise = {name: _noise(weights[name]) for name, _ in tiles}
        self.inverses.uniform_(0.5, 2.0)  # every pass writes its own

        def result(place: tuple[str, int], tile: WideTile) -> Tensor:
            name, count = place
            return self.result(name, count, noise[name], weights[name], tile)

        def compile_ours() -> None:
            for place in tiles:
                result(place, self.tiles[place])

        compile_together(compile_ours)
        for place, tile in tiles.items():
            if torch.equal(result(place, self.tiles[place]), result(place, tile)):
                self.tiles[place] = tile
        self._described.clear()  # of rows that are no more

    def result(self, name: str, count: int, rows: Tensor, weight: Tensor, tile: WideTile) -> Tensor:
        """What a product leaves: gated units, or sums as finishing kernels see them, added from zero in order."""
        if name == "gate":
            units = rows.new_empty(count, len(weight) // 2)
            self._gated(tile, count, rows, weight, units)
            return units
        total = torch.zeros(count, len(weight), device=rows.device)
        number, apart = self._sums(tile, count, rows, weight)
        for part in self.parts[: number * apart * len(weight)].view(number, apart, -1):
            total += part[:count]
        return total

    def takes(self, count: int) -> bool:
        """Are passes of so many rows done here?"""
        return ("gate", count) in self.tiles

    def sums(self, name: str, count: int, rows: Tensor, weight: Tensor) -> Parts:
        """Leave the parts [number, apart, N] of a product."""
        return self._sums(self.tiles[name, count], count, rows, weight)

    def _sums(self, tile: WideTile, count: int, rows: Tensor, weight: Tensor) -> Parts:
        if tile.library:
            self._by_library(rows[:count], weight)
        else:
            self._launch(tile, PARTS, count, rows, weight, self.parts)
        return Parts(tile.parallel, tile.tall(count))

    def _by_library(self, rows: Tensor, weight: Tensor) -> None:
        """Leave [R, N] in `parts`."""
        into = self.parts[: len(rows) * len(weight)].view(len(rows), -1)
        torch.mm(rows, weight.T, torch.float32, out=into)

    def gated(self, count: int, rows: Tensor, weight: Tensor, out: Tensor) -> None:
        self._gated(self.tiles["gate", count], count, rows, weight, out)

    def _gated(self, tile: WideTile, count: int, rows: Tensor, weight: Tensor, out: Tensor) -> None:
        if not tile.library:
            self._launch(tile, GATED, count, rows, weight, out)
            return
        inner = len(weight) // 2
        for low in range(0, count, tile.rows):
            self._by_library(rows[low : low + tile.rows], weight)
            kernels_rows.finish_gated[(tile.rows, -(-inner // GATED_UNITS))](
                self.parts, self.inverses[low:], out[low:], INNER=inner, BLOCK=GATED_UNITS, PDL=True, num_warps=4,
                enable_fp_fusion=False, launch_pdl=True,
            )  # fmt: skip

    def logits(self, count: int, rows: Tensor, weight: Tensor, out: Tensor) -> None:
        self._launch(self.tiles["head", count], LOGITS, count, rows, weight, out)

    def _launch(
        self, tile: WideTile, mode: int, count: int, rows: Tensor, weight: Tensor, out: Tensor
    ) -> None:
        outputs, depth = weight.shape
        pieces = PIECES[tile.rows]
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
            left, right, *given, self.parts if mode == GATED else out, *into, self.inverses, units, tile.tall(count),
            N=outputs, K=depth, MODE=mode, BN=tile.outputs, P0=pieces[0], P1=pieces[1], P2=pieces[2],
            WARPS_N=2 if mode == GATED and tile.outputs == 128 else 1, ROW_TILES=row_tiles,
            PARALLEL=tile.parallel, SEQUENTIAL=tile.sequential, STAGES=tile.stages_for(mode, depth),
            num_warps=8, enable_fp_fusion=False, launch_pdl=True,
        )  # fmt: skip

    def _describe(self, tensor: Tensor, rows: int, columns: int = kernels_wide.STEP) -> Any:
        key = tensor.data_ptr(), tensor.stride(0), rows, columns
        if key not in self._described:
            self._described[key] = kernels_wide.describe(tensor, rows, columns)
        return self._described[key]

    def finish_residual(
        self, parts: Parts, count: int, x: Tensor, out: Tensor, norm: Tensor, eps: float
    ) -> None:
        """Add what `sums` left to the residual stream, and leave what the next norm needs."""
        width = x.shape[1]
        kernels_rows.finish_residual[(count,)](
            self.parts, x, out, norm, self.inverses, parts.apart, eps, WIDTH=width,
            UP=1 << (width - 1).bit_length(), PARTS=parts.number, PDL=True, num_warps=8, enable_fp_fusion=False,
            launch_pdl=True,
        )  # fmt: skip

    def finish_qkv(
        self,
        parts: Parts,
        run: Run,
        config: DecoderConfig,
        layer: Layer,
        kv: Tensor,
        out: Tensor,
        normed: bool,
    ) -> None:
        """Make queries, keys and values of what `sums` left; kv [2, Hkv, S, D]."""
        heads = gcd(config.heads, config.kv_heads, 8)
        unused = self.inverses
        kernels_rows.finish_qkv[(run.size.rows, (config.heads + 2 * config.kv_heads) // heads)](
            self.parts, self.inverses, out, kv[0], kv[1], _or(layer.qkv_bias, unused), _or(layer.qk_norm, unused),
            _or(layer.rope, unused), run.positions, run.slots, parts.apart, config.norm_eps, kv.stride(1),
            H=config.heads, HKV=config.kv_heads, D=config.head_dim,
            ROT=0 if layer.rope is None else layer.rope.shape[1],
            HEADS=heads, PARTS=parts.number, BIAS=layer.qkv_bias is not None, HEAD_NORM=layer.qk_norm is not None,
            ROPE=layer.rope is not None, NORMED=normed, PDL=True, num_warps=4, enable_fp_fusion=False,
            launch_pdl=True,
        )  # fmt: skip


def _noise(weight: Tensor) -> Tensor:
    """Rows that a weight might be multiplied with."""
    seed = torch.Generator(weight.device).manual_seed(1)
    rows = torch.randn(MAX_ROWS, weight.shape[1], generator=seed, device=weight.device)
    return rows.to(weight.dtype)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
