"""Memory that is not there, told in one line; and garbage collection while a model is loaded.

A limit on a process's addresses (`ulimit -v`) makes imports, threads and allocations fail in many ways, each with
an error of its own. No torch here: this is asked before it is imported.
"""

from __future__ import annotations

import errno
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.core.errors import ForerunError, OutOfMemory, brief

TORCH_BYTES = 800_000_000  # of addresses that torch for CPUs takes when it is imported; for GPUs it is more
_SIGNS = (
    "allocate memory", "failed to map segment", "bad_alloc", "out of memory", "can't start new thread",
    "Unable to allocate",
)  # fmt: skip


def address_limit() -> int | None:
    """Bytes of addresses that this process may have; None where there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def check_limit() -> None:
    """Raise where torch could not even be imported."""
    limit = address_limit()
    if limit is not None and limit < TORCH_BYTES and "torch" not in sys.modules:
        raise OutOfMemory(
            f"the memory limit of this process is {limit // 1_000_000} MB (ulimit -v), and torch alone needs about "
            f"{TORCH_BYTES // 1_000_000} MB, a model more; raise the limit"
        )


def as_out_of_memory(error: BaseException) -> OutOfMemory | None:
    """An error of any library that means too little memory, in one line; None for others."""
    if isinstance(error, ForerunError):
        return error if isinstance(error, OutOfMemory) else None
    told = brief(re.sub(r"^\[enforce fail.*?\] .*?: ", "", str(error)), 120)
    lacks = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not lacks and not any(sign in str(error) for sign in _SIGNS):
        return None
    limit = address_limit()
    allowed = "" if limit is None else f" with the limit of this process at {limit // 1_000_000} MB (ulimit -v)"
    step = "use a smaller model or less kv_memory" if limit is None else "raise the limit or use a smaller model"
    return OutOfMemory(f"out of memory{allowed}: {told or type(error).__name__}; {step}")


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn off garbage collection while libraries and a model are loaded: start-up is a tenth faster.

    What was loaded stays until the process ends, so later collections leave it out: walking its 180,000 objects would
    stop all texts for a tenth of a second now and then.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        if was_on:
            gc.freeze()
    finally:
        if was_on:
            gc.enable()
