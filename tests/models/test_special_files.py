"""What is no file is refused at once: whoever opens a FIFO waits until somebody writes into it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.heads import BOX
from tests.models.tiny_gguf import write_tiny

LOAD = """
import sys
from forerun import LLM, ForerunError
try:
    LLM.load(sys.argv[1], draft_model=sys.argv[2] if len(sys.argv) > 2 else None)
except ForerunError as error:
    print(error)
"""


def told(*given: str) -> str:
    """The error of a load in a process of its own, which ends although the file never does."""
    command = [sys.executable, "-c", LOAD, *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        yield tmp_path / "socket"


@pytest.mark.slow
def test_models_that_are_no_files(tmp_path: Path, bound: Path) -> None:
    named, bare = tmp_path / "m.gguf", tmp_path / "fifo"
    for path in (named, bare):
        os.mkfifo(path)
    for path, kind in ((named, "a FIFO"), (bare, "a FIFO"), (bound, "a socket"), (Path("/dev/zero"), "a device")):
        assert told(str(path)) == (
            f"{path} is {kind}, and models are read from files; give a file or a folder of files\n"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_folders_with_a_file_that_is_none(name: str, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(BOX / "smollm2-135m-eagle3", head)
    (head / name).unlink()
    os.mkfifo(head / name)
    expected = f"{head / name} is a FIFO, and models are read from files"
    assert told(str(head)).startswith(expected)
    assert told(str(write_tiny(tmp_path / "m.gguf")), str(head)).startswith(expected)
