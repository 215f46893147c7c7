"""Seeds of requests, and the hash that every random number is made by. No torch here; numbers are in noise.py."""

from __future__ import annotations

import secrets

MASK = (1 << 64) - 1
DRAW, ACCEPT, BLOCK, DRAFT, COUPLE, DERIVE = range(6)  # purposes: two of them never share a number


def fresh_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(63)


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th of several completions of one prompt: the first has the seed itself."""
    return hashed(seed, index, DERIVE) >> 1 if index else seed


def mixed(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hashed(seed: int, *parts: int) -> int:
    """64 bits of a seed and where they are used."""
    key = mixed(seed & MASK)
    for part in parts:
        key = mixed(key ^ (part & MASK))
    return key
