"""Engines that are slow, fail or hang, for tests of the process that serves them."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.params import EngineConfig

if TYPE_CHECKING:  # torch is imported by those that load a model, not by those that only wait or end
    from forerun import LLM
    from forerun.core.request import Request


def _load(max_batch: int = 2) -> LLM:
    from forerun import LLM

    return LLM.load("smollm2", config=EngineConfig(max_batch=max_batch, max_length=1024))


def load_slow(seconds: float) -> LLM:
    """Every round takes so long."""
    llm = _load()
    real = llm.engine.step

    def step() -> Any:
        time.sleep(seconds)
        return real()

    llm.engine.step = step  # type: ignore[method-assign]
    return llm


def load_slow_grammar(seconds: float) -> LLM:
    """Compiling any grammar takes so long."""
    from forerun.verify.grammar.compiled import Grammars

    real = Grammars.compile

    def slow(self: Grammars, request: Request) -> Request:
        if request.params.structure is not None:
            time.sleep(seconds)
        return real(self, request)

    Grammars.compile = slow  # type: ignore[method-assign]
    return _load()


def load_failing(once: str) -> LLM:
    """Its sixth round ends the engine, unless the file is there: it is left by the one that failed."""
    llm = _load()
    real, file = llm.engine.step, Path(once)

    def step() -> Any:
        if llm.engine.stats.rounds >= 5 and not file.exists():
            file.touch()
            raise SystemError("the engine is gone")
        return real()

    llm.engine.step = step  # type: ignore[method-assign]
    return llm


def load_hanging(once: str, keeps_interpreter: bool = False) -> LLM:
    """Its sixth round never ends, in the same way; it may keep its interpreter, so that no other thread runs."""
    llm = _load()
    real, file = llm.engine.step, Path(once)

    def step() -> Any:
        if llm.engine.stats.rounds >= 5 and not file.exists():
            file.touch()
            if keeps_interpreter:
                sys.setswitchinterval(1e9)
                while True:
                    pass
            threading.Event().wait()
        return real()

    llm.engine.step = step  # type: ignore[method-assign]
    return llm


def load_for_ever(started: str) -> LLM:
    """Never ends."""
    Path(started).write_text(str(os.getpid()))
    threading.Event().wait()
    raise AssertionError


def load_crash() -> LLM:
    """The process ends by itself."""
    os._exit(7)
