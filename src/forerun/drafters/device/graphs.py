"""CapturedCalls: what a drafter computes on a GPU, captured once for each size and replayed in one call of the host.

Operation by operation the host is what a draft waits for: a level of a small head is dozens of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

MOST = 16  # sequences of the largest graph; more run operation by operation
_WARM = 3  # runs before a capture, in which libraries make their choices
NOT_CAPTURED = "drafts are not captured, so they run operation by operation: %s: %s"  # a warning

Work = Callable[..., tuple[Tensor, ...]]


class CapturedCalls:
    """Graphs by key; work of one key reads inputs of the same shapes, and the same memory besides."""

    def __init__(self) -> None:
        self.made = 0  # captures so far: a draft that needed one says nothing of what drafts take
        self._graphs: dict[Hashable, tuple[Any, list[Tensor], tuple[Tensor, ...]]] = {}

    @torch.no_grad()
    def call(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `work` makes of these inputs; the next call overwrites it."""
        if key not in self._graphs:
            with torch.inference_mode(False):
                given = [value.clone() for value in inputs]
                graph, found = capture(lambda: work(*given))
            self._graphs[key] = graph, given, found
            self.made += 1
        graph, given, found = self._graphs[key]
        for place, value in zip(given, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        graph.replay()
        return found

    def clear(self) -> None:
        """Memory that the graphs read has moved."""
        self._graphs.clear()


def capture(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
    """The graph, and where its outputs lie."""
    make_stream: Any = torch.cuda.Stream
    side = make_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found
