"""Triton: the noise of many positions in one kernel. `noise.py` says what it computes, in sixty torch operations.

Everything but the last two products is integer arithmetic, and those are exact: the numbers are the host's, to the bit.
Processes that compile kernels import this file: they start in a sixth of the time without torch.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.


BLOCK = 1024  # tokens of one program


def uniforms_by_kernel(seeds: "torch.Tensor", positions: "torch.Tensor", tokens: "torch.Tensor") -> "torch.Tensor":
    """The same as `noise.device_uniforms`, for seeds and positions of one shape."""
    import torch

    seeds, positions = torch.broadcast_tensors(seeds, positions)
    seeds, positions, size = seeds.contiguous(), positions.contiguous(), len(tokens)
    found = torch.empty(*positions.shape, size, device=tokens.device)
    grid = positions.numel(), triton.cdiv(size, BLOCK)
    uniform_rows[grid](seeds, positions, tokens, found, size, BLOCK=BLOCK, num_warps=4)
    return found


@triton.jit
def mix(x):
    """The finaliser of splitmix64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def hash32(h):
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def log_exponential(seed, position, token):
    """log E of one seed and position for tokens: near enough for drafts, not to the bit."""
    key = mix(mix(seed.to(tl.uint64, bitcast=True) ^ position.to(tl.uint64)) ^ 4)  # noise.COUPLE
    low, high = (key & 0x7FFFFFFF).to(tl.uint32), (key >> 33).to(tl.uint32)
    h = hash32(hash32(token.to(tl.uint32) ^ low) ^ high) & 0x7FFFFFFF
    u = (h.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    # near 0 the difference has few bits
    return tl.log(tl.where(u < 1e-3, u * (1.0 + 0.5 * u), -tl.log(1.0 - u)))


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["seeds", "positions"])
def uniform_rows(seeds, positions, tokens, found, size, BLOCK: tl.constexpr):
    """A part of one row: of one seed and position. They may lie anywhere: else odd places had a kernel of their own."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    key = tl.load(seeds + row).to(tl.uint64, bitcast=True) ^ tl.load(positions + row).to(tl.uint64)
    key = mix(mix(key) ^ 4)  # noise.COUPLE
    low, high = (key & 0x7FFFFFFF).to(tl.uint32), (key >> 33).to(tl.uint32)
    h = tl.load(tokens + at, mask=here, other=0).to(tl.uint32)
    h = hash32(hash32(h ^ low) ^ high) & 0x7FFFFFFF
    number = (h.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    tl.store(found + row.to(tl.int64) * size + at, number, mask=here)
