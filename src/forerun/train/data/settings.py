"""The settings that a data folder was begun with: a run resumes with the same ones.

Texts are known by their numbers, which prompts and temperatures give them. Under other settings the same numbers mean
other texts, and those of another target would be taken for this one's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput
from forerun.train.options import DataOptions

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
