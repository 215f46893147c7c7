"""Random blocks of every GGUF type that the native kernels read, and what a product with them should be."""

import pytest
import torch
from torch import Tensor

from forerun.models.load.quants import LAYOUTS, Blocks
from forerun.models.native import library as native_library

needs_native = pytest.mark.skipif(
    not native_library.available(), reason=f"no native kernels: {native_library.why_not()}"
)

HALVES = {  # where a block keeps float16 scales
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "MXFP4": (),  # an exponent
}
KINDS = {layout.name: kind for kind, layout in LAYOUTS.items() if layout.name in HALVES}


def random_blocks(name: str, outputs: int, inputs: int, seed: int = 0) -> Blocks:
    """Any bytes, but scales that are small and finite, of either sign."""
    made = torch.Generator().manual_seed(seed)
    layout = LAYOUTS[KINDS[name]]
    shape = (outputs * inputs // layout.weights, layout.bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)
    for at in HALVES[name]:
        scales = torch.randn(len(data), 1, generator=made) * 0.01
        data[:, at : at + 2] = scales.half().view(torch.uint8)
    if name == "MXFP4":
        data[:, 0] = torch.randint(118, 124, (len(data),), dtype=torch.uint8, generator=made)
    return Blocks(KINDS[name], (outputs, inputs), data.flatten())


def as_int8(x: Tensor) -> Tensor:
    """Rows as the kernels see them: multiples of amax/127, to 16 significant bits, in blocks of 32."""
    blocks = x.view(len(x), -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    steps = torch.where(most > 0, blocks * (127 / most), 0.0).round()
    scales = most * torch.tensor(1 / 127, dtype=torch.float32)
    scales = ((scales.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    return (steps.double() * scales.double()).view(x.shape)
