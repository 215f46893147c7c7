"""A command line in a real terminal: a pseudo-terminal whose other end is a forked copy of this process.

Forking spares the seconds that importing torch takes, so that a test in a terminal costs a fraction of one.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from forerun.api.llm import LLM
from forerun.cli import loading
from forerun.cli.app import main
from forerun.cli.flags import Settings
from tests.cli.conftest import tiny_llm

CTRL_C, CTRL_D, ENTER, UP = "\x03", "\x04", "\r", "\x1b[A"
_PATIENCE = 60.0  # seconds until a test gives up: much more than is ever needed
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|\r(?!\n)")


def paste(text: str) -> str:
    """What a terminal sends for a paste."""
    return f"\x1b[200~{text}\x1b[201~"


class Terminal:
    """A forked `forerun` that believes to be talking to a person."""

    def __init__(
        self, *arguments: str, prompts: Path, load: Callable[[Settings], LLM] = tiny_llm, into: Path | None = None,
        columns: int = 120, **environment: str,
    ) -> None:  # fmt: skip
        self.raw, self._seen, self._prompts = "", 0, prompts
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            if into is not None:  # as `forerun ... > file` does
                os.dup2(os.open(into, os.O_WRONLY | os.O_CREAT), 1)
            _child(arguments, prompts, load, columns, environment)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, words: str) -> None:
        """Read until some words appear that were not there at the last call."""
        assert self.shows(words, _PATIENCE), f"{words!r} did not come; the terminal shows {self.text!r}"

    def shows(self, words: str, within: float) -> bool:
        """Do some words, new since the last that came, appear within some seconds?"""
        ends = time.monotonic() + within
        while words not in self.text[self._seen :]:
            if time.monotonic() > ends or not self._read(0.1):
                return False
        self._seen = self.text.index(words, self._seen) + len(words)
        return True

    def end(self, presses: str = "") -> int:
        """Read until the command ends, and press a key every few seconds; its exit code."""
        ends, again = time.monotonic() + _PATIENCE, 0.0
        while self._read(0.1):
            if presses and time.monotonic() > again:
                self.type(presses)
                again = time.monotonic() + 3.0
            if time.monotonic() > ends:
                os.kill(self._pid, signal.SIGKILL)
                raise AssertionError(f"it does not end; the terminal shows {self.text!r}")
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    @property
    def text(self) -> str:
        """What was shown, without colours and cursor movements."""
        return _CONTROL.sub("", self.raw).replace("\r\n", "\n")

    @property
    def messages(self) -> list[str]:
        """The last message of every conversation that reached the model."""
        return [prompt[-1]["content"] for prompt in self.prompts]

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        return [json.loads(line) for line in self._prompts.read_text().splitlines()]

    def _read(self, patience: float) -> bool:
        """Take what has come; False at the end."""
        if not select.select([self._fd], [], [], patience)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # how Linux says that the other end is gone
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)


def _child(
    arguments: tuple[str, ...],
    prompts: Path,
    load: Callable[[Settings], LLM],
    columns: int,
    environment: dict[str, str],
) -> NoReturn:
    code = 99
    try:
        termios.tcsetwinsize(0, (40, columns))
        for name in ("NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "200", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
        sys.argv = ["forerun", *arguments]
        prompts.write_text("")
        loading.load_llm = lambda settings: _with_spy(load(settings), prompts)
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _with_spy(llm: LLM, prompts: Path) -> LLM:
    stream = llm.stream

    def spy(prompt: Any, *rest: Any, **more: Any) -> Iterator[Any]:
        with prompts.open("a") as file:
            file.write(json.dumps([dict(turn) for turn in prompt]) + "\n")
        return stream(prompt, *rest, **more)

    llm.stream = spy  # type: ignore[method-assign]
    return llm


def _stream(fd: int, mode: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(fd, mode, closefd=False), encoding="utf-8", line_buffering=True)
