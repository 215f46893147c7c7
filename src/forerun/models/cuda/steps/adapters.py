"""Launches the kernels of LoRA adapters (kernels/adapters.py) for one product of a pass."""

from __future__ import annotations

from torch import Tensor

from forerun.models.cuda.adapters import PARTS, RANKS, Adapted, AdapterStacks, Shape, depth_of, splits_of
from forerun.models.cuda.kernels import adapters as kernels
from forerun.models.cuda.plan import MAX_ROWS

OUTPUTS = 128  # of a tile of what is added before a wide product
ENOUGH = 1024  # programs that multiply the second matrices before a wide product: about eight to a multiprocessor
NO_CHANGE = 7  # tensors that `given` has


class Change:
    """What adapters add to one product: the first matrices are multiplied where this is made."""

    def __init__(
        self, stacks: AdapterStacks, adapted: Adapted, layer: int, product: str, rows: Tensor, pdl: bool
    ) -> None:
        self.stacks, self.adapted, self.pdl = stacks, adapted, pdl
        self.stack, self.shape, self.rank = stacks.layers[layer][product], stacks.shapes[product], stacks.rank
        shape, stack, splits = self.shape, self.stack, splits_of(self.shape.inputs)
        self.which = [*PARTS].index(product)
        kernels.down[(adapted.units, shape.parts * self.rank // RANKS, splits)](
            adapted.table, stack.ranks, stacks.scales, rows, stack.down, stacks.middle, stacks.partial,
            stacks.counters, stacks.begun, WHICH=self.which, K=shape.inputs, PARTS=shape.parts, RANK=self.rank,
            BK=depth_of(shape.inputs), SPLIT=splits, ROOM=MAX_ROWS, PDL=pdl, num_warps=4, num_stages=2,
            enable_fp_fusion=False, launch_pdl=pdl,
        )  # fmt: skip

    @property
    def given(self) -> tuple[Tensor, ...]:
        """What a product reads that multiplies the second matrices itself."""
        adapted, stack, begun = self.adapted, self.stack, self.stacks.begun[self.which * RANKS :]
        return begun, adapted.count, adapted.owners, adapted.chosen, stack.ranks, self.stacks.middle, stack.up

    def delta(self) -> Tensor:
        """[rows, N] fp32, parts one after another; for products that only add it."""
        shape, stack, stacks = self.shape, self.stack, self.stacks
        steps = steps_of(shape, self.adapted.units)
        tiles = sum(-(-outputs // (OUTPUTS * steps)) for outputs in shape.outputs)
        kernels.up[(self.adapted.units, tiles)](
            self.adapted.table, stack.ranks, stacks.middle, stack.up, stacks.delta, N=sum(shape.outputs),
            N0=shape.outputs[0], N1=shape.outputs[-1], PARTS=shape.parts, RANK=self.rank, BN=OUTPUTS, STEPS=steps,
            ROOM=MAX_ROWS, PDL=self.pdl, num_warps=4, num_stages=2, enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip
        return stacks.delta


def steps_of(shape: Shape, units: int) -> int:
    """Tiles of what is added that one program takes, one after another."""
    tiles = units * sum(-(-outputs // OUTPUTS) for outputs in shape.outputs)
    return next((steps for steps in (8, 4, 2) if tiles >= ENOUGH * steps // 2), 1)
