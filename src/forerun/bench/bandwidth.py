"""Memory bandwidth of this machine in GB/s: the bound of a pass that reads every weight once.

No single measurement is right. A copy reads and writes; a sum and a product of a matrix with a vector only read, as
a pass does, but may be bound by arithmetic. All three run in torch, with its threads, over far more bytes than any
cache holds; the best of them is what the machine can do at least.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

SIZE = 128 << 20  # bytes of the larger operand
_WIDTH = 4096
METHODS = "the best of a copy (bytes read and written), a sum and a matrix by a vector (bytes read), 128 MiB float32"


def bandwidth(repeats: int = 5) -> dict[str, float]:
    """GB/s by method, and the best of them."""
    source = torch.ones(SIZE // 4 // _WIDTH, _WIDTH)
    into, vector = torch.empty_like(source), torch.ones(_WIDTH)
    found = {
        "copy": rate(lambda: into.copy_(source), 2 * SIZE, repeats),
        "sum": rate(source.sum, SIZE, repeats),
        "matrix_by_vector": rate(lambda: torch.mv(source, vector), SIZE, repeats),
    }
    return {**found, "best": max(found.values())}


def copy_bandwidth(repeats: int = 5) -> float:
    """GB/s of a large copy, read and written bytes counted."""
    source = torch.ones(SIZE // 4)
    into = torch.empty_like(source)
    return rate(lambda: into.copy_(source), 2 * SIZE, repeats)


def rate(work: Callable[[], object], size: int, repeats: int) -> float:
    """GB/s of some work on so many bytes: the best of a few, since noise only slows."""
    fastest = float("inf")
    for _ in range(repeats + 1):  # the first one maps the pages
        started = perf_counter()
        work()
        fastest = min(fastest, perf_counter() - started)
    return size / fastest / 1e9
