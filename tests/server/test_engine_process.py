"""Two processes, one server: either may die, be slow to load or be told to end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.core.errors import UnknownName
from forerun.models.parallel.launch import Worker
from forerun.server.backends.process import ProcessBackend
from forerun.server.backends.start import LOAD_LLM, EngineLost, EngineProcess, Loader
from forerun.server.settings import ServerSettings
from tests.readme.pages import ROOT
from tests.server.conftest import MODEL, Running, children_of, is_there, start_process
from tests.server.test_connections import wait_for
from tests.server.test_robust import started, stream

FAULTY = "tests.server.faulty_engines"


@contextmanager
def serving(loader: Loader, **settings: Any) -> Iterator[tuple[str, int]]:
    """A server in this process, its address and its engine's process, which has ended afterwards."""
    others = {*children_of(os.getpid())}
    server, thread, url = start_process(loader, ServerSettings(("m",), **settings), patience=1.0)
    (engine,) = {*children_of(os.getpid())} - others
    try:
        yield url, engine
    finally:
        server.should_exit = True
        thread.join(20)
        assert not is_there(engine)


def is_healthy(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=60).status_code == 200


@pytest.mark.slow
def test_an_engine_that_is_killed_is_started_again() -> None:
    others = {*children_of(os.getpid())}
    with serving(Loader(LOAD_LLM, MODEL), restart=True) as (url, engine):
        before = stream(url, "Once", max_tokens=8)
        assert before[1:] == ("length", None)
        body = {"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            rest = "".join(lines)
        assert "its process was ended by SIGKILL" in rest, "its requests end with an error"
        assert rest.endswith("data: [DONE]")
        health = httpx.get(f"{url}/health", timeout=60)
        assert health.status_code == 503
        assert "SIGKILL" in health.json()["reason"]
        wait_for(lambda: is_healthy(url), "there is a new engine", 60)
        assert stream(url, "Once", max_tokens=8) == before
        (another,) = set(children_of(os.getpid())) - {engine} - others
    assert not is_there(another)


@pytest.mark.slow
def test_an_engine_that_was_lost_keeps_nothing_of_requests_that_came_later(caplog: pytest.LogCaptureFixture) -> None:
    """An error that is raised once more would keep the places, and the values there, of all times before."""

    async def depths() -> list[int]:
        engine = EngineProcess(Loader(LOAD_LLM, MODEL))
        facts = engine.wait_until_ready()
        backend = ProcessBackend(engine, facts, facts.tokenizer.tokenizer())
        os.kill(backend._engine.process.pid, signal.SIGKILL)
        found = [await depth_of_failure(backend) for _ in range(4)]
        restart = asyncio.create_task(backend.restart())
        await asyncio.sleep(0.2)
        await backend.close()
        assert await restart == "no"
        return found

    async def depth_of_failure(backend: ProcessBackend) -> int:
        with pytest.raises(EngineLost, match="the engine ended: its process was ended by SIGKILL") as caught:
            async for _ in backend.stream((1, 2), max_tokens=400, ignore_eos=True):
                pass
        return len(caught.traceback)

    first, *later = asyncio.run(depths())
    assert first > 1
    assert len({*later}) == 1
    assert "could not be started again" not in caplog.text, "it was not wanted any more"


@pytest.mark.slow
def test_an_engine_that_fails_is_reported(tmp_path: Path) -> None:
    """By the name of what ended it, as from an engine on a thread."""
    loader = Loader(f"{FAULTY}:load_failing", {"once": str(tmp_path / "failed")})
    with serving(loader) as (url, engine):
        _, reason, error = stream(url, "Once", max_tokens=200)
        assert (reason, error and error["message"]) == (None, "the server failed: SystemError")
        health = httpx.get(f"{url}/health", timeout=60)
        assert (health.status_code, health.json()["reason"]) == (503, "the engine ended: SystemError")
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 503
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 500
        for path in ("/metrics", "/stats", "/v1/models", "/version"):
            assert httpx.get(url + path, timeout=60).status_code == 200
        wait_for(lambda: not is_there(engine), "its process has ended")


@pytest.mark.slow
def test_an_engine_that_hangs_and_keeps_its_interpreter_is_killed(tmp_path: Path) -> None:
    """None of its threads can answer then."""
    given = {"once": str(tmp_path / "hung"), "keeps_interpreter": True}
    with serving(Loader(f"{FAULTY}:load_hanging", given), hang_seconds=2.0) as (url, engine):
        error = stream(url, "Once", max_tokens=200)[2]
        assert error is not None
        assert "no progress" in error["message"]
        assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200
        assert not is_there(engine)


@pytest.mark.slow
def test_an_engine_whose_only_work_is_a_grammar_does_not_hang() -> None:
    pytest.importorskip("llguidance")
    with serving(Loader(f"{FAULTY}:load_slow_grammar", {"seconds": 8.0}), hang_seconds=4.0) as (url, _):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        body |= {"response_format": {"type": "json_object"}}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert is_healthy(url)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_said_as_ever() -> None:
    for loader, error, says in (
        (Loader(LOAD_LLM, {**MODEL, "model": "no-such-model"}), UnknownName, "no-such-model"),
        (Loader(f"{FAULTY}:load_crash"), EngineLost, "ended with status 7"),
        (Loader(f"{FAULTY}:no_such_name"), EngineLost, "could not be loaded: AttributeError: .*no_such_name"),
    ):
        engine = EngineProcess(loader)
        with pytest.raises(error, match=says):
            engine.wait_until_ready()
        assert not is_there(engine.process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="signals without a name")
def test_an_engine_that_is_killed_by_a_signal_without_a_name(tmp_path: Path) -> None:
    engine = EngineProcess(Loader(f"{FAULTY}:load_for_ever", {"started": str(tmp_path / "mark")}))
    wait_for((tmp_path / "mark").exists, "it loads")
    number = signal.SIGRTMIN + 1
    os.kill(engine.process.pid, number)
    with pytest.raises(EngineLost, match=f"its process was ended by signal {number}"):
        engine.wait_until_ready()


@pytest.mark.slow
def test_other_processes_import_nothing_from_the_folder_they_are_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the `forerun` command does not: a user may have files there that are called like Python's own modules."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *(each for each in sys.path if each)])
    monkeypatch.chdir(tmp_path)
    for name in ("queue", "struct", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemError('a file of the user')")
    with pytest.raises(EngineLost, match="ended with status 7"):
        EngineProcess(Loader(f"{FAULTY}:load_crash")).wait_until_ready()
    worker = Worker(1, 2, {"no": "job"})
    worker.settled.wait(30)
    assert "KeyError" in (worker.problem or ""), "what is wrong with its job"


def end_and_look(process: subprocess.Popen[Any], how: signal.Signals, engines: list[int]) -> None:
    """End a front; soon nothing of it is there."""
    assert len(engines) == 1
    process.send_signal(how)
    process.wait(20)
    wait_for(lambda: not any(map(is_there, engines)), "its engine has ended too", 10)


WAITS = """
import sys
from forerun.server.backends.start import Loader
from forerun.server.backends.start import EngineProcess
EngineProcess(Loader(sys.argv[1], {sys.argv[2]: sys.argv[3]})).wait_until_ready()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_front_that_ends_while_the_model_is_loaded_leaves_nothing_behind(how: signal.Signals, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    words = [sys.executable, "-c", WAITS, f"{FAULTY}:load_for_ever", "started", str(mark)]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: mark.exists() and bool(mark.read_text()), "it loads")
        end_and_look(process, how, [int(mark.read_text())])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_front_has_no_torch_and_ends_its_engine_when_it_is_killed() -> None:
    command = [sys.executable, "-m", "forerun", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, ExitStack() as ends:
        ends.callback(process.kill)  # else a failure would wait for the server for ever
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving" in line)
        url = next(word for word in line.split() if word.startswith("http"))
        engines = children_of(process.pid)
        assert stream(url, "Once")[1] == "length"
        maps = [Path(f"/proc/{each}/maps").read_text() for each in (process.pid, *engines)]
        assert ["libtorch" in each for each in maps] == [False, True]
        end_and_look(process, signal.SIGKILL, engines)


@pytest.mark.slow
def test_a_signal_to_both_processes_drains(tmp_path: Path) -> None:
    """As systemd sends it. While it drains it answers, says that it is not ready, and ends what it began.

    The trace is complete then.
    """
    with started("--drain-seconds", "60", "--trace", str(tmp_path / "trace.json")) as (process, url):
        (engine,) = children_of(process.pid)
        body = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503, "it drains")
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
    assert not is_there(engine)
    assert len(json.loads((tmp_path / "trace.json").read_text())) > 100


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_without_a_traceback() -> None:
    with started("--drain-seconds", "60") as (process, url):
        body = {"prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503, "it drains")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "the server is shutting down" in rest[-2]
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_figures_of_both_processes_are_there(served: Running) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{served.url}/metrics", timeout=60).text.splitlines()
        found = [line.split('thread="')[1] for line in lines if line.startswith("forerun:cpu_seconds_total{")]
        return {line.split('"')[0]: float(line.split()[-1]) for line in found}

    before = read()
    stream(served.url, "Once", max_tokens=60)
    spent = {name: after - before[name] for name, after in read().items()}
    assert spent.keys() == {"engine", "front", "others"}
    assert spent["engine"] > spent["front"] > 0
    assert time.process_time() > before["front"], "the front is in this process"
