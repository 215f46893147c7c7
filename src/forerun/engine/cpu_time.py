"""CPU time of one thread, read from another."""

from __future__ import annotations

import time
from threading import Thread


def seconds_of(thread: Thread) -> float:
    """So far; 0 once it has ended, or where the system does not tell."""
    if thread.ident is None or not thread.is_alive():
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except (AttributeError, OSError):
        return 0.0
