"""Python programs in processes of their own that need not import torch again: each is a fork of one that has.

For what a fresh process does with its environment and arguments. What a start imports needs a real start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """
import json, os, sys, traceback
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, file in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(asked["environment"])
        code = 0
        try:
            exec(compile(asked["program"], "<program>", "exec"), {"__name__": "__main__"})
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose end of the pipe closes."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_warm(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `python -c program` would do, with these variables beside those of this process."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"program": program, "environment": {**os.environ, **environment}}
        print(json.dumps({**asked, "out": str(out), "err": str(err)}), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(program, code, out.read_text(), err.read_text())
