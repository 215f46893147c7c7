"""CUDA graphs of passes, one per size, captured when a size first occurs; with prompts beside trees, when it recurs.

The host launches a whole pass by one call, which makes a pass over one node cheap: a layer is five
kernels of a few microseconds each. Capturing costs one eager pass (Triton compiles then, and keeps what it
compiled on disk) and no memory beyond the buffers, which all graphs share. Passes over trees and prompts are wide
and come in many sizes, and somebody waits for their tokens: these are captured when a size occurs again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from forerun.models.cuda.grown import GrownBuffers
from forerun.models.cuda.network import Buffers, Model, Run, Steps, run_pass
from forerun.models.cuda.pass_clock import PassClock
from forerun.models.cuda.plain_rounds import PlainResults, PlainStep, Seconds
from forerun.models.cuda.plan import NARROW, ROW_SIZES, Plan, Size, round_up
from forerun.types import TreeForm

log = logging.getLogger(__name__)

# size, hidden layers, rows with logits, then what is special: trees grown on the device, a plain round
_Key = tuple[Size, tuple[int, ...], int, TreeForm | PlainStep | None]


class Passes:
    """Runs planned passes: as graphs on a GPU, step by step elsewhere."""

    def __init__(
        self, model: Model, buffers: Buffers, grown: GrownBuffers, steps: Steps, capture: bool
    ) -> None:
        self.model, self.buffers, self.grown, self.steps, self.capture = model, buffers, grown, steps, capture
        self.plain = PlainResults(buffers)
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._last: _Key = Size(0, 0, 0), (), 0, None
        self.clock = PassClock(model.device)
        self._met: set[_Key] = set()  # sizes of trees and prompts that have occurred

    @property
    def captured(self) -> int:
        """How many sizes have a graph."""
        return len(self._graphs)

    @property
    def captured_grown(self) -> int:
        """How many of these are passes over trees that were grown on the device, and nothing beside them."""
        return sum(key[3] is not None and key not in self._met for key in self._graphs)

    @torch.inference_mode()
    def run(self, plan: Plan, hidden: tuple[int, ...], scored: int, grown: TreeForm | None = None) -> None:
        """A pass with logits of the first `scored` rows. Results lie in the buffers until the next pass.

        With trees grown on the device, their verdict too.
        """
        self.buffers.send(plan)
        whole = scored in (0, plan.rows)
        self._last = plan.size, hidden, _rounded(scored, plan), grown
        self.clock.start()
        if self.capture and not whole and self._last not in self._met:
            self._met.add(self._last)
            self._launch(self._last)
        else:
            self.replay_last()
        self.clock.stop()

    @torch.inference_mode()
    def replay_last(self) -> None:
        """Run the last pass again, from the same integers: for timing."""
        if not self.capture:
            self._launch(self._last)
            return
        if self._last not in self._graphs:
            self._graphs[self._last] = self._capture(self._last)
        self._graphs[self._last].replay()

    @torch.inference_mode()
    def run_plain(self, plan: Plan, hidden: tuple[int, ...], step: PlainStep) -> Seconds:
        """A pass over lone roots, and its argmax; results lie in one of two places until the next but one.

        Returns what tells how long it takes.
        """
        self.buffers.send(plan)
        self._last = plan.size, hidden, plan.size.rows, step
        self.clock.start()
        self.replay_last()
        self.clock.stop()
        return self.clock.taken()

    def _launch(self, key: _Key) -> None:
        size, hidden, scored, form = key
        run, buffers = Run.of(size, self.buffers.ints), self.buffers
        if isinstance(form, PlainStep):
            self.plain.follow(run.tokens, form)
            run = replace(run, logits=self.plain.logits(form.into))
            run_pass(self.steps, self.model, buffers, run, hidden, scored)
            self.plain.decide(size.rows, form)
            return
        if form is None:
            run_pass(self.steps, self.model, buffers, run, hidden, scored)
            return
        self.grown.fill(run.ints, size, form)
        run_pass(self.steps, self.model, buffers, run, hidden, scored)
        self.grown.decide(run.ints, size, form, buffers.logits[: form.rows])

    def _capture(self, key: _Key) -> torch.cuda.CUDAGraph:
        started = perf_counter()
        graph = capture(lambda: self._launch(key), self.model.device, self._pool)
        log.info("captured a pass of %s in %.1f s", key[0], perf_counter() - started)
        return graph


def _rounded(scored: int, plan: Plan) -> int:
    """Rows with logits, rounded up as all rows are; many where all rows are many.

    Products of many rows hand the norm on in another way than products of few: all of a pass are of one kind.
    """
    if not scored:
        return 0
    least = NARROW + 1 if plan.size.rows > NARROW else 1
    return min(plan.size.rows, round_up(max(scored, least), ROW_SIZES))


class Replays:
    """Small pieces of work by name: captured when first done on a GPU, plain calls elsewhere."""

    def __init__(self, device: torch.device, capture: bool) -> None:
        self.device, self.capture = device, capture
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    @property
    def captured(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def do(self, name: Hashable, work: Callable[[], None]) -> None:
        """Do what `work` does, once; it must be the same work on the same memory whenever it has this name."""
        if not self.capture:
            work()
        elif name in self._graphs:
            self._graphs[name].replay()
        else:
            self._graphs[name] = capture(work, self.device, self._pool)


def capture(work: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of some work, which is done once on the way: that compiles kernels and makes buffers when needed."""
    graph = torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph
