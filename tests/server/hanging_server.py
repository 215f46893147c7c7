"""A server whose engine hangs at its sixth round; run by test_hang. After it has started anew it does not hang."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from forerun.server.backends.start import Loader
from forerun.server.run import address_of, bind, serve
from forerun.server.settings import ServerSettings


def main(front: Any, restart: bool, once: str) -> None:
    logging.basicConfig(level=logging.INFO)
    first = "FORERUN_LISTENER" not in os.environ
    settings = ServerSettings(("m",), port=0, hang_seconds=1.0, restart=restart, drain_seconds=1.0)
    listener = bind(settings)
    said = f"serving at {address_of(listener)} in {os.getpid()}, first: {first}"
    loader = Loader("tests.server.faulty_engines:load_hanging", {"once": once})
    serve(loader, settings, listener, lambda _: print(said, file=sys.stderr, flush=True), front=front)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "restart", sys.argv[3])
