"""A server around the default model, on a free port, for all tests of this folder."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import uvicorn

from forerun import LLM
from forerun.api.llm import AsyncLLM
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.app import create_app
from forerun.server.backends.base import Backend
from forerun.server.backends.process import ProcessBackend
from forerun.server.backends.start import LOAD_LLM, EngineProcess, Loader
from forerun.server.backends.thread import LocalBackend
from forerun.server.run import uvicorn_options
from forerun.server.settings import ServerSettings

MODEL = {
    "model": "smollm2",
    "engine": {"max_batch": 4, "max_length": 1024, "kv_slots": 1 << 16},  # by memory, two engines would differ
    "drafting": {},
}
Started = tuple[uvicorn.Server, threading.Thread, str]


@dataclass
class Running:
    """A server, the same model here, and questions to the engine that serves."""

    url: str
    llm: LLM

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/stats", timeout=90).json()
        return found

    def metric(self, name: str) -> float:
        """One that has no labels beside the model's name."""
        lines = httpx.get(f"{self.url}/metrics", timeout=90).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"forerun:{name}{{"))


ENGINE = "forerun.server.backends"


def children_of(process: int, module: str = ENGINE) -> list[int]:
    """The processes of a module of ours that a process has started; those that have ended are left out."""
    words = ["ps", "-o", "pid=,args=", "--ppid", str(process)]
    lines = subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if module in line]


def is_there(process: int) -> bool:
    """Does it run? One that has ended and waits to be reaped does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1] not in ("", "Z")


def start(llm: LLM, settings: ServerSettings) -> Started:
    """A server whose engine is a thread of this process."""
    return start_with(lambda: LocalBackend(AsyncLLM(llm)), settings)


def start_process(loader: Loader, settings: ServerSettings, patience: float = 60.0) -> Started:
    """A server whose engine is a process of its own; its figures are waited for, however busy the machine is."""

    def backend() -> Backend:
        engine = EngineProcess(loader)
        facts = engine.wait_until_ready()
        made = ProcessBackend(engine, facts, facts.tokenizer.tokenizer())
        made.patience = patience
        return made

    return start_with(backend, settings)


def start_with(make: Callable[[], Backend], settings: ServerSettings) -> Started:
    config = uvicorn.Config(
        lambda: create_app(make(), settings),
        factory=True,
        host="127.0.0.1",
        port=0,
        **{**uvicorn_options(settings), "timeout_graceful_shutdown": 2},
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.started, "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    return server, thread, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def llm() -> LLM:
    return Loader(LOAD_LLM, MODEL)()


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Running]:
    """As `forerun serve` does by default."""
    settings = ServerSettings(("smollm2", "alias"), max_queue=8, max_body=200_000)
    server, thread, url = start_process(Loader(LOAD_LLM, MODEL), settings)
    yield Running(url, llm)
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def http(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def thinking(llm: LLM) -> Iterator[Running]:
    """The default model behind a template that opens thinking: it has no mark for it, so that each is many tokens."""
    own, former = llm.tokenizer, llm.tokenizer._template
    assert former is not None
    parts = own.parts()._replace(
        chat_template=former + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    )
    thinker = LLM(llm.engine, parts.tokenizer(), "smollm2")
    assert isinstance(thinker.tokenizer, Tokenizer)
    grammars, kept = llm.engine.grammars, llm.engine.grammars._tokenizer  # type: ignore[attr-defined]
    grammars._tokenizer = thinker.tokenizer  # type: ignore[attr-defined]
    vars(grammars).pop("_thinking", None)
    server, thread, url = start(thinker, ServerSettings(model_names=("smollm2",)))
    yield Running(url, thinker)
    server.should_exit = True
    thread.join(30)
    grammars._tokenizer = kept  # type: ignore[attr-defined]
    vars(grammars).pop("_thinking", None)
