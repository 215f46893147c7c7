"""What starts the kernels of recurrent layers: RecurrentSteps in the GPU decoder; and beside it, in torch's decoders,
the arguments of a walk and of the attention of a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.cuda.kernels import recurrent as kernels
from forerun.models.cuda.network import Buffers, Model, Run, shaped
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.special import Recurrent
from forerun.models.cuda.states import KEEPS, PARENTS, WALKS, StatePool, Trace
from forerun.models.cuda.steps.experts import FusedExpertSteps
from forerun.models.cuda.steps.finish import HandedOn, or_unused
from forerun.models.cuda.steps.fused import FusedSteps, sized_name
from forerun.models.cuda.steps.tiles import power_of_two
from forerun.models.cuda.weights import Weight
from forerun.models.hybrid.mixers import Memory
from forerun.models.pages import slots_of

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

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        super().__init__(model, buffers, kv, scales)
        heads, _, values = self.states.memories.shape[2:]
        self.read = torch.zeros(MAX_ROWS, heads * values, device=model.device)  # what rows find in their memories
        self.no_skip = torch.zeros(max(1, heads), device=model.device)

    def _other_weights(self) -> dict[str, Weight]:
        layers, last = self.model.layers, self.model.attending
        own = next(layer for layer in layers if layer.recurrent is not None)
        found = {"inputs": own.qkv} | ({} if last.opens is None else {"opens": last.opens})
        return found if own.o.shape == last.o.shape else {**found, sized_name("o", own.o): own.o}

    @property
    def states(self) -> StatePool:
        states = self.buffers.states
        assert states is not None
        return states

    def _norms(self, rows: int) -> HandedOn:
        """How the norm of rows that enter a layer was handed on."""
        return self.norms if self.wide is not None and self.wide.takes(rows) else self.norms_by_tile

    def qkv(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        if weights.recurrent is not None:
            self._made = self._sums_of(run, "inputs", self.buffers.rows, weights.qkv)
            return
        super().qkv(run, layer)
        if weights.opens is not None:
            self._made = self._sums_of(run, "opens", self.buffers.rows, weights.opens)

    def attend(self, run: Run, layer: int) -> None:
        own = self.model.layers[layer].recurrent
        if own is None:
            super().attend(run, layer)
        elif own.memory is None:
            self._convolve(run, own)
        else:
            self._remember(run, own, own.memory)

    def leave_attention(self, run: Run, layer: int) -> None:
        weights, sums, rows = self.model.layers[layer], self._made, run.size.rows
        if weights.opens is not None:
            outputs = weights.opens.shape[0]
            kernels.open_found[rows, -(-outputs // CHANNELS)](
                sums.data, self.inverses, self.squares, self.buffers.found, sums.apart, self.model.config.norm_eps,
                self.squares.stride(0), N=outputs, BLOCK=CHANNELS, PARTS=sums.number, num_warps=4, **self._shared(rows),
            )  # fmt: skip
        super().leave_attention(run, layer)

    def _shared(self, rows: int) -> dict[str, Any]:
        """Settings of kernels that read sums of rows whose norm comes with them."""
        pieces = self._norms(rows).pieces
        return {
            "WIDTH": self.width, "PIECES": pieces, "PDL": self.pdl, "enable_fp_fusion": False, "launch_pdl": self.pdl,
        }  # fmt: skip

    def _convolve(self, run: Run, own: Recurrent) -> None:
        sums, states, rows = self._made, self.states, run.size.rows
        channels = states.channels
        kernels.short_conv[rows, -(-channels // CHANNELS)](
            sums.data, self.inverses, self.squares, states.links, own.taps, or_unused(own.bias, self.inverses),
            states.joined[own.index], states.inputs, shaped(self.buffers.found, channels), sums.apart,
            self.model.config.norm_eps, self.squares.stride(0), MAX_ROWS, states.inputs.stride(0), own.index,
            C=channels, BLOCK=CHANNELS, K=len(own.taps), UP=power_of_two(len(own.taps)), PARTS=sums.number,
            BIAS=own.bias is not None, num_warps=4,
            **self._shared(rows),
        )  # fmt: skip

    def _remember(self, run: Run, own: Recurrent, memory: Memory) -> None:
        """A convolution, a walk through the memory of each head, and what ends it."""
        sums, states, rows, config = self._made, self.states, run.size.rows, memory.config
        heads, keys, values = memory.heads, config.key_dim, config.value_dim
        outputs, delta = states.channels + memory.values + memory.steps, memory.skip is None
        shared: dict[str, Any] = {
            "N": outputs, "C": states.channels, "DELTA": delta, "PARTS": sums.number, "num_warps": 4,
        }  # fmt: skip
        shared |= self._shared(rows)
        eps, stride = self.model.config.norm_eps, self.squares.stride(0)
        kernels.prepare[rows, heads](
            sums.data, self.inverses, self.squares, states.links, own.taps, or_unused(own.bias, self.inverses),
            states.joined[own.index], states.inputs, memory.rates, memory.step_bias, states.prepared[own.index],
            sums.apart, eps, stride, MAX_ROWS, states.inputs.stride(0), own.index, states.prepared.stride(1),
            config.least_step, HEADS=heads, SHARED=config.key_heads, IN_TURNS=config.in_turns, KEYS=keys, VALUES=values,
            KEYS_UP=power_of_two(keys), VALUES_UP=power_of_two(values), K=len(own.taps), UP=power_of_two(len(own.taps)),
            BIAS=own.bias is not None,
            **shared,
        )  # fmt: skip
        links = states.links
        self._walk(states.prepared, links, memory, self.buffers.ints, links[KEEPS], rows, own.index)
        size = values if delta else memory.values // config.norm_groups
        kernels.finish_memory[rows, memory.values // size](
            sums.data, self.inverses, self.squares, self.read, memory.norm, shaped(self.buffers.found, memory.values),
            sums.apart, memory.eps, stride, TOTAL=memory.values, SIZE=size, UP=power_of_two(size), **shared,
        )  # fmt: skip

    def _walk(
        self, prepared: Tensor, links: Tensor, memory: Memory, rows: Tensor, keeps: Tensor, count: int, layer: int = -1
    ) -> None:
        """`layer` -1: after a pass, of all layers."""
        states, config, commits = self.states, memory.config, layer < 0
        kernels.walk[count * (len(prepared) if commits else 1), memory.heads, -(-config.value_dim // kernels.COLUMNS)](
            prepared, self.read, states.memories, or_unused(memory.skip, self.no_skip), links[PARENTS], links[WALKS],
            rows, keeps, count, max(0, layer), prepared.stride(0), states.memories.stride(0), prepared.stride(1),
            int(commits), HEADS=memory.heads, KEYS=config.key_dim, VALUES=config.value_dim,
            ROWS=power_of_two(config.key_dim), DELTA=memory.skip is None, BLOCK=kernels.COLUMNS, PDL=self.pdl,
            num_warps=4, enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip

    def keep_states(self, trace: Trace, rows: Tensor, places: Tensor) -> None:
        states, joined = self.states, trace.joined
        layers, _, channels = joined.shape
        rows, places = rows.int(), places.int()  # as in a pass: other types would be compiled apart
        if not len(rows):
            return
        kernels.keep_inputs[len(rows), layers, -(-channels // CHANNELS)](
            joined, trace.links[PARENTS], rows, places, states.inputs, joined.stride(0), states.inputs.stride(0),
            C=channels, BLOCK=CHANNELS, K=states.inputs.shape[2] + 1, num_warps=4,
        )  # fmt: skip
        own = next(layer.recurrent for layer in self.model.layers if layer.recurrent is not None)
        if own.memory is not None:
            self._walk(trace.prepared, trace.links, own.memory, rows, places, len(rows))


class RecurrentExpertSteps(RecurrentSteps, FusedExpertSteps):
    """The same where layers have experts."""
