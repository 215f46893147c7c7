"""Data folders, checked before torch or any model is loaded: are there texts, and of which target and settings?

Texts are known by their numbers, which prompts and temperatures give them. Under other settings the same numbers mean
other texts, so a run resumes with the settings that its folder was begun with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput, ModelNotFound
from forerun.train.options import DataOptions, TrainOptions


def shards_of(data: str | Path) -> list[Path]:
    found = list[Path]()
    for folder in str(data).split(","):
        files = sorted(Path(folder).glob("shard-*.safetensors"))
        if not files:
            raise ModelNotFound(f"{folder} holds no shards; make some with `forerun data make --out {folder}`")
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
    total = options.steps * options.batch_tokens
    shown = f"{total / 1e6:.1f} million" if total >= 1_000_000 else f"{total}"
    return f"{shown} tokens ({options.steps} steps of {options.batch_tokens}; less is read several times)"


_FREE = ("out", "batch", "shard_tokens", "device")  # may change between resumptions


def keep_settings(folder: Path, options: DataOptions) -> None:
    """Write them into the folder; raises where it was begun with others."""
    ours = json.loads(json.dumps({name: v for name, v in asdict(options).items() if name not in _FREE}))
    theirs = _kept(folder)
    for name, value in ours.items():
        if name in theirs and theirs[name] != value:
            raise InvalidInput(
                f"{folder} was begun with {name}={theirs[name]!r:.80}, not {value!r:.80}; resume with the same "
                "settings, or give another --out"
            )
    (folder / "settings.json").write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")


def other_targets(data: str, target: str) -> str | None:
    """What to say of data folders that another target wrote, as far as they tell; None = nothing."""
    wrote = {folder: str(_kept(Path(folder)).get("target", target)) for folder in data.split(",")}
    found = [f"{folder} ({name})" for folder, name in wrote.items() if Path(name).name != Path(target).name]
    if not found:
        return None
    own, others = Path(target).name, ", ".join(found)
    return f"Warning: written by another model than {own}, whose tokens are to be drafted: {others}"


def _kept(folder: Path) -> Mapping[str, Any]:
    """Of the run that began the folder; none where it is new, or too old to say."""
    for file, key in ((folder / "settings.json", None), (folder / "provenance.json", "arguments")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            found = found if key is None else found[key]
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidInput(f"{file} is damaged; remove it to go on in {folder}") from None
        if isinstance(found, dict):
            return found
    return {}
