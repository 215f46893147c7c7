"""A progress line on a terminal, erased when the work is done.

It goes to stderr, so that it never mixes with what a program reads from stdout, and where stderr is no terminal
(or one that cannot erase a line) there is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import Self

_DELAY = 0.5  # seconds: what is done by then needs no progress line
_PAUSE = 0.2  # seconds between two updates
_ERASE = "\r\x1b[K"


class ProgressLine:
    """Shows what `describe` says, again and again, until it is stopped."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._stopped = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._thread = Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Erase the line; nothing is written after this returns."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def _show(self) -> None:
        shown, pause = False, _DELAY
        while not self._stopped.wait(pause):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(_ERASE + self._describe()[: columns - 1])
            sys.stderr.flush()
            shown, pause = True, _PAUSE
        if shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
