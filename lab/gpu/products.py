"""Time of each matrix product of a pass on this GPU by number of rows, and whether its bits match the few-row kernel's.

A product is timed with everything fused into it (norms, residuals, rotary positions, the write to the KV cache),
over the weights of several layers in turn, so that none is found in the cache. `sweep` tries other tiles than the
ones in `models/cuda/steps/wide.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forerun.models.cuda.graphs import capture
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, NARROW, ROW_SIZES, Size
from forerun.models.cuda.steps.fused import FusedSteps
from forerun.models.cuda.steps.wide import WideTile, choose_wide
from forerun.models.cuda.target import CudaDecoder
from lab.gpu.rounds import seconds_of

LAYERS = 4  # whose weights are read in turn
NAMES = ("qkv", "o", "gate", "down", "head")


def measure_products(target: CudaDecoder, name: str, sweep: bool = False) -> list[dict[str, Any]]:
    """One line per number of rows; every product beside its narrow twin."""
    steps = target.passes.steps
    assert isinstance(steps, FusedSteps)
    fill(target)
    found = []
    for rows in [count for count in ROW_SIZES if count >= 32]:
        for product in NAMES:
            best = None
            for tile in _tiles(steps, product, rows, sweep):
                row = {"shape": name, "rows": rows, "product": product, **_measure(target, product, rows, tile)}
                found.append(row)
                best = min(best or row, row, key=lambda one: float(one["us"]))
                if sweep:
                    print(_line(row), flush=True)
            assert best is not None
            print(("best " if sweep else "") + _line(best), flush=True)
    return found


def fill(target: CudaDecoder) -> None:
    """Numbers as they might be: never zeros, which run faster."""
    buffers, steps = target.buffers, target.passes.steps
    run = _run(target, MAX_ROWS)
    run.tokens.random_(0, target.config.vocab_size)
    steps.embed(run)
    for tensor in (buffers.found, buffers.inner):
        tensor.normal_()


def work_of(steps: FusedSteps, product: str, run: Run) -> Callable[[int], None]:
    """One product by layer."""
    if product == "head":
        return lambda layer: steps.head(run)
    step = {"qkv": steps.qkv, "o": steps.leave_attention, "gate": steps.gate, "down": steps.leave_mlp}[product]
    return lambda layer: step(run, layer)


def outcome(target: CudaDecoder, product: str, run: Run) -> list[Tensor]:
    """Everything that a product writes; the norm factor that it passes on shows in the next product."""
    steps, buffers, rows = target.passes.steps, target.buffers, run.size.rows
    if product == "qkv":
        return [buffers.queries[:rows].clone(), target.kv.data[0, :, :, :rows].clone()]
    if product == "gate":
        return [buffers.inner[:rows].clone()]
    if product == "head":
        return [buffers.logits[:rows].clone()]
    steps.head(run)
    return [buffers.x[:rows].clone(), buffers.rows[:rows].clone(), buffers.logits[:rows].clone()]


@contextmanager
def narrow_only(steps: FusedSteps) -> Iterator[None]:
    """Products of many rows by the kernels for few."""
    wide, steps.wide = steps.wide, None
    try:
        yield
    finally:
        steps.wide = wide


def count_differing(target: CudaDecoder, product: str, rows: int) -> int:
    """Numbers that are not the same bits by the kernels for few rows; outputs are poisoned first."""
    steps = target.passes.steps
    assert isinstance(steps, FusedSteps)
    run = _run(target, rows)
    before = [tensor.clone() for tensor in (target.buffers.x, target.buffers.rows, target.buffers.inner)]

    def once() -> list[Tensor]:
        for tensor in (target.buffers.queries, target.buffers.logits, target.kv.data[0, :, :, :rows]):
            tensor.fill_(float("nan"))
        if product == "gate":
            target.buffers.inner.fill_(float("nan"))
        target.buffers.x.copy_(before[0])
        work_of(steps, product, run)(0)
        result = outcome(target, product, run)
        for tensor, old in zip((target.buffers.x, target.buffers.rows, target.buffers.inner), before, strict=True):
            tensor.copy_(old)
        return result

    found = once()
    with narrow_only(steps):
        wanted = once()
    return sum(int((one != other).sum()) for one, other in zip(found, wanted, strict=True))


def _run(target: CudaDecoder, rows: int) -> Run:
    """Row i at position i, in slot i."""
    run = Run.of(Size(rows, 1, 4), target.buffers.ints)
    run.positions.copy_(torch.arange(rows))
    run.slots.copy_(torch.arange(rows))
    return run


def _measure(target: CudaDecoder, product: str, rows: int, tile: WideTile | None) -> dict[str, Any]:
    steps = target.passes.steps
    assert isinstance(steps, FusedSteps)
    if tile is not None and steps.wide is not None:
        steps.wide.tiles[product, rows] = tile
    work, layers = work_of(steps, product, _run(target, rows)), min(LAYERS, target.config.layers)

    def in_turn() -> None:
        for i in range(layers):
            work(i)

    try:
        graph = capture(in_turn, target.device, None)
        seconds = seconds_of(graph.replay, 10) / layers
        differ = count_differing(target, product, rows)
    except Exception as error:
        if tile is None:
            raise
        return {"tile": str(tile), "us": float("inf"), "tflops": 0.0, "differ": -1, "error": repr(error)[:200]}
    layer = target.model.layers[0]
    weight = {"qkv": layer.qkv, "o": layer.o, "gate": layer.gate_up, "down": layer.down, "head": target.model.head}
    outputs, depth = weight[product].shape
    flops = 2.0 * rows * outputs * depth
    return {"tile": str(tile), "us": seconds * 1e6, "tflops": flops / seconds / 1e12, "differ": differ}


def _tiles(steps: FusedSteps, product: str, rows: int, sweep: bool) -> list[WideTile | None]:
    if steps.wide is None or rows <= NARROW:
        return [None]
    chosen = steps.wide.tiles[product, rows]
    if not sweep:
        return [chosen]
    splits = steps.tiles[product].splits
    others = [WideTile(256, 128)] if rows % 128 == 0 else []
    if product in ("gate", "head"):
        others += [WideTile(128, size) for size in (192, 256) if rows % size == 0]
        others += [WideTile(128, rows)] if rows < 192 else []
    else:
        sizes = [size for size in (64, 96, 128, 192, 256) if size <= rows]
        others += [WideTile(128, size, splits) for size in sizes]
        others += [WideTile(128, size, 1, splits) for size in sizes if size < 256 or splits == 1]
        others = [WideTile(256, 128, splits), *others[1:]] if rows % 128 == 0 else others
        others += [choose_wide(product, rows, _outputs(steps, product), splits)]
        others += [WideTile(0, rows, library=True)] if splits == 1 else []
    room = steps.wide.parts.numel()
    outputs = 0 if product in ("gate", "head") else _outputs(steps, product)
    fit = [tile for tile in others if tile.parallel * outputs * tile.tall(rows) <= room]
    return [chosen, *(tile for tile in dict.fromkeys(fit) if tile != chosen)]


def _outputs(steps: FusedSteps, product: str) -> int:
    return steps.qkv_outputs if product == "qkv" else steps.width


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['rows']:5d} rows {row['product']:>5}: {row['us']:8.1f} us {row['tflops']:6.0f} TFLOP/s, "
        f"{row['differ']} differ, {row['tile']} {row.get('error', '')}"
    )
