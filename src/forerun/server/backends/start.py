"""Starts an engine's process, waits until its model is loaded, and ends it. No torch here.

A `Loader` says how the process makes its model: a function by name, with arguments that JSON can hold.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ForerunError
from forerun.server.backends.base import EngineError
from forerun.server.backends.wire import Channel, Facts, unpack_error

if TYPE_CHECKING:
    from forerun.api.llm import LLM


log = logging.getLogger(__name__)
GRACE = 2.0  # seconds that the system may take to end a process that was killed


class EngineLost(ForerunError):
    """The engine's process has ended."""


class EngineProcess:
    """One process and our end of the channel to it. To be started by a thread that stays as long as it does."""

    def __init__(self, loader: Loader, trace: Path | None = None) -> None:
        self.loader, self.trace = loader, trace
        self.process, self.channel = start_child("forerun.server.backends")
        self.channel.send(
            {
                "function": loader.function,
                "arguments": dict(loader.arguments),
                "trace": None if trace is None else str(trace),
                "level": logging.getLogger().getEffectiveLevel(),
            }
        )

    def wait_until_ready(self) -> Facts:
        """Until the model is loaded; raises where it cannot be, and ends the process."""
        try:
            what, packed = next(self.channel.receive(), ("gone", ()))
            if what == "ready":
                return Facts.unpacked(packed)
            if what == "ended":
                raise _said(unpack_error(packed))
            self.process.wait()
            raise EngineLost(f"the engine could not be loaded: {self.how_it_ended()}")
        except BaseException:
            self.kill()
            raise

    def how_it_ended(self) -> str:
        """Its status in words; it may not have been reaped yet."""
        try:
            status = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its process has closed the connection"
        if status < 0:
            return f"its process was ended by {_name_of(-status)}"
        return f"its process has ended with status {status}"

    def kill(self) -> None:
        """End it, whatever it is doing; a second call changes nothing."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:  # stuck in a driver
                log.error("the engine's process %d was killed and does not end", self.process.pid)


def start_child(module: str) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start `python -m module FD`, and our end of the channel to it; there `take_channel` takes the other."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_paths())},
            start_new_session=True,  # Ctrl-C in a terminal is for the front
        )
    return process, Channel(ours)


def _paths() -> list[str]:
    """It imports what this process would, and from there.

    By -P nothing from the folder it is started in, unless this process does that, as `python -c` does.
    """
    ours = str(Path(__file__).parents[3])
    return [*([] if ours in sys.path else [ours]), *(each or str(Path.cwd()) for each in sys.path)]


def _name_of(number: int) -> str:
    """Of a signal; not all have a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _said(error: Exception) -> Exception:
    """The front's message for an error of loading; the traceback of an unexpected one is in the engine's log."""
    if isinstance(error, EngineError):
        return EngineLost(f"the engine could not be loaded: {error.kind}: {error}")
    return error


LOAD_LLM = "forerun.server.backends.start:load_llm"


@dataclass(frozen=True, slots=True)
class Loader:
    """Called where the engine is to be: here, or in a process that was started for it."""

    function: str  # module:name; what it returns is an LLM
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> LLM:
        module, _, name = self.function.partition(":")
        llm: LLM = getattr(import_module(module), name)(**self.arguments)
        return llm


def load_llm(model: str, engine: Mapping[str, Any], drafting: Mapping[str, Any], heads: str | None = None) -> LLM:
    """A model by name, as `forerun serve` has it; `heads` = drafting with the version that folder is at now."""
    from forerun.api.llm import LLM
    from forerun.build.load import load_engine
    from forerun.core.params import EngineConfig
    from forerun.heads import HeadVersions

    given = dict(drafting)
    if heads is not None:
        given["draft_model"] = str(HeadVersions(Path(heads)).must_have_current())
    return LLM(*load_engine(model, {"config": EngineConfig.from_dict(engine), **given}), model)
