"""Is the machine busy with other work? Then what is timed on it is not what it can do."""

from __future__ import annotations

import os

BUSY_SHARE = 0.5  # of the cores: a load above this before we start comes from other processes


def cores() -> int:
    """CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def load_average() -> float | None:
    """The load of the last minute, where the system reports it."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def is_busy(load: float | None, available: int) -> bool:
    """Would another process' work show in the figures?"""
    return load is not None and load > BUSY_SHARE * available
