"""How much slower a process is because others use the same cores: what its threads ran, and what they waited to run."""

from __future__ import annotations

import os
from pathlib import Path


class Contention:
    """Of one process, from one look to the next; 1.0 where the system does not tell (only Linux does)."""

    def __init__(self, pid: int | None = None) -> None:
        self._folder = Path("/proc") / str(os.getpid() if pid is None else pid) / "task"
        self._last = self._now()

    def slowdown(self) -> float:
        """Since the last look: time that its busiest thread ran or would have run, over the time that it ran.

        The busiest one is the engine's: threads that wake up for a moment wait long for little.
        """
        before, self._last = self._last, self._now()
        spent = [
            (run - before.get(thread, (0, 0))[0], wait - before.get(thread, (0, 0))[1])
            for thread, (run, wait) in self._last.items()
        ]
        ran, waited = max(spent, default=(0, 0))
        return (ran + waited) / ran if ran > 0 else 1.0

    def _now(self) -> dict[str, tuple[int, int]]:
        found = {}
        for file in self._folder.glob("*/schedstat"):
            try:
                run, wait, _ = file.read_text().split()
            except (OSError, ValueError):  # a thread that has just ended
                continue
            found[file.parent.name] = int(run), int(wait)
        return found


def newest_child() -> int | None:
    """The process that this one started last; None where the system does not tell."""
    me = os.getpid()
    try:
        children = (Path("/proc") / str(me) / "task" / str(me) / "children").read_text().split()
    except OSError:
        return None
    return max(map(int, children), default=None)
