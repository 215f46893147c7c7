"""A server whose engine hangs at its fifth round; run by test_hang. After it has started anew it does not hang."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

from forerun import LLM
from forerun.params import EngineConfig
from forerun.server.run import address_of, bind, serve
from forerun.server.settings import ServerSettings


def main(restart: bool) -> None:
    logging.basicConfig(level=logging.INFO)
    first = "FORERUN_LISTENER" not in os.environ
    settings = ServerSettings(("m",), port=0, hang_seconds=1.0, restart=restart, drain_seconds=1.0)
    listener = bind(settings)
    llm = LLM.load("smollm2", config=EngineConfig(max_batch=4, max_length=512))
    real = llm.engine.step

    def step() -> Any:
        if first and llm.engine.stats.rounds >= 5:
            threading.Event().wait()
        return real()

    llm.engine.step = step  # type: ignore[method-assign]
    said = f"serving at {address_of(listener)} in {os.getpid()}, first: {first}"
    serve(llm, settings, listener, lambda: print(said, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main(sys.argv[1] == "restart")
