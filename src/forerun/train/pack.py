"""Collect what another machine needs to use trained heads or to train them further: `python -m forerun.train.pack`.

    python -m forerun.train.pack --out packed runs/dspark runs/eagle1

Of a run: the head, its provenance and log, and its checkpoint with weights in bfloat16 and without the optimiser's
moments. These reach back twenty steps; a run that is resumed without them gathers them anew, while its step and its
learning rate go on. So a checkpoint takes a sixth of its size.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from forerun.core.errors import ForerunError, ModelNotFound
from forerun.models.load.weights import write_tensors

log = logging.getLogger("forerun.train")
_CHECKPOINT = "checkpoint"


def pack_run(run: Path, out: Path, *, state: bool = True) -> int:
    """One run into a folder of its name, with its checkpoint or without; returns its size in bytes."""
    if not any((run / name).is_file() for name in ("config.json", f"{_CHECKPOINT}/run.json")):
        raise ModelNotFound(f"{run} holds neither a head nor a checkpoint; name the folder of a run")
    folder = out / run.name
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns(f"{_CHECKPOINT}*"), dirs_exist_ok=True)
    if state and (kept := run / _CHECKPOINT).is_dir():
        narrow = folder / _CHECKPOINT
        narrow.mkdir(exist_ok=True)
        weights = load_file(kept / "weights.safetensors")
        write_tensors(narrow / "weights.safetensors", {n: w.to(torch.bfloat16) for n, w in weights.items()})
        write_tensors(narrow / "optimizer.safetensors", {})
        shutil.copy(kept / "run.json", narrow / "run.json")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(words: Sequence[str] | None = None) -> int:
    """Pack the runs named."""
    parser = argparse.ArgumentParser(
        prog="python -m forerun.train.pack", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of training runs")
    parser.add_argument("--out", required=True, type=Path, help="where copies of them go")
    parser.add_argument("--heads-only", action="store_true", help="no checkpoints: nothing can be continued")
    flags = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        for run in flags.runs:
            size = pack_run(run, flags.out, state=not flags.heads_only)
            log.info("%s: %.1f MB", run.name, size / 1e6)
    except ForerunError as error:
        log.error("%s", " ".join(str(error).split()))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
