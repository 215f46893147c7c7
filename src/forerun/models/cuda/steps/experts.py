"""The steps of a pass over layers of experts as Triton kernels (kernels/experts.py): six launches instead of two.

How a product is cut into tiles follows from the weight's shape and from how many experts a row picks, never from the
number of rows, so that a row's bits do not depend on its neighbours. Dense products of the same model use the kernels
for few rows at any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.models.cuda.kernels import experts as kernels_experts
from forerun.models.cuda.network import Buffers, Model, Run
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.steps.fused import FusedSteps
from forerun.models.cuda.steps.tiles import power_of_two
from forerun.models.cuda.weights import STEP, ExpertWeights, Fours, Packed, Strips, Weight

ROUTER_NUMBERS = 1 << 14  # weights of a router that one program multiplies at once
SHARED = 104 << 10  # bytes of shared memory that one program may fill
BLOCKS = (16, 32, 64, 128)  # pairs of one expert that a program takes
UNEVEN = 1.5  # times its share that an expert may get
FEW_PAIRS = 64  # that one warp sorts
ENOUGH = 132  # programs of a pass over one row that keep a GPU's memory busy


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """How an expert's product is cut up."""

    outputs: int  # BN
    depth: int  # BK


def choose_expert_tile(outputs: int, depth: int, per_token: int) -> ExpertTile:
    """The widest tile of which one row's experts still make enough programs."""
    step = next(size for size in (128, 64, 32, 16) if depth % size == 0)
    sizes = [size for size in (64, 32, 16) if outputs % size == 0]
    return ExpertTile(next((size for size in sizes if outputs // size * per_token >= ENOUGH), sizes[-1]), step)


def rows_per_block(expected: float) -> int:
    """The width of an expert's product, by how many rows it should get: it changes its speed, not its result.

    Weights are the first operand: which instruction multiplies, and in what order it adds up, follows from their tile.
    """
    return next((size for size in BLOCKS if UNEVEN * expected <= size), BLOCKS[-1])


class FusedExpertSteps(FusedSteps):
    """Implements forerun.models.cuda.network.Steps."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        super().__init__(model, buffers, kv, scales)
        self.room_for_experts = ExpertBuffers(model, self.pdl)

    def _wide_products(self) -> None:
        """None: norms are handed on in one way, tile by tile."""

    def gate(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        if weights.experts is None:
            super().gate(run, layer)
        else:
            norm, eps = weights.mlp_norm, self.model.config.norm_eps
            self.room_for_experts.enter(run, self.buffers.x, norm, weights.experts, eps, layer)

    def leave_mlp(self, run: Run, layer: int) -> None:
        experts = self.model.layers[layer].experts
        if experts is None:
            super().leave_mlp(run, layer)
            return
        left = Left(self.buffers.rows, self.squares, self.inverses, self.norm_tile)
        norm, eps = self.model.next_norm(layer), self.model.config.norm_eps
        self.room_for_experts.leave(run, self.buffers.x, norm, experts, eps, left)

    def active_experts(self) -> list[int]:
        return self.room_for_experts.active_experts()


@dataclass(frozen=True, slots=True)
class Left:
    """What a layer leaves for the next norm."""

    rows: Tensor  # [MAX_ROWS, D] times the norm's weight
    squares: Tensor  # [MAX_ROWS, T] sums by tile of columns, fp64
    inverses: Tensor  # [MAX_ROWS]
    tile: int


class ExpertBuffers:
    """Where the experts of a pass work, and the launches; all sizes follow from the number of rows."""

    def __init__(self, model: Model, pdl: bool) -> None:
        config, device = model.config, model.device
        assert config.moe is not None
        self.moe, self.width = config.moe, config.width
        self.early: dict[str, Any] = {"PDL": pdl, "launch_pdl": pdl}
        moe, pairs = config.moe, MAX_ROWS * config.moe.per_token
        shared = moe.shared_inner or 0
        self.outputs = moe.experts + (1 if shared and moe.shared_gate else 0)  # of the router
        self.columns = power_of_two(self.outputs)

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        with torch.inference_mode(False):
            self.normed = torch.zeros(MAX_ROWS, self.width, dtype=model.dtype, device=device)
            self.logits = torch.zeros(MAX_ROWS, self.columns, device=device)
            self.picked, self.order = ints(pairs), ints(pairs + (moe.experts + 1) * BLOCKS[-1])
            aligned = -(-moe.experts // 4) * 4  # or kernels would be compiled once more for some layers
            self.counts = ints(config.layers * aligned).view(config.layers, aligned)  # pairs, by layer and expert
            self.weights, self.gates = torch.zeros(pairs, device=device), torch.ones(MAX_ROWS, device=device)
            inner = max(pairs * moe.inner, MAX_ROWS * shared)
            self.inner = torch.zeros(inner, dtype=model.dtype, device=device)
            self.found = torch.zeros(pairs, self.width, device=device)
            self.shared = torch.zeros(MAX_ROWS if shared else 1, self.width, device=device)
            self.blocks = ints(2 * (1 + moe.experts + pairs // BLOCKS[0]))

    def enter(self, run: Run, x: Tensor, norm: Tensor, experts: ExpertWeights, eps: float, layer: int) -> None:
        """Route all rows, sort them by expert, and run gate and up of every expert that was picked."""
        rows, moe, up = run.size.rows, self.moe, power_of_two(self.width)
        together = max(1, min(ROUTER_NUMBERS // up, self.columns))
        biases, none = experts.biases, self.gates
        kernels_experts.route[(rows, -(-self.outputs // together))](
            x, norm, experts.router, none if biases is None else biases.before,
            none if biases is None else biases.router, self.normed, self.logits, eps, OUTPUTS=self.outputs,
            OUTPUTS_UP=self.columns, WIDTH=self.width, UP=up, EB=together, BIASES=biases is not None, num_warps=8,
            enable_fp_fusion=False, **self.early,
        )  # fmt: skip
        kernels_experts.pick[(rows,)](
            self.logits, run.slots, none if experts.correction is None else experts.correction, self.picked,
            self.weights, self.gates, moe.scale, E=moe.experts, E_UP=power_of_two(moe.experts),
            OUTPUTS_UP=self.columns, EACH=moe.per_token, EACH_UP=power_of_two(moe.per_token),
            RENORMALISE=moe.renormalise, SIGMOID=moe.sigmoid, SHARED=self.outputs > moe.experts, GROUPS=moe.groups[0],
            KEPT=moe.groups[1], num_warps=1, enable_fp_fusion=False, **self.early,
        )  # fmt: skip
        pairs = rows * moe.per_token
        few = pairs <= FEW_PAIRS
        kernels_experts.sort_pairs[(moe.experts,)](
            self.picked, self.order, self.counts[layer], self.blocks, pairs, rows_per_block(pairs / moe.experts),
            int(pairs > moe.experts), E=moe.experts, BLOCK=FEW_PAIRS if few else 1024, num_warps=1 if few else 4,
            **self.early,
        )  # fmt: skip
        bias = None if biases is None else biases.gate_up
        self._product(rows, self.normed, experts.gate_up, self.inner, bias, gated=True, each=moe.per_token)

    def leave(self, run: Run, x: Tensor, norm: Tensor, experts: ExpertWeights, eps: float, left: Left) -> None:
        """The outputs of every pair and of the shared expert, added to the residual stream."""
        rows, biases = run.size.rows, experts.biases
        bias = None if biases is None else biases.down
        self._product(rows, self.inner, experts.down, self.found, bias, gated=False, each=1)
        if experts.shared_gate_up is not None and experts.shared_down is not None:
            self._product(rows, self.normed, experts.shared_gate_up, self.inner, gated=True, each=0)
            self._product(rows, self.inner, experts.shared_down, self.shared, gated=False, each=0)
        kernels_experts.combine[(rows,)](
            self.found, self.weights, self.shared, self.gates, self.gates if biases is None else biases.before,
            run.slots, x, left.rows, left.squares, left.inverses, norm, eps, WIDTH=self.width,
            UP=power_of_two(self.width), BN=left.tile, TILES_UP=left.squares.shape[1], EACH=self.moe.per_token,
            SHARED=experts.shared_down is not None, BIASES=biases is not None, num_warps=8, enable_fp_fusion=False,
            **self.early,
        )  # fmt: skip

    def active_experts(self) -> list[int]:
        """Experts that the last pass read, by layer: 0 in dense ones."""
        found: list[int] = (self.counts > 0).sum(1).tolist()
        return found

    def _product(
        self,
        rows: int,
        given: Tensor,
        weight: Weight,
        out: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool,
        each: int,
    ) -> None:
        """Pairs by expert: pair p reads row p // each. `each` 0 = the shared expert, which every row goes through."""
        count = self.moe.experts if each else 1
        outputs, depth = weight.shape[0] // count, weight.shape[1]
        tile = choose_expert_tile(outputs, depth, self.moe.per_token if each else 1)
        block = rows_per_block(rows * (self.moe.per_token if each else 1) / count)
        grid = -(-rows // block), outputs // tile.outputs
        if each:  # places that `sort_pairs` may need
            pairs = rows * self.moe.per_token
            grid = (pairs if pairs <= count else pairs // block + count), grid[1]
        assert not isinstance(weight, Strips)
        data, scales = (weight, self.gates) if isinstance(weight, Tensor) else (weight.data, weight.scales)
        packed = isinstance(weight, Fours)
        deep = STEP if packed else tile.depth
        stage = deep * (data.element_size() * tile.outputs // (2 if packed else 1) + 2 * block)  # bytes
        stages = max(2, min(6 if packed else 4, SHARED // stage))
        settings: dict[str, Any] = {"num_warps": 4, "num_stages": stages}
        limit, alpha = self.moe.clamp or (0.0, 1.0)
        kernels_experts.grouped[grid](
            given, data, scales, self.gates if bias is None else bias, self.order, self.blocks, out, rows,
            N=outputs, K=depth, BN=tile.outputs, BK=tile.depth, MT=block, EACH=each, GATED=gated, LIMIT=limit,
            ALPHA=alpha, W8=isinstance(weight, Packed), W4=packed, BIASES=bias is not None, enable_fp_fusion=False,
            **self.early, **settings,
        )  # fmt: skip
