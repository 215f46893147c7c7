"""Random numbers as a function of (seed, absolute position, purpose), so that nothing is ever drawn twice.

A sequence must not depend on its neighbours in a batch, on the number of rounds or on rejected drafts. So there
is no generator with a state: every number is hashed from where it is used.
`uniform` is a 53-bit number for tests and single draws; `uniforms` is one number per vocabulary entry, the
noise of the coupled verifier: with E = -log(1 - u), argmin(E / p) is a draw from p, and the same E elsewhere
agrees often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.request import ACCEPT as ACCEPT
from forerun.core.request import BLOCK as BLOCK
from forerun.core.request import COUPLE as COUPLE
from forerun.core.request import DRAFT as DRAFT
from forerun.core.request import DRAW as DRAW
from forerun.core.request import MASK, hashed, mixed
from forerun.core.request import derived_seed as derived_seed
from forerun.core.request import fresh_seed as fresh_seed


def uniform(seed: int, position: int, purpose: int, index: int = 0) -> float:
    """A number in [0, 1), 53 bits; it may be exactly 0."""
    return (hashed(seed, position, purpose, index) >> 11) * 2.0**-53


def coupling_key(seed: int, position: int) -> tuple[int, int]:
    """Two numbers of 31 bits from which `uniforms` hashes; native kernels do it themselves."""
    key = hashed(seed, position, COUPLE)
    return key & 0x7FFFFFFF, key >> 33


def uniforms(seed: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """[V] fp32 numbers in (0, 1), one per token, the same for every node at this position.

    32-bit arithmetic, because it vectorises everywhere; 31 bits go into each number and small values, which
    decide what is drawn, keep full relative precision.
    """
    low, high = coupling_key(seed, position)
    if torch.device(device).type == "cpu":  # numpy does it in a third of the time
        h: Any = _hash32(_hash32(np.arange(size, dtype=np.uint32) ^ low) ^ high) & 0x7FFFFFFF
        numbers = torch.from_numpy(h.astype(np.float32))
        return numbers.add_(0.5).mul_(2.0**-31)
    h = torch.arange(size, dtype=torch.int32, device=device)
    found: Tensor = (_hash32(_hash32(h ^ low) ^ high) & 0x7FFFFFFF).to(torch.float32)
    return found.add_(0.5).mul_(2.0**-31)


def mixed_seed(seed: int) -> int:
    """Where `device_keys` starts from: a number of 64 bits, as torch has them, with a sign."""
    key = mixed(seed & MASK)
    return key - (1 << 64) if key >> 63 else key


def device_keys(seeds: Tensor, positions: Tensor, *parts: int) -> Tensor:
    """`seeds.hashed` for seeds that are mixed and positions, int64 both, on their device."""
    keys = _mix_rows(seeds ^ positions)
    for part in parts:
        keys = _mix_rows(keys ^ part)
    return keys


def device_uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """The numbers `uniform` gives, in fp64, on the device of mixed seeds and positions."""
    return ((device_keys(seeds, positions, purpose, 0) >> 11) & (1 << 53) - 1).double() * 2.0**-53


def device_uniforms(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The numbers `uniforms` gives for these tokens [V], int32: [..., V] of mixed seeds and positions [...]."""
    if tokens.device.type == "cuda" and find_spec("triton") is not None:
        from forerun.core.noise_kernel import uniforms_by_kernel

        return uniforms_by_kernel(seeds, positions, tokens)
    keys = device_keys(seeds, positions, COUPLE)
    low, high = (keys & 0x7FFFFFFF).int(), ((keys >> 33) & 0x7FFFFFFF).int()
    h: Tensor = _hash32(_hash32(tokens ^ low[..., None]) ^ high[..., None])
    return (h & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)


def _mix_rows(x: Tensor) -> Tensor:
    """`_mix` of int64 tensors: products wrap, and shifts are made logical."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & (1 << 33) - 1)


def exponential(seed: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """[V] fp32 standard exponentials from the same numbers: argmin(E / p) is a draw from p."""
    return uniforms(seed, position, size, device).neg_().log1p_().neg_()


def _hash32(h: Any) -> Any:
    """A bijective integer hash (two multiplications, three shifts) in place, wrapping: uint32 or int32."""
    h ^= (h >> 16) & 0xFFFF
    h *= 0x21F0AAAD
    h ^= (h >> 15) & 0x1FFFF
    h *= 0x735A2D97
    h ^= (h >> 15) & 0x1FFFF
    return h


def draw(law: Tensor, u: float) -> int:
    """The token at quantile u of a law [V], unnormalised is fine; never one of probability zero."""
    cdf = law.double().cumsum(-1)
    total = float(cdf[-1])
    if not (total > 0 and math.isfinite(total)):
        raise InvalidInput("no token is possible here: bad_words, logit_bias or the grammar ban them all")
    # the first entry whose cumulative mass exceeds u: an entry of mass zero never does first
    token = int(torch.searchsorted(cdf, u * total, right=True))
    return min(token, int(law.nonzero()[-1])) if token >= len(law) else token


@dataclass(frozen=True, slots=True)
class Noise:
    """The random numbers of one round: tree b has its own seed and the position of its root's successor."""

    seeds: Sequence[int]  # [B]
    positions: Sequence[int]  # [B] absolute position of the token that follows the root

    def uniform(self, b: int, depth: int, purpose: int, index: int = 0) -> float:
        """For the token that follows a node at `depth` of tree b."""
        return uniform(self.seeds[b], self.positions[b] + depth, purpose, index)

    def uniforms(self, b: int, depth: int, like: Tensor) -> Tensor:
        """[V] for the token that follows a node at `depth` of tree b: the noise that verifiers couple by."""
        return uniforms(self.seeds[b], self.positions[b] + depth, like.shape[-1], like.device)

    def select(self, which: Sequence[int]) -> Noise:
        return Noise([self.seeds[b] for b in which], [self.positions[b] for b in which])
