"""Passes captured as CUDA graphs, one per size, when a size is first met.

The host launches a whole pass by one call, which is what makes a pass over one node cheap: a layer is five
kernels of a few microseconds each. Capturing costs one eager pass (Triton compiles then, and keeps what it
compiled on disk) and no memory beyond the buffers, which all graphs share.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from forerun.models.cuda.network import Buffers, Model, Run, Steps, run_pass
from forerun.models.cuda.plan import Plan, Size

log = logging.getLogger(__name__)

_Key = tuple[Size, tuple[int, ...], bool]


class Passes:
    """Runs planned passes: as graphs on a GPU, step by step elsewhere."""

    def __init__(self, model: Model, buffers: Buffers, steps: Steps, capture: bool) -> None:
        self.model, self.buffers, self.steps, self.capture = model, buffers, steps, capture
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._last: _Key = Size(0, 0, 0), (), False

    @property
    def captured(self) -> int:
        """How many sizes have a graph."""
        return len(self._graphs)

    @torch.inference_mode()
    def run(self, plan: Plan, hidden: tuple[int, ...], with_logits: bool) -> None:
        """Results lie in the buffers until the next pass."""
        self.buffers.send(plan)
        self._last = plan.size, hidden, with_logits
        self.replay_last()

    @torch.inference_mode()
    def replay_last(self) -> None:
        """The last pass once more, from the same integers: for timing."""
        if not self.capture:
            self._launch(self._last)
            return
        if self._last not in self._graphs:
            self._graphs[self._last] = self._capture(self._last)
        self._graphs[self._last].replay()

    def _launch(self, key: _Key) -> None:
        size, hidden, with_logits = key
        run = Run.of(size, self.buffers.ints)
        run_pass(self.steps, self.model, self.buffers, run, hidden, with_logits)

    def _capture(self, key: _Key) -> torch.cuda.CUDAGraph:
        started = perf_counter()
        graph = torch.cuda.CUDAGraph()
        self._launch(key)  # compiles, and makes buffers that are made when first needed
        torch.cuda.synchronize(self.model.device)
        with torch.cuda.graph(graph, pool=self._pool):
            self._launch(key)
        log.info("captured a pass of %s in %.1f s", key[0], perf_counter() - started)
        return graph
