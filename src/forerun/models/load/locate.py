"""Finds a model's files: by a known name, a .gguf file, a Hugging Face folder, or an id on the hub.

No torch here: the command line looks a model up before it imports anything heavy, so that a misspelt name is
answered at once.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from forerun.core.checks import refuse_special
from forerun.core.errors import DamagedFile, ModelNotFound, UnknownName
from forerun.models.load.catalog import HUB_SECONDS, find_known, known_models

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "merges.txt",
    "vocab.txt",
]
_MAGIC = b"GGUF"


def find_model(name: str) -> Path:
    """The file or folder behind a name; what is only on the hub is fetched."""
    known = find_known(name)
    if known is not None:
        return known
    path = Path(name).expanduser()
    refuse_special(path)
    if path.is_dir():
        return _checked_folder(path)
    if path.suffix == ".gguf" or path.is_file():
        return _checked_file(path)
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFound(f"there is no file or folder {name}; check the path")
    if _HUB_ID.fullmatch(name):
        return _checked_folder(_fetch(name))
    names = [model.name for model in known_models()]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownName(
        f"unknown model {name!r}; {hint}give a known name ({', '.join(names)}), a .gguf file, "
        "a Hugging Face folder, or a hub id such as org/name"
    )


def _checked_folder(folder: Path) -> Path:
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        inside = next(iter(sorted(folder.glob("*.gguf"))), None)
        step = f"give the file itself: {inside}" if inside else "give the folder that holds the model's files"
        raise ModelNotFound(f"{folder} has no config.json; {step}")
    return folder


def _checked_file(path: Path) -> Path:
    """A file that is there and begins as GGUF files do; the rest of it is checked when it is read."""
    try:
        with path.open("rb") as file:
            begins = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}; check the path") from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be opened ({error.strerror}); check the path") from None
    if not begins:
        raise DamagedFile(f"{path} is empty; pull it again")
    if begins != _MAGIC:
        raise DamagedFile(f"{path} is damaged: it does not begin with GGUF; pull it again")
    return path


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
        HfApi().model_info(name, timeout=HUB_SECONDS)  # one quick question, before anything that retries
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub library raises its own, httpx's and the system's
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelNotFound(
            f"{name!r} is no folder here and cannot be fetched from the hub ({reason}); "
            "check the name and the network, or give the path of a local folder or .gguf file"
        ) from None
