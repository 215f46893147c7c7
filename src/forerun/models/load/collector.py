"""Garbage collection and what is loaded for good."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
