"""A checkpoint by name: a known model, a .gguf file, a Hugging Face folder, or an id on the hub.

Opening is cheap: configuration and tensor names are read, weights and tokenizer are loaded when asked for.
Nothing is ever unpickled.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import ModelNotFound, UnknownName
from forerun.models.load.catalog import cache_folder, find_known, known_models
from forerun.models.load.gguf import GgufFile
from forerun.models.load.gguf_families import config_of, origins_of
from forerun.models.load.metadata import Metadata
from forerun.models.load.tokenizer import Tokenizer, read_json, tokenizer_from_folder, tokenizer_from_gguf
from forerun.models.load.weights import GgufWeights, SafetensorsWeights, Weights

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
]
_HUB_PATIENCE = 10  # seconds until the hub counts as out of reach


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: how the model is built, its weights, and its tokenizer."""

    name: str  # what the user asked for
    path: Path
    config: dict[str, Any]  # Hugging Face style
    weights: Weights
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False, compare=False)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built when it is first asked for."""
        return self.load_tokenizer()


def open_checkpoint(name: str) -> Checkpoint:
    """Open a checkpoint by known name, path or hub id."""
    known = find_known(name)
    if known is not None:
        return _open_gguf(name, known)
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(name, path)
    if path.suffix == ".gguf" or path.is_file():
        return _open_gguf(name, path)
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFound(f"there is no file or folder {name}; check the path")
    if _HUB_ID.fullmatch(name):
        return _open_folder(name, _fetch(name))
    names = [model.name for model in known_models()]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownName(
        f"unknown model {name!r}; {hint}give a known name ({', '.join(names)}), a .gguf file, "
        "a Hugging Face folder, or a hub id such as org/name"
    )


def _open_gguf(name: str, path: Path) -> Checkpoint:
    file = GgufFile(path)
    config = config_of(file)
    weights = GgufWeights(file, origins_of(file, config))
    metadata = Metadata.of(file)
    return Checkpoint(
        name, path, config, weights, cache(lambda: tokenizer_from_gguf(metadata, cache_folder()))
    )


def _open_folder(name: str, folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        inside = next(iter(sorted(folder.glob("*.gguf"))), None)
        step = f"give the file itself: {inside}" if inside else "give the folder that holds the model's files"
        raise ModelNotFound(f"{folder} has no config.json; {step}")
    config = read_json(folder / "config.json")
    weights = SafetensorsWeights(folder)
    return Checkpoint(name, folder, config, weights, cache(lambda: tokenizer_from_folder(folder, config)))


def _fetch(name: str) -> Path:
    """A hub repository's safetensors, configuration and tokenizer; what is cached is used without asking."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        kept = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if (kept / "config.json").is_file() and any(kept.glob("*.safetensors")):
            return kept
    except Exception:  # not cached: ask the hub
        pass
    try:
        HfApi().model_info(name, timeout=_HUB_PATIENCE)  # one quick question, before anything that retries
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub library raises its own, httpx's and the system's
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelNotFound(
            f"{name!r} is no folder here and cannot be fetched from the hub ({reason}); "
            "check the name and the network, or give the path of a local folder or .gguf file"
        ) from None
