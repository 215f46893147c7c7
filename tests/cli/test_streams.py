"""What a shell does to a command before it runs: Ctrl-C while modules are imported, streams that are closed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# an interrupt while `forerun.cli.app` is imported; `numpy` fails instead, as it does when it is interrupted itself
INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "forerun.cli.app":
            try:
                if {interrupted}:
                    os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if not {lost}:
                    raise
            if {lost}:
                raise ImportError("cannot load module more than once per process")
sys.meta_path.insert(0, Finder())
from forerun.__main__ import run
sys.argv = ["forerun", "drafters"]
run()
"""


def _interrupted(*, interrupted: bool, lost: bool) -> subprocess.CompletedProcess[str]:
    program = INTERRUPTED.format(interrupted=interrupted, lost=lost)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupt_while_modules_are_imported_shows_no_traceback(lost: bool) -> None:
    ended = _interrupted(interrupted=True, lost=lost)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_an_import_that_fails_without_an_interrupt_is_told() -> None:
    ended = _interrupted(interrupted=False, lost=True)
    assert ended.returncode == 1
    assert "cannot load module more than once" in ended.stderr


def test_the_script_runs_what_catches_interrupts() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"forerun": "forerun.__main__:run"}


def _closed(number: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The command behind `<&-` or `>&-` of a shell."""
    return subprocess.run(
        [sys.executable, "-m", "forerun", *words], capture_output=True, text=True, check=False, timeout=120,
        preexec_fn=lambda: os.close(number),
    )  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="closes a stream as a shell does")
def test_a_closed_standard_input_is_an_empty_one() -> None:
    ended = _closed(0, "generate")
    assert ended.returncode == 2
    assert ended.stderr.startswith("forerun: the prompt is empty")
    assert ended.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="closes a stream as a shell does")
def test_a_closed_standard_output_takes_everything() -> None:
    ended = _closed(1, "generate", "x", "--max-tokens", "0")  # refused by what is behind the streams
    assert ended.returncode == 2
    assert ended.stderr.startswith("forerun: --max-tokens 0")
    ended = _closed(1, "drafters")
    assert (ended.returncode, ended.stderr) == (0, "")
