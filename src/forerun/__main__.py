"""The `forerun` script, and `python -m forerun` where the script is not on the path.

Nothing is imported before Ctrl-C ends the command without a traceback, and before each stream is there to be used.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130  # as shells count it: 128 + the signal


class _Interrupts:
    """Ctrl-C, raised as always, and remembered.

    numpy loses an interrupt that comes while it is imported, and fails with an ImportError instead.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.came = True
        raise KeyboardInterrupt


def run() -> None:
    """The entry point of the `forerun` script."""
    interrupts = _Interrupts()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # elsewhere it is ignored, as under nohup
        signal.signal(signal.SIGINT, interrupts)
    try:
        _open_closed_streams()
        from forerun.cli.app import run as run_command

        run_command()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    except ImportError:
        if not interrupts.came:
            raise
        raise SystemExit(_INTERRUPTED) from None


def _open_closed_streams() -> None:
    """Streams that the caller closed (`<&-`) are empty, or go nowhere: to Python they would be None.

    They stay open until the process ends.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


if __name__ == "__main__":
    run()
