"""Check the data folders of a run before torch or any model is loaded."""

from __future__ import annotations

from pathlib import Path

from forerun.core.errors import ModelNotFound
from forerun.train.options import TrainOptions


def shards_of(data: str | Path) -> list[Path]:
    """The shards of one data folder, or of several with commas between, in order."""
    found = list[Path]()
    for folder in str(data).split(","):
        files = sorted(Path(folder).glob("shard-*.safetensors"))
        if not files:
            raise ModelNotFound(
                f"{folder} holds no shards; make some with `forerun data make --out {folder}`"
            )
        found += files
    return found


def require_texts(options: TrainOptions) -> None:
    """Raise where a run's data is missing, with what it wants."""
    for folder in options.data.split(","):
        if not any(Path(folder).glob("shard-*.safetensors")):
            there = "holds no texts" if Path(folder).is_dir() else "is not there"
            raise ModelNotFound(
                f"the data folder {folder!r} {there}; this run wants {wanted_tokens(options)}; make them "
                f"first with `forerun data make --target {options.target} --out {folder}`"
            )
    if options.measure_on:
        shards_of(options.measure_on)


def require_recordings(folder: str | Path) -> list[Path]:
    """The files of a server's recorded texts; raises where there are none."""
    files = sorted(Path(folder).glob("traffic-*.jsonl"))
    if not files:
        raise ModelNotFound(
            f"{folder} holds no recorded texts; start the server with `--record {folder}` and send "
            'requests with "record": true'
        )
    return files


def wanted_tokens(options: TrainOptions) -> str:
    """How much text a run reads."""
    total = options.steps * options.batch_tokens
    shown = f"{total / 1e6:.1f} million" if total >= 1_000_000 else f"{total}"
    return f"{shown} tokens ({options.steps} steps of {options.batch_tokens}; less is read several times)"
