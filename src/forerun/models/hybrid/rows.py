"""Rows whose bits do not depend on their company: every call has the same shape, whatever the pass holds.

torch and its libraries choose kernels, tiles and the order of sums by the shape of a call, and treat the last few
numbers of a buffer unlike the others. So on a CPU a row is a call of its own, but for linear layers, which run on the
native kernels, whose rows are independent; on a GPU a call has TILE rows, the last ones padding. Attention is computed
node by node, over the positions that the node sees: in torch, or by a program for each node and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.encoder_decoder.layers import NativeLinear
from forerun.models.native import library as native
from forerun.models.pages import PAGE, slots_of

TILE = 64  # rows of a call on a GPU


def by_rows(function: Callable[..., Tensor], *inputs: Tensor, size: int | None = None) -> Tensor:
    """A function of rows [N, ...] -> [N, ...], in calls over `size` rows each; None = as many as suit the device."""
    size = size or (1 if inputs[0].device.type == "cpu" else TILE)
    rows, found = len(inputs[0]), list[Tensor]()
    for first in range(0, rows, size):
        some = [one[first : first + size].clone() for one in inputs]  # in memory of their own: equally aligned
        if lacking := max(0, first + size - rows):
            some = [F.pad(one, (0, 0) * (one.dim() - 1) + (0, lacking)) for one in some]
        found.append(function(*some))
    return found[0][:rows] if len(found) == 1 else torch.cat(found)[:rows]


def kernels_run_on(device: torch.device) -> bool:
    """Do recurrences and attention run in Triton there, rather than node by node in torch?"""
    return device.type == "cuda" and find_spec("triton") is not None


@contextmanager
def threads_for_rows(device: torch.device) -> Iterator[None]:
    """During a pass on a CPU the native kernels have all threads, and torch has one: its calls are small."""
    if device.type != "cpu" or not native.available():
        yield
        return
    threads = torch.get_num_threads()
    native.match_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class RowLinear:
    """x [M, inputs] -> [M, outputs]; within `threads_for_rows`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._native: NativeLinear | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and native.available():
            self._native = NativeLinear(weight, bias, "float32")
        self._plain = partial(F.linear, weight=weight, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return by_rows(self._plain, x) if self._native is None else self._native(x)


def attend_by_nodes(
    data: Tensor,
    spans: Sequence[Span],
    queries: Tensor,
    made: Tensor | None,
    scale: float,
    found: Tensor,
    window: int | None = None,
) -> None:
    """Tree attention of one layer, node by node.

    `data` [2, Hkv, S, D] is the layer's cache, which gets what was `made` [M, 2, Hkv, D], or has it already; `queries`
    are [M, H, D], and `found` [M, H, Dv]. With one part instead of two a row is both: its first Dv numbers are the
    value. A node's keys lie in the order of their positions, from a multiple of PAGE on, wherever its pages are; with a
    window it sees that many, its own included.
    """
    width = found.shape[2]
    groups = queries.view(len(queries), data.shape[1], -1, data.shape[3])  # of queries that share a key
    for span in spans:
        end, written = span.length + span.shape.deepest + 1, torch.tensor(span.slots, device=data.device)
        if made is None:
            own = data.index_select(2, written)
        else:
            own = made[span.first : span.end].permute(1, 2, 0, 3)
            data.index_copy_(2, written, own)
        if kernels_run_on(data.device) and window is None and len(data) == 2:
            _attend_in_triton(data, span, queries, scale, found)
            continue
        slots = slots_of(span.pages, 0, span.length) + span.slots
        places = torch.tensor((slots + [slots[0]] * PAGE)[: -(-end // PAGE) * PAGE], device=data.device)
        seen = data.index_select(2, places)
        for node, (path, depth) in enumerate(zip(span.shape.paths, span.shape.depths, strict=True)):
            if not span.shape.is_chain:
                seen[:, :, span.length : span.length + depth + 1] = own[:, :, list(path)]
            last = span.length + depth + 1
            visible = seen[:, :, 0 if window is None else max(0, last - window) : last]
            keys, values = visible[0], visible[-1, :, :, :width]
            scores = torch.bmm(groups[span.first + node].clone(), keys.transpose(1, 2)).mul_(scale)  # [Hkv, G, N]
            weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
            found[span.first + node] = torch.bmm(weights, values).flatten(0, 1)


def _attend_in_triton(data: Tensor, span: Span, queries: Tensor, scale: float, found: Tensor) -> None:
    from forerun.models.cuda.steps.recurrent import attend

    attend(data, span, queries, scale, found)
