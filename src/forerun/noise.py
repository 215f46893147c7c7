"""Random numbers as a function of (seed, absolute position, purpose), so that nothing is ever drawn twice.

A sequence's text must not depend on who sat beside it in a batch, on how many rounds it took or on what
was drafted in vain. So there is no generator with a state: every number is hashed from where it is used.
`uniform` is a 53-bit number for tests and single draws; `exponential` is one number per vocabulary entry, the
noise of the coupled verifier: argmin(E / p) is a draw from p, and the same E elsewhere agrees often.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidInput

_MASK = (1 << 64) - 1
DRAW, ACCEPT, BLOCK, DRAFT, COUPLE = range(5)  # purposes: two of them never share a number


def fresh_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(63)


def _mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, *parts: int) -> int:
    key = _mix(seed & _MASK)
    for part in parts:
        key = _mix(key ^ (part & _MASK))
    return key


def uniform(seed: int, position: int, purpose: int, index: int = 0) -> float:
    """A number in [0, 1), 53 bits; it may be exactly 0."""
    return (_key(seed, position, purpose, index) >> 11) * 2.0**-53


def exponential(seed: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """[V] fp32 standard exponentials, one per token, the same for every node at this position.

    32-bit arithmetic, because it vectorises everywhere; 31 bits go into each uniform and the small values,
    which decide the argmin, keep full relative precision.
    """
    key = _key(seed, position, COUPLE)
    h = torch.arange(size, dtype=torch.int32, device=device)
    h = _hash32(h ^ _signed32(key)) ^ _signed32(key >> 32)
    h = _hash32(h) & 0x7FFFFFFF
    return h.to(torch.float32).add_(0.5).mul_(-(2.0**-31)).log1p_().neg_()


def _signed32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _hash32(h: Tensor) -> Tensor:
    """A bijective integer hash (two multiplications, three shifts) on int32, wrapping."""
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * 0x21F0AAAD
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * 0x735A2D97
    return h ^ ((h >> 15) & 0x1FFFF)


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

    def exponential(self, b: int, depth: int, like: Tensor) -> Tensor:
        return exponential(self.seeds[b], self.positions[b] + depth, like.shape[-1], like.device)

    def select(self, which: Sequence[int]) -> Noise:
        return Noise([self.seeds[b] for b in which], [self.positions[b] for b in which])
