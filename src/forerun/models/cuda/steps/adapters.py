"""Launches the kernels of LoRA adapters (kernels/adapters.py) for one product of a pass."""

from __future__ import annotations

from torch import Tensor

from forerun.models.cuda.adapters import RANKS, Adapted, AdapterStacks, depth_of, splits_of
from forerun.models.cuda.kernels import adapters as kernels
from forerun.models.cuda.plan import MAX_ROWS

OUTPUTS = 128  # of a tile of what is added before a wide product
NO_CHANGE = 6  # tensors that `given` has


class Change:
    """What adapters add to one product: the first matrices are multiplied where this is made."""

    def __init__(
        self, stacks: AdapterStacks, adapted: Adapted, layer: int, product: str, rows: Tensor, pdl: bool
    ) -> None:
        self.stacks, self.adapted, self.pdl = stacks, adapted, pdl
        self.stack, self.shape, self.rank = stacks.layers[layer][product], stacks.shapes[product], stacks.rank
        shape, stack, splits = self.shape, self.stack, splits_of(self.shape.inputs)
        kernels.down[(adapted.units, shape.parts * self.rank // RANKS, splits)](
            adapted.table, stack.ranks, stacks.scales, rows, stack.down, stacks.middle, stacks.partial,
            stacks.counters, K=shape.inputs, PARTS=shape.parts, RANK=self.rank, BK=depth_of(shape.inputs),
            SPLIT=splits, ROOM=MAX_ROWS, PDL=pdl, num_warps=4, num_stages=2, enable_fp_fusion=False, launch_pdl=pdl,
        )  # fmt: skip

    @property
    def given(self) -> tuple[Tensor, ...]:
        """What a product reads that multiplies the second matrices itself."""
        adapted, stack = self.adapted, self.stack
        return adapted.count, adapted.owners, adapted.chosen, stack.ranks, self.stacks.middle, stack.up

    def delta(self) -> Tensor:
        """[rows, N] fp32, laid out as the product's outputs are; for products that only add it."""
        shape, stack, stacks = self.shape, self.stack, self.stacks
        tiles = sum(-(-outputs // OUTPUTS) for outputs in shape.outputs)
        kernels.up[(self.adapted.units, tiles)](
            self.adapted.table, stack.ranks, stacks.middle, stack.up, stacks.delta, N=sum(shape.outputs),
            N0=shape.outputs[0], N1=shape.outputs[-1], PARTS=shape.parts, RANK=self.rank, BN=OUTPUTS, ROOM=MAX_ROWS,
            PDL=self.pdl, num_warps=4, num_stages=2, enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip
        return stacks.delta
