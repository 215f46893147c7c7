"""Each product of a pass by the kernels for many rows and by those for few: how many numbers differ in a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Size
from forerun.models.cuda.steps.fused import FusedSteps
from forerun.models.cuda.target import CudaDecoder

NAMES = ("qkv", "o", "gate", "down", "head")


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
