"""Known models that are folders of files, as the hub has them: where they are kept, and what to fetch. No torch here.

They are looked for under FORERUN_MODELS, then in the cache; a folder may lie one level deeper, under a name of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forerun.core.errors import ModelNotFound

HUB_SECONDS = 10  # seconds until the hub counts as out of reach


@dataclass(frozen=True, slots=True)
class KnownFolder:
    """A model of the hub under a short name."""

    description: str
    licence: str
    hub: str  # its id
    size: int  # bytes
    files: tuple[str, ...]


FOLDERS = {
    "opus-en-fr": KnownFolder(
        description="opus-mt-en-fr, a Marian encoder-decoder: English to French",
        licence="see its card",
        hub="Helsinki-NLP/opus-mt-en-fr",
        size=303_750_000,
        files=("*.json", "*.spm", "pytorch_model.bin"),
    ),
}


def find_folder(name: str, cache: Path) -> Path | None:
    """Where a known folder is; None where it is not on this machine."""
    chosen = os.environ.get("FORERUN_MODELS")
    homes = [Path(chosen).expanduser() / name] if chosen else []
    for home in [*homes, cache / "models" / name]:
        configs = [home / "config.json", *sorted(home.glob("*/config.json"))]
        found = next((config.parent for config in configs if config.is_file()), None)
        if found is not None:
            return found
    return None


def fetch_folder(name: str, cache: Path) -> Path:
    """Fetch a known folder from the hub into the cache."""
    from huggingface_hub import HfApi, snapshot_download

    folder, home = FOLDERS[name], cache / "models" / name
    try:
        # one quick question, before anything that retries
        HfApi().model_info(folder.hub, timeout=HUB_SECONDS)
        snapshot_download(folder.hub, allow_patterns=list(folder.files), local_dir=home)
    except Exception as error:  # the hub library raises its own, httpx's and the system's
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelNotFound(
            f"model {name!r} cannot be fetched from the hub ({reason}); put the files of {folder.hub} into {home}"
        ) from None
    return home
