"""The steps of layers of different sizes (Gemma 4) as Triton kernels: products by their shapes, layers' inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.cuda.kernels import inputs as kernels_inputs
from forerun.models.cuda.network import Buffers, Model, Run, shaped
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.steps.fused import FusedSteps, sized_name
from forerun.models.cuda.steps.tiles import power_of_two
from forerun.models.cuda.weights import Weight


class SizedSteps(FusedSteps):
    """Implements forerun.models.cuda.network.Steps."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        super().__init__(model, buffers, kv, scales)
        self.ones, made = torch.ones(self.width, dtype=model.dtype, device=model.device), model.inputs
        numbers = 0 if made is None else MAX_ROWS * made.projection.shape[0]
        self.inputs = torch.empty(numbers, device=model.device)  # [MAX_ROWS, L, P]

    def _other_weights(self) -> dict[str, Weight]:
        layers, found = self.model.layers, dict[str, Weight]()
        for layer in layers:
            weights = {"qkv": layer.qkv, "o": layer.o, "gate": layer.gate_up, "down": layer.down}
            for product, weight in weights.items():
                if weight.shape != getattr(layers[-1], "gate_up" if product == "gate" else product).shape:
                    found[sized_name(product, weight)] = weight
        end = layers[0].end
        if self.model.inputs is not None and end is not None and end.gate is not None and end.projection is not None:
            found |= {"inputs": self.model.inputs.projection, "open": end.gate, "close": end.projection}
        return found

    def embed(self, run: Run) -> None:
        made, config = self.model.inputs, self.model.config
        if made is not None:
            self._embed(run, self.ones)  # the product reads embeddings as they are
            sums, size = self._sums_of(run, "inputs", self.buffers.rows, made.projection), len(made.norm)
            scale = float(torch.tensor(size**0.5, dtype=self.model.dtype))
            kernels_inputs.make[run.size.rows, config.layers](
                sums.data, run.tokens, made.table, made.norm, self.inputs, sums.apart, config.norm_eps,
                config.width**-0.5, scale, P=size, UP=power_of_two(size), LAYERS=config.layers, PARTS=sums.number,
                PDL=self.pdl, num_warps=4, enable_fp_fusion=False, launch_pdl=self.pdl,
            )  # fmt: skip
        super().embed(run)

    def leave_mlp(self, run: Run, layer: int) -> None:
        weights, norm, rows = self.model.layers[layer], self.model.next_norm(layer), self.buffers.rows
        end, after, count = weights.end, weights.after_mlp_norm, run.size.rows
        assert end is not None
        given = shaped(self.buffers.inner, weights.down.shape[1])
        sums = self._sums_of(run, "down", given, weights.down)
        if end.gate is None or end.projection is None:
            self._finish_residual(sums, count, rows, norm, after=after, times=end.scale)
            return
        self._finish_residual(sums, count, rows, self.ones, after=after)
        sums, size = self._sums_of(run, "open", rows, end.gate), end.gate.shape[0]
        inner = shaped(self.buffers.inner, size)
        kernels_inputs.gate[(count,)](
            sums.data, self.inputs, inner, sums.apart, layer, P=size, UP=power_of_two(size),
            LAYERS=len(self.model.layers), PARTS=sums.number, GELU=self.gelu, PDL=self.pdl, num_warps=4,
            enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip
        sums = self._sums_of(run, "close", inner, end.projection)
        self._finish_residual(sums, count, rows, norm, after=end.norm, times=end.scale)
