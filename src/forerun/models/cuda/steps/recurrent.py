"""What starts the kernels of recurrent layers: the arguments of a walk, and of the attention of a span."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.cuda.kernels import recurrent as kernels
from forerun.models.paged import slots_of


def scan(
    start: Tensor,  # [Hv, Dk, Dv] fp32
    prepared: Tensor,  # [M, ..] fp32, as mixers.Memory lays it out
    found: Tensor,  # [M, Hv Dv] fp32
    first: int,  # row of the first node
    parents: Sequence[int],
    wanted: Sequence[int],
    skip: Tensor | None,  # [Hv], Mamba-2's; None = the delta rule
) -> dict[int, Tensor]:
    """Fill what each node finds; the memories [Hv, Dk, Dv] of the nodes that are wanted.

    Tensors start at multiples of 16 bytes: Triton compiles others apart, whose sums may have another order.
    """
    start = start.clone() if start.data_ptr() % 16 else start
    heads, keys, values = start.shape
    read_again = {parent for node, parent in enumerate(parents) if parent not in (node - 1, -1)}
    stored = sorted({*wanted, *read_again})
    kept = start.new_empty(max(1, len(stored)), heads, keys, values)
    slots, places = [-1] * len(parents), {node: i for i, node in enumerate(stored)}
    for node, i in places.items():
        slots[node] = i
    numbers = [torch.tensor(one, dtype=torch.int32, device=start.device) for one in (list(parents), slots)]
    kernels.scan[heads, -(-values // kernels.COLUMNS)](
        prepared, found, start, kept, *numbers, start.new_zeros(heads) if skip is None else skip,
        first, len(parents), prepared.stride(0), HEADS=heads, KEYS=keys, VALUES=values,
        ROWS=1 << (keys - 1).bit_length(), DELTA=skip is None, BLOCK=kernels.COLUMNS,
    )  # fmt: skip
    return {node: kept[places[node]] for node in wanted}


def attend(data: Tensor, span: Span, queries: Tensor, scale: float, found: Tensor) -> None:
    """Tree attention of one layer's rows of one span, whose keys and values are in the cache `data` [2, Hkv, S, D]."""
    heads, dim, shape = queries.shape[1], queries.shape[2], span.shape
    places, own, depth = slots_of(span.pages, 0, span.length), span.slots, shape.deepest + 1
    if shape.is_chain:  # what is before a node in the chain is context, too
        contexts, depth = [[span.length + node, 1] for node in range(span.nodes)], 1
        tails = [[slot] for slot in own]
        places = places + own
    else:
        contexts = [[span.length, len(path)] for path in shape.paths]
        tails = [[*(own[one] for one in path), *[0] * (depth - len(path))] for path in shape.paths]
    numbers = [torch.tensor(one, dtype=torch.int32, device=data.device) for one in (places, contexts, tails)]
    kernels.attend[span.nodes, heads](
        queries, data, found, *numbers, span.first, depth, *data.stride()[:3], scale, HEADS=heads,
        GROUP=heads // data.shape[1], DIM=dim, WIDE=1 << (dim - 1).bit_length(), BLOCK=kernels.POSITIONS,
    )  # fmt: skip
