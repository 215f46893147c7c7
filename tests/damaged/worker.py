"""Damages one format again and again and says what came of it: one JSON line per case.

    python -m tests.damaged.worker MATERIAL FIRST COUNT FORMAT...

It runs in a process of its own with a limit on its memory, so that a crash or a huge allocation is a wrong outcome of
one case, and not the end of the tests.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

from forerun.core.errors import ForerunError
from tests.damaged.formats import FORMATS, Format

MEMORY = 1 << 30  # bytes beyond what the imports and one undamaged case take
PATIENCE = 20  # seconds for one case


def main(material: Path, first: int, count: int, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    expected = {
        (name, variant): attempt(FORMATS[name], material, variant, None)["out"]
        for name in names
        for variant in FORMATS[name].variants
    }
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"over {PATIENCE} s")))
    for name in names:
        form = FORMATS[name]
        for seed in range(first, first + count):
            variant = form.variants[seed % len(form.variants)]
            case = {"format": name, "seed": seed, "variant": variant}
            # unless the next line follows
            print(json.dumps({**case, "wrong": "the process died"}), flush=True)
            signal.alarm(PATIENCE)
            found = attempt(form, material, variant, Random(f"{name}:{seed}"))
            signal.alarm(0)
            if form.exact and "out" in found and found["out"] != expected[name, variant]:
                found = {"wrong": f"{found['out']} instead of {expected[name, variant]}"}
            print(json.dumps({**case, **found}), flush=True)


def attempt(form: Format, material: Path, variant: str, dice: Random | None) -> dict[str, Any]:
    """One case: `out` = what came of the files, `refused` = the error meant for users, `wrong` = anything else."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "case"
        shutil.copytree(material / variant, folder)
        if dice is None:
            return {"out": form.use(folder, variant)}
        form.damage(folder, dice)
        try:
            return {"out": form.use(folder, variant)}
        except ForerunError as error:
            words = str(error)
            fine = bool(words) and "\n" not in words and len(words) < 1000
            return {"refused" if fine else "wrong": f"{type(error).__name__}: {words}"}
        except BaseException as error:
            return {"wrong": f"{type(error).__name__}: {error} at {_place(error)}"}


def _place(error: BaseException) -> str:
    """The innermost line of ours."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "forerun" in code.co_filename or "tests" in code.co_filename:
            found = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


if __name__ == "__main__":
    os.environ["FORERUN_CACHE"] = tempfile.mkdtemp()
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
