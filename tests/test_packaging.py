"""The wheel and the sdist are complete: they install without a compiler or the repository, and the commands work.

Slow: builds both with `python -m build`. Other packages are lent to the empty environments by path, since installing
torch again would take minutes and prove nothing about Forerun.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.request
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "src/forerun/"
NATIVE = "forerun/models/native/_native.so"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")]


def tracked() -> list[str]:
    """Every file of the repository, committed or not, that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def run(command: list[str | Path], **settings: object) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload]
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return str(ran.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, made from a copy of the repository."""
    if find_spec("build") is None or find_spec("setuptools") is None:
        pytest.skip("build or setuptools is not here")
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source], cwd=dist)
    return dist


def environment(folder: Path, package: Path, **more: str) -> tuple[Path, dict[str, str]]:
    """An empty environment with one package in it, and what its commands see: no compiler, no repository."""
    venv.create(folder, with_pip=True)
    without = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CC")
    seen = {name: value for name, value in os.environ.items() if name not in without}
    seen |= {"PATH": str(folder / "bin"), "CUDA_VISIBLE_DEVICES": "", **more}
    quiet = ["--quiet", "--disable-pip-version-check"]
    if sys.version_info < (3, 12):  # the setuptools that comes with pip would hide the lent one
        run([folder / "bin" / "python", "-m", "pip", "uninstall", "--yes", *quiet, "setuptools"], env=seen)
    lent = Path(run([folder / "bin" / "python", "-c", "import site; print(site.getsitepackages()[0])"]).strip())
    (lent / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = ["--no-deps", "--no-index", "--no-build-isolation", *quiet]
    run([folder / "bin" / "python", "-m", "pip", "install", *install, package], env=seen, cwd=folder)
    return folder / "bin" / "forerun", seen


@pytest.fixture(scope="module")
def wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    return environment(tmp_path_factory.mktemp("wheel"), next(built.glob("*.whl")))


def test_the_wheel_has_every_file_of_the_package_and_the_c_library(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    wanted = {name.removeprefix("src/") for name in tracked() if name.startswith(PACKAGE)}
    sources = {name for name in wanted if name.endswith((".c", ".h", ".cu", ".cuh"))}
    headers = {f"forerun/models/native/c/{name}" for name in ("forerun.h", "linear/linear.h")}  # Python reads them
    assert {NATIVE, "forerun/build/engine.py", "forerun/py.typed", *headers} <= names
    assert any(name.endswith(".safetensors") for name in names)
    assert any(name.startswith("forerun/server/page/") for name in names)
    assert sorted(wanted - sources - names) == []
    assert sorted(name for name in names if name.split("/")[0] not in {"forerun", wheel_info(names)}) == []


def wheel_info(names: set[str]) -> str:
    return next(name.split("/")[0] for name in names if ".dist-info/" in name)


def test_the_sdist_has_every_file_of_the_package(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {name for name in tracked() if name.startswith(PACKAGE)} | {"pyproject.toml", "setup.py", "LICENSE"}
    assert sorted(wanted - names) == []


def test_negative_control_a_missing_file_is_found(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    assert {"forerun/build/engine.py"} - {name for name in names if "/build/" not in name}


@pytest.mark.model
def test_the_wheel_works_without_the_repository(wheel: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    command, seen = wheel
    where = "import forerun; print(forerun.__file__)"
    installed = Path(run([command.parent / "python", "-c", where], env=seen, cwd=tmp_path).strip())
    assert command.parents[1] in installed.parents
    doctor = run([command, "doctor"], env=seen, cwd=tmp_path)
    assert re.search(r"ok +native kernels", doctor)
    written = run([command, "generate", "Hi.", "--max-tokens", "4", "--json", "-"], env=seen, cwd=tmp_path)
    assert json.loads(written)["token_ids"]


@pytest.mark.model
def test_the_wheel_serves(wheel: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    command, seen = wheel
    log = tmp_path / "log"
    with log.open("w") as told:
        server = subprocess.Popen(
            [command, "serve", "--port", "0"], env=seen, cwd=tmp_path, stdout=told, stderr=subprocess.STDOUT
        )
        try:
            address = _address(log, server)
            body = {"model": "smollm2", "prompt": "Hi", "max_tokens": 4, "temperature": 0}
            data = json.dumps(body).encode()
            asked = urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
            assert json.load(urllib.request.urlopen(asked, timeout=120))["usage"]["completion_tokens"] == 4
            assert b"<html" in urllib.request.urlopen(address, timeout=60).read().lower()
        finally:
            server.terminate()
            server.wait(60)


def _address(log: Path, server: subprocess.Popen[bytes]) -> str:
    """Where it says that it serves."""
    for _ in range(1200):
        said = log.read_text()
        if found := re.search(r" at (http\S+)\s", said):  # other lines say "at most"
            return found[1]
        assert server.poll() is None, said
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.model
def test_the_sdist_works_without_a_compiler(built: Path, tmp_path: Path) -> None:
    command, seen = environment(tmp_path / "sdist", next(built.glob("*.tar.gz")), CC="no-compiler-here")
    assert not list((tmp_path / "sdist").rglob("_native.so"))
    assert re.search(r"native kernels +absent", run([command, "doctor"], env=seen, cwd=tmp_path))
    written = run([command, "generate", "Hi.", "--max-tokens", "2", "--json", "-"], env=seen, cwd=tmp_path)
    assert json.loads(written)["token_ids"]
