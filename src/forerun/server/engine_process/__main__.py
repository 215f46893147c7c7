"""The engine's process: `python -m forerun.server.engine_process FD`, as `EngineProcess` starts it."""

from __future__ import annotations

import sys

from forerun.server.engine_process.child import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
