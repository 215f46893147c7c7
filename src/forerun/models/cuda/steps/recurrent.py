"""What starts the kernels of recurrent layers: RecurrentSteps in the GPU decoder; and beside it, in torch's decoders,
the arguments of a walk and of the attention of a span.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.cuda.kernels import recurrent as kernels
from forerun.models.cuda.network import Run, shaped
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.states import PARENTS, StatePool, Trace
from forerun.models.cuda.steps.finish import or_unused
from forerun.models.cuda.steps.fused import FusedSteps, sized_name
from forerun.models.cuda.weights import Weight
from forerun.models.paged import slots_of

CHANNELS = 256  # of a convolution in one program


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


class RecurrentSteps(FusedSteps):
    """Implements forerun.models.cuda.network.Steps, where some layers keep a state."""

    def _other_weights(self) -> dict[str, Weight]:
        layers, shape = self.model.layers, self.model.attending.o.shape
        own = next(layer for layer in layers if layer.recurrent is not None)
        other = {} if own.o.shape == shape else {sized_name("o", own.o): own.o}
        return {"inputs": own.qkv, **other}

    @property
    def states(self) -> StatePool:
        states = self.buffers.states
        assert states is not None
        return states

    def qkv(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        if weights.recurrent is None:
            super().qkv(run, layer)
        else:
            self._made = self._sums_of(run, "inputs", self.buffers.rows, weights.qkv)

    def attend(self, run: Run, layer: int) -> None:
        weights, sums, states = self.model.layers[layer], self._made, self.states
        own = weights.recurrent
        if own is None:
            super().attend(run, layer)
            return
        is_wide = self.wide is not None and self.wide.takes(run.size.rows)
        norms, channels = self.norms if is_wide else self.norms_by_tile, states.channels
        found = shaped(self.buffers.found, channels)
        kernels.short_conv[run.size.rows, -(-channels // CHANNELS)](
            sums.data, self.inverses, self.squares, states.links, own.taps, or_unused(own.bias, self.inverses),
            states.joined[own.index], states.inputs, found, sums.apart, self.model.config.norm_eps,
            self.squares.stride(0), MAX_ROWS, states.inputs.stride(0), own.index, C=channels, BLOCK=CHANNELS,
            K=len(own.taps), WIDTH=self.width, PIECES=norms.pieces, PARTS=sums.number, BIAS=own.bias is not None,
            PDL=self.pdl, num_warps=4, enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip

    def keep_states(self, trace: Trace, rows: Tensor, places: Tensor) -> None:
        states, joined = self.states, trace.joined
        layers, _, channels = joined.shape
        if len(rows):
            kernels.keep_inputs[len(rows), layers, -(-channels // CHANNELS)](
                joined, trace.links[PARENTS], rows, places, states.inputs, joined.stride(0), states.inputs.stride(0),
                C=channels, BLOCK=CHANNELS, K=states.inputs.shape[2] + 1, num_warps=4,
            )  # fmt: skip
