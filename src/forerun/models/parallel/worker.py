"""A rank other than 0: `python -m forerun.models.parallel.worker JSON`, started by forerun.models.parallel.launch.

It loads its part of the model, says on its output that it is ready, connects, and computes passes until its input is
closed, which also happens when the process that started it is gone, however that ended. An error is said and ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from threading import Thread
from typing import IO, Any

import torch

from forerun.core.errors import brief
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.parallel.decoder import ParallelFollower
from forerun.models.parallel.group import Group
from forerun.models.parallel.split import DTYPES, Part


def load(job: dict[str, Any]) -> ParallelFollower:
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(job["threads"])
    checkpoint = open_checkpoint(job["model"])
    config = DecoderConfig.from_hf(checkpoint.config)
    dtype = DTYPES[job["dtype"]]
    part = Part(job["rank"], job["size"])
    return ParallelFollower(config, checkpoint.weights, part, dtype=dtype, device=device)


def main() -> None:
    """Compute passes; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's affair
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        job = json.loads(sys.argv[1])
        follower = load(job)
        _say(said, "ready", "")
        follower.group = Group(Path(job["store"]), follower.part, job["backend"], follower.device)
        follower.serve()
    except BaseException as error:
        _say(said, "error", f"{type(error).__name__}: {brief(error)}")
    finally:
        os._exit(1)  # gloo's threads would abort an orderly end


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _say(to: IO[str], what: str, text: str) -> None:
    try:
        print(json.dumps({"what": what, "text": text}), file=to, flush=True)
    except OSError:
        os._exit(0)  # nobody listens any more


if __name__ == "__main__":
    main()
