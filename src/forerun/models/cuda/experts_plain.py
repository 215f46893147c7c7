"""The steps of a pass over layers of experts in plain torch: what the kernels (experts_fused.py) are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.cuda.expert_weights import ExpertWeights, part_of
from forerun.models.cuda.network import Buffers, Model, Run
from forerun.models.cuda.packed import Weight, times
from forerun.models.cuda.plain import PlainSteps
from forerun.models.moe import by_expert, route


class PlainExpertSteps(PlainSteps):
    """Implements forerun.models.cuda.network.Steps."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor) -> None:
        super().__init__(model, buffers, kv)
        self._woken = [0] * len(model.layers)

    def woken(self) -> list[int]:
        return list(self._woken)

    def gate(self, run: Run, layer: int) -> None:
        if self.model.layers[layer].experts is None:
            super().gate(run, layer)

    def leave_mlp(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        if weights.experts is None:
            super().leave_mlp(run, layer)
            return
        live = (run.slots >= 0).nonzero().flatten()  # padding would only wake experts
        rows = self._normed(run, weights.mlp_norm)[live]
        self.buffers.x[live] += self._mix(rows, weights.experts, layer)

    def _mix(self, rows: Tensor, experts: ExpertWeights, layer: int) -> Tensor:
        """[M, D] -> [M, D] in fp32."""
        moe = self.model.config.moe
        assert moe is not None
        count = moe.experts
        weights, picked = route(rows, experts.router[:count], moe)
        out = torch.zeros(rows.shape, device=rows.device)
        self._woken[layer] = len(set(picked.flatten().tolist()))
        for expert, places, ranks in by_expert(picked, count):
            gate_up, down = part_of(experts.gate_up, expert, count), part_of(experts.down, expert, count)
            found = _feed_forward(rows[places], gate_up, down)
            out[places] += found * weights[places, ranks, None].float()
        if experts.shared_gate_up is not None and experts.shared_down is not None:
            opened = times(rows, experts.router[count:]).float().sigmoid()
            out += opened * _feed_forward(rows, experts.shared_gate_up, experts.shared_down)
        return out


def _feed_forward(rows: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    both = times(rows, gate_up).view(len(rows), -1, 2)
    return times(F.silu(both[..., 0]) * both[..., 1], down).float()
