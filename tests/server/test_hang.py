"""An engine that hangs: its requests end with an error, `/health` says so, and where asked it starts anew.

On a thread of the server it can only be left behind, and the whole process is replaced; a process of its own is killed.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from forerun import LLM, SamplingParams
from forerun.api.llm import AsyncLLM
from forerun.core.types import Request
from forerun.server.backends.thread import LocalBackend
from tests.readme.pages import ROOT
from tests.server.conftest import children_of, is_there
from tests.server.test_robust import stream


@contextmanager
def hanging(front: str, how: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str], str]]:
    command = [sys.executable, "-m", "tests.server.hanging_server", front, how, str(folder / "hung")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        try:
            yield process, process.stderr, started(process.stderr, "first: True")
        finally:
            process.kill()


def started(said: IO[str], which: str) -> str:
    """The address of a server, once it says that it serves."""
    line = next(line for line in said if line.startswith("serving"))
    assert which in line
    return line.split()[2]


@pytest.mark.slow
@pytest.mark.parametrize("front", ["thread", "process"])
def test_requests_end_with_an_error_and_sigterm_still_ends_it(front: str, tmp_path: Path) -> None:
    with hanging(front, "stays", tmp_path) as (process, said, url):
        engines = children_of(process.pid)
        assert len(engines) == (front == "process")
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        text, reason, error = stream(url, "Once", max_tokens=100)
        assert text
        assert (reason, error and error["type"]) == (None, "server_error")
        assert error is not None
        assert "no progress" in error["message"]
        health = httpx.get(f"{url}/health", timeout=60)
        assert (health.status_code, "no progress" in health.text) == (503, True)
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 503
        again = stream(url, "Once", max_tokens=100)[2]
        assert again is not None, "nobody waits for an engine that hangs"
        assert not any(map(is_there, engines)), "it was killed"
        process.send_signal(signal.SIGTERM)
        rest = said.read()  # until it has ended
        assert process.wait(20) == 0
        assert rest.count("abandoned") == (front == "thread"), "said once, and waited for once"


def healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:  # a connection that the old process had taken ends with it
        return False


@pytest.mark.slow
@pytest.mark.parametrize("front", ["thread", "process"])
def test_it_starts_anew_on_the_same_socket(front: str, llm: LLM, tmp_path: Path) -> None:
    with hanging(front, "restart", tmp_path) as (process, said, url):
        engines = children_of(process.pid)
        assert stream(url, "Once", max_tokens=100)[2] is not None
        with httpx.Client(base_url=url, timeout=60) as client:
            deadline = time.monotonic() + 60
            while not healthy(client):  # a client that comes meanwhile waits
                assert time.monotonic() < deadline
                time.sleep(0.1)
        if front == "thread":
            assert started(said, f"in {process.pid}, first: False") == url
        else:
            assert not any(map(is_there, engines))
            assert len(children_of(process.pid)) == 1, "a new one"
        wanted = llm.generate("Once", SamplingParams(max_tokens=20, ignore_eos=True)).text
        assert stream(url, "Once", max_tokens=20) == (wanted, "length", None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_an_engine_without_work_does_not_hang(llm: LLM) -> None:
    """However long it was idle, and although nobody looked meanwhile: work that came just now is no hang."""

    async def look() -> list[bool]:
        served = AsyncLLM(llm)
        backend = LocalBackend(served)
        try:
            found = [backend.looks_hung(0.05)]
            await asyncio.sleep(0.2)
            llm.engine.enqueue(llm.engine.prepare(Request((1, 2, 3))))  # nobody makes rounds for it
            found.append(backend.looks_hung(0.05))
            await asyncio.sleep(0.2)
            found.append(backend.looks_hung(0.05))
            return found
        finally:
            llm.engine.abort(llm.engine.waiting[0].id)
            await served.close()

    assert asyncio.run(look()) == [False, False, True], "the last: nothing moved for longer than the patience"
