"""A server whose model is split over processes, one of which dies: requests get an error, `/health` says which."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import cast

import httpx
import pytest

from forerun import LLM
from forerun.models.parallel.decoder import ParallelTarget
from forerun.models.parallel.launch import Workers
from forerun.server.backends.start import LOAD_LLM, Loader
from forerun.server.settings import ServerSettings
from tests.models.tiny_folder import make_tiny_folder
from tests.server.conftest import children_of, is_there, start, start_process


@pytest.mark.slow
def test_an_engine_whose_rank_has_ended_is_started_again(tmp_path: Path) -> None:
    given = {"model": make_tiny_folder(tmp_path), "engine": {"tensor_parallel_size": 2}}
    given["drafting"] = {"drafter": "ngram"}
    others = {*children_of(os.getpid())}
    server, thread, url = start_process(Loader(LOAD_LLM, given), ServerSettings(("tiny",), restart=True))
    (engine,) = {*children_of(os.getpid())} - others
    (rank,) = children_of(engine, "forerun.models.parallel.launch")
    body = {"prompt": "abc abc abc", "max_tokens": 8, "temperature": 0}
    before = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["choices"]
    os.kill(rank, signal.SIGKILL)
    until, said = time.monotonic() + 60, ""
    while "rank 1 of 2 has ended (status -9)" not in said and time.monotonic() < until:
        said += httpx.get(f"{url}/health", timeout=60).text
    assert "rank 1 of 2 has ended (status -9)" in said
    until = time.monotonic() + 60
    while httpx.get(f"{url}/health", timeout=60).status_code != 200 and time.monotonic() < until:
        time.sleep(0.05)
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["choices"] == before
    assert not is_there(engine)
    (another,) = {*children_of(os.getpid())} - others
    (rank,) = children_of(another, "forerun.models.parallel.launch")
    server.should_exit = True
    thread.join(20)
    until = time.monotonic() + 60
    while is_there(rank) and time.monotonic() < until:
        time.sleep(0.05)
    assert [is_there(another), is_there(rank)] == [False, False], "nothing is left behind"


@pytest.mark.slow
def test_health_says_which_process_has_ended(tmp_path: Path) -> None:
    with LLM(make_tiny_folder(tmp_path), tensor_parallel_size=2, drafter="ngram") as llm:
        assert isinstance(llm.engine.target, ParallelTarget)
        workers = cast(Workers, llm.engine.target._others)
        server, thread, url = start(llm, ServerSettings(("tiny",)))
        body = {"prompt": "abc abc abc", "max_tokens": 8, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        os.kill(workers.pids[0], signal.SIGKILL)
        until = time.monotonic() + 60
        while (health := httpx.get(f"{url}/health", timeout=60)).status_code == 200 and time.monotonic() < until:
            time.sleep(0.05)
        assert health.status_code == 503
        assert "rank 1 of 2 has ended (status -9)" in health.json()["reason"]
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 503
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 500
        assert "rank 1 of 2" in answer.json()["error"]["message"]
        server.should_exit = True
        thread.join(10)
