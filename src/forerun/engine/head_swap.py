"""An order to draft with another head from now on, done between two rounds; texts under way keep theirs."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from forerun.engine.engine import Engine


class HeadSwap:
    """To be posted to a Driver; `done` is set when it has been carried out, or has failed and changed nothing.

    The head is loaded on the engine's thread, because on a GPU its graphs cannot be captured beside a pass.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done = Event()
        self.error: Exception | None = None

    def __call__(self, engine: Engine) -> None:
        try:
            engine.settle()  # the new head's graphs are captured by passes in the same buffers
            engine.drafters.swap_head(str(self.folder), [*engine.running, *engine.reading])
        except Exception as error:
            self.error = error
        finally:
            self.done.set()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error
