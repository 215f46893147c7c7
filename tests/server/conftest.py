"""A server around the default model, on a free port, for all tests of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import uvicorn

from forerun import LLM
from forerun.async_llm import AsyncLLM
from forerun.params import EngineConfig
from forerun.server.app import create_app
from forerun.server.local_backend import LocalBackend
from forerun.server.run import uvicorn_options
from forerun.server.settings import ServerSettings


@dataclass
class Running:
    """A server and what it serves."""

    url: str
    llm: LLM
    app: object = None


def start(llm: LLM, settings: ServerSettings) -> tuple[uvicorn.Server, threading.Thread, str]:
    config = uvicorn.Config(
        lambda: create_app(LocalBackend(AsyncLLM(llm)), settings),
        factory=True,
        host="127.0.0.1",
        port=0,
        **{**uvicorn_options(settings), "timeout_graceful_shutdown": 2},
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.started, "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    return server, thread, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM.load("smollm2", config=EngineConfig(max_batch=4, max_length=1024))


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Running]:
    server, thread, url = start(llm, ServerSettings(("smollm2", "alias"), max_queue=8, max_body=200_000))
    yield Running(url, llm)
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def http(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
