"""The engine's process: `python -m forerun.server.backends FD`, as `EngineProcess` starts it."""

from __future__ import annotations

import logging
import os
import sys

from forerun.server.backends.child import main

if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # the interpreter's own end unloads a model piece by piece; the system is quicker
