"""What earlier starts have left on disk: the files of the kernels that some work launches, and Triton's own key.

To ask for kernels one by one takes seconds, even where all are compiled: a note of what was found says that none is
missing. What a note is found by must tell all that kernels follow from; where it does not, some are compiled when they
are first launched, and no number changes. Triton hashes all of itself (400 MB) once a process: the hash is kept for as
long as none of its files changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[3]
_SOURCES = "models", "drafters", "verify", "core"  # of ours, which kernels and what launches them are in
_TRITON = "compiler", "backends", "language", "runtime", "_C"  # of Triton's, which its key is made of
_NEEDED = ".json", ".cubin"  # files of a kernel that a launch reads


class KernelNote:
    """Which files hold the kernels that some work launches."""

    def __init__(self, what: object) -> None:
        """`what` the work does, on which shapes; and for which device is known here."""
        target = import_module("triton.runtime.driver").driver.active.get_current_target()
        facts = repr((what, target, _device(), _contents(), _stamp(), import_module("torch").__version__))
        self.file = _folder() / f"{sha256(facts.encode()).hexdigest()[:32]}.json"

    def holds(self) -> bool:
        """Are there such files, and all of them?"""
        try:
            files = json.loads(self.file.read_text())
            return bool(files) and all(map(os.path.exists, files))
        except (OSError, ValueError, TypeError):
            return False

    def write(self, kernels: Iterable[Any]) -> None:
        """Of kernels as Triton compiled them; None is one that could not be, and nothing is noted."""
        found = list(kernels)
        if all(found):
            files = {file for one in found for name, file in one.metadata_group.items() if name.endswith(_NEEDED)}
            _keep(self.file, json.dumps(sorted(files)))


@lru_cache(maxsize=1)
def triton_key() -> str:
    """Triton's key, which from now on it takes from here."""
    cache = import_module("triton.runtime.cache")
    file, key = _folder() / f"triton-{_stamp()}", ""
    with suppress(OSError, ValueError):
        key = file.read_text()
    if not key.startswith(cache.__version__):
        key = str(cache.triton_key())
        _keep(file, key)
    use_triton_key(key)
    return key


def use_triton_key(key: str) -> None:
    cache: Any = import_module("triton.runtime.cache")
    cache.triton_key = lru_cache(lambda: key)


def _folder() -> Path:
    from forerun.models.load.catalog import cache_folder

    return cache_folder() / "kernels"


def _keep(file: Path, text: str) -> None:
    with suppress(OSError):  # costs time, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(text)
        partial.replace(file)


def _device() -> tuple[str, int]:
    """Its name, and how many multiprocessors it has: by their number kernels share work out."""
    cuda = import_module("torch").cuda
    if not cuda.is_available():
        return "", 0
    found = cuda.get_device_properties(cuda.current_device())
    return found.name, found.multi_processor_count


@lru_cache(maxsize=1)
def _stamp() -> str:
    """Version, sizes and times of Triton's files."""
    triton = import_module("triton")
    root = Path(str(triton.__file__)).parent
    files = sorted(file for part in _TRITON for file in (root / part).rglob("*") if file.suffix in (".py", ".so"))
    found = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return sha256(repr((triton.__version__, found)).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _contents() -> str:
    """A hash of our own sources."""
    found = sha256()
    for part in _SOURCES:
        for file in sorted((_PACKAGE / part).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
