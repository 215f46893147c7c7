"""The steps of a pass by products compiled ahead (models/cuda/cubin): weights of one byte or four bits, on Hopper.

A product leaves its sums in memory, and one program per row goes on (finish.py). The gate and the LM head need
no such step: the product itself applies the norm's factor of each row. Rows that meet e4m3 weights become e4m3 before
the product, by scales of their own; how a row is computed never depends on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.cuda.cubin.products import Norm, Products, quantise_rows
from forerun.models.cuda.network import Buffers, Model, Run
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.steps.finish import HandedOn, InBytes, Sums, columns_of, finish_gate
from forerun.models.cuda.steps.fused import GATED, LOGITS, RESIDUAL, FusedSteps, Product
from forerun.models.cuda.weights import BLOCK, Strips

PIECES = 8  # of a row of the residual stream: each is added to, and its squares summed, by a program of its own


class CompiledSteps(FusedSteps):
    """Implements forerun.models.cuda.network.Steps for models whose weights all are `Strips`."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        super().__init__(model, buffers, kv, scales)
        device, weights = model.device, _one_of_each(model)
        self.products = Products(device)
        for weight in weights:
            self.products.reserve(weight, MAX_ROWS)
        self.norm_tile = columns_of(self.width, PIECES)  # what the embedding leaves, too
        self.norms = HandedOn(self.inverses, self.squares, PIECES, self.pdl)
        self._norm = Norm(self.squares, PIECES, self.width, model.config.norm_eps)
        gates_apart = any(isinstance(layer.gate_up, Strips) and not layer.gate_up.gated for layer in model.layers)
        most = max(self.qkv_outputs, self.width, 2 * model.config.inner if gates_apart else 0)
        self.sums = torch.empty(MAX_ROWS * most, device=device)
        depths = {weight.depth for weight in weights if weight.format == "e4m3"}
        self._bytes = {
            depth: InBytes(
                torch.zeros(MAX_ROWS, depth, dtype=torch.uint8, device=device),
                torch.zeros(depth // BLOCK, MAX_ROWS, device=device),
            )
            for depth in depths
        }
        self._embedded = False  # does the residual stream hold embeddings, which are not in e4m3 yet?
        self._stream = self._bytes.get(self.width)  # of rows of the residual stream
        if self._stream is not None:  # attention's rows may be as wide
            self._stream = InBytes(*(part.clone() for part in self._stream))

    def _partials(self, name: str) -> int:
        return 0  # sums of splits lie in what the products have reserved

    def _linear(self, run: Run, product: Product) -> None:
        _, mode, rows, weight, out, norm, layer, normed, change, after, _ = product
        assert isinstance(weight, Strips)
        assert change is None, "CudaDecoder.load_adapter refuses adapters here"
        count, scales = run.size.rows, None
        if weight.format == "e4m3":
            rows, scales = self._in_bytes(rows, weight, count)
        if mode in (GATED, LOGITS):
            apart = mode == GATED and not weight.gated
            norm_of = None if normed else self._norm
            self.products.multiply(weight, rows, count, self.sums if apart else out, scales=scales, norm=norm_of)
            if apart:
                finish_gate(self.sums, count, out, self.gelu)
            return
        self.products.multiply(weight, rows, count, self.sums, scales=scales)
        sums = Sums(self.sums, 1, count)
        if mode == RESIDUAL:
            assert norm is not None
            self._finish_residual(sums, count, out, norm, self._stream, after=after)
        else:
            self._finish_qkv(sums, run, layer, out, normed)

    def embed(self, run: Run) -> None:
        super().embed(run)
        self._embedded = True

    def _in_bytes(self, rows: Tensor, weight: Strips, count: int) -> InBytes:
        """Rows in e4m3; those of the residual stream were left so by the product that added to it last."""
        if rows is not self.buffers.rows:
            found = self._bytes[weight.depth]
            quantise_rows(rows, count, *found)
            return found
        assert self._stream is not None
        if self._embedded:
            quantise_rows(rows, count, *self._stream)
            self._embedded = False
        return self._stream


def _one_of_each(model: Model) -> list[Strips]:
    """The weights of a model, without those that are like another."""
    found = dict[tuple[object, ...], Strips]()
    weights = [model.head, *([] if model.entry is None else [model.entry])]
    for layer in model.layers:
        weights += [layer.qkv, layer.o, layer.gate_up, layer.down]
    for weight in weights:
        assert isinstance(weight, Strips)
        found.setdefault((weight.format, *weight.shape), weight)
    return list(found.values())
