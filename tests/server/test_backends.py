"""Front and engine of a server by their real code, in one process: what either end does when the other one fails.

tests/server/test_engine_process.py has two processes and a model, which takes seconds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun.api.completion import Completion
from forerun.api.llm import LLM, AsyncLLM
from forerun.core.errors import UnknownName
from forerun.core.request import Event, Request
from forerun.engine.round import CaptureTurns
from forerun.models.load.tokenizer import TokenizerParts
from forerun.server.app import create_app
from forerun.server.backends import base, process
from forerun.server.backends.base import ProgressWatch
from forerun.server.backends.process import ProcessBackend
from forerun.server.backends.start import EngineLost, EngineProcess, Loader
from forerun.server.backends.texts import Texts
from forerun.server.backends.thread import LocalBackend
from forerun.server.backends.wire import Channel, Facts, Packed, pack_event
from forerun.server.errors import ApiError
from forerun.server.service import QUICK, Service
from forerun.server.settings import ServerSettings
from tests.server.conftest import is_there
from tests.test_llm import PARAMS, Letters, make

FAULTY = "tests.server.faulty_engines"
sleep = asyncio.sleep


class Idle(EngineProcess):
    """A process that does nothing, and a channel whose other end the test has."""

    def __init__(self, loader: Loader = Loader("nobody:calls"), trace: Path | None = None) -> None:  # noqa: B008
        ours, theirs = socket.socketpair()
        self.loader, self.trace = loader, trace
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        self.channel, self.other = Channel(ours), Channel(theirs)

    def wait_until_ready(self) -> Facts:
        return facts_of(make())

    async def orders(self) -> list[Packed]:
        """What the front has sent since the last call, once it has sent something."""
        found = list[Packed]()
        while not found:
            await sleep(0.001)
            found = [order for orders in self.other.receive_ready() or () for order in orders]
        return found

    def lose(self) -> None:
        self.process.kill()
        self.process.wait()
        self.other.close()


def facts_of(llm: LLM) -> Facts:
    report = Texts(llm, Channel(socket.socket())).report()
    return Facts(26, llm.engine.max_length, 8, False, TokenizerParts("", (), None, None, {}), report)


def run(work: Callable[[ProcessBackend, Idle], Awaitable[None]], engine: Idle | None = None) -> None:
    """A front beside an engine; whatever is raised in its event loop is raised here."""
    faults, engine = list[Any](), engine or Idle()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        backend = ProcessBackend(engine, facts_of(make()), Letters())  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(work(backend, engine), 60)
        finally:
            backend._engine.kill()
            await backend.close()

    asyncio.run(main())
    assert faults == []


async def read_all(backend: ProcessBackend, **options: Any) -> list[Event | Completion]:
    return [item async for item in backend.stream((1, 2), **options)]


async def refresh(backend: ProcessBackend, engine: Idle) -> None:
    """Ask how the engine is: afterwards the front has read all that was sent before."""
    asked = asyncio.create_task(backend.refresh())
    ((what, number),) = await engine.orders()
    assert what == "report"
    engine.other.send(("reply", number, facts_of(make()).report.packed(), None))
    await asked


# ---- the front


def test_a_text_that_is_left_early_is_aborted_and_what_still_comes_is_dropped() -> None:
    async def work(backend: ProcessBackend, engine: Idle) -> None:
        text = backend.stream((1, 2), max_tokens=9)
        first = asyncio.ensure_future(anext(text))
        ((_, key, *_),) = await engine.orders()
        news = ("texts", [(key, [pack_event(Event(key, (5,), 0, "f"))], None, None)])
        engine.other.send(news)
        item = await first
        assert isinstance(item, Event)
        assert item.text == "f"
        await text.aclose()
        assert await engine.orders() == [("abort", key)]
        engine.other.send(news)
        await refresh(backend, engine)

    run(work)


def test_an_engine_that_is_lost_ends_all_calls_that_wait_for_it_and_refuses_new_ones() -> None:
    async def work(backend: ProcessBackend, engine: Idle) -> None:
        waiting = [asyncio.create_task(read_all(backend)), asyncio.create_task(backend.swap_head(Path("head")))]
        assert len(await engine.orders()) == 2
        engine.lose()
        later = [read_all(backend), backend.swap_head(Path("head"))]
        for call in (*waiting, *later):
            with pytest.raises(EngineLost, match="ended by SIGKILL"):
                await asyncio.wait_for(call, 60)
        assert backend.problem == "the engine ended: its process was ended by SIGKILL"

    run(work)


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    async def work(backend: ProcessBackend, engine: Idle) -> None:
        swap = asyncio.create_task(backend.swap_head(Path("head")))
        ((_, number, _),) = await engine.orders()
        swap.cancel()
        await sleep(0)
        engine.other.send(("reply", number, None, None))
        await refresh(backend, engine)

    run(work)


def test_a_report_that_is_lost_does_not_end_later_ones() -> None:
    async def work(backend: ProcessBackend, engine: Idle) -> None:
        backend.patience = 0.01
        await backend.refresh()
        assert [what for what, _ in await engine.orders()] == ["report"], "nobody answers it"
        backend.patience = 60.0
        await refresh(backend, engine)

    run(work)


def test_an_engine_that_was_lost_is_started_again_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EngineProcess", Idle)

    async def work(backend: ProcessBackend, engine: Idle) -> None:
        engine.lose()
        with pytest.raises(EngineLost):
            await read_all(backend)
        assert await backend.restart() == "yes"
        assert backend.failure is None
        another = backend._engine
        assert isinstance(another, Idle)
        assert another is not engine
        text = backend.stream((1, 2))
        first = asyncio.ensure_future(anext(text))
        ((_, key, *_),) = await another.orders()
        another.other.send(("texts", [(key, [pack_event(Event(key, (5,), 0, "f"))], None, None)]))
        assert isinstance(await first, Event)
        await text.aclose()

    run(work)


def test_pauses_between_attempts_to_start_an_engine_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Idle):
        def wait_until_ready(self) -> Facts:
            self.kill()
            raise EngineLost("no memory")

    pauses = list[float]()

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    async def work(backend: ProcessBackend, engine: Idle) -> None:
        monkeypatch.setattr(process, "EngineProcess", Broken)
        monkeypatch.setattr(process, "LONGEST_PAUSE", 3.0)
        # of this module alone: servers of other tests sleep too
        monkeypatch.setattr(process, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": note}))
        assert [await backend.restart() for _ in range(4)] == ["no"] * 4
        assert pauses == [1.0, 2.0, 3.0, 3.0]
        assert not is_there(engine.process.pid), "one that is replaced is killed"
        monkeypatch.setattr(process, "EngineProcess", Idle)
        assert await backend.restart() == "yes"
        monkeypatch.setattr(process, "EngineProcess", Broken)
        await backend.restart()
        assert pauses.pop() == 1.0, "after a success it starts anew"
        await backend.close()
        last = backend._engine
        assert await backend.restart() == "no"
        assert backend._engine is last, "a server that ends starts no engine"

    run(work)


def test_an_engine_that_is_told_to_end_while_it_loads_does_and_one_whose_front_is_interrupted_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(channel: Channel) -> Iterator[Any]:
        raise KeyboardInterrupt

    loader = Loader(f"{FAULTY}:load_for_ever", {"started": str(tmp_path / "mark")})
    told, interrupted = EngineProcess(loader), EngineProcess(loader)
    assert os.getsid(told.process.pid) == told.process.pid, "Ctrl-C in a terminal is for the front"
    monkeypatch.setattr(Channel, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.wait_until_ready()
    assert not is_there(interrupted.process.pid)
    while not (tmp_path / "mark").exists():
        assert told.process.poll() is None
    told.channel.close()
    assert told.process.wait(10) == 0


def test_an_engine_that_has_just_got_work_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = (
        (10.0, (0, 0), False), (20.0, (0, 0), True), (24.0, (0, 0), True), (25.1, (0, 0), True),
        (25.2, (1, 0), True), (30.1, (1, 0), True), (30.3, (1, 0), True), (40.0, (1, 0), False),
    )  # fmt: skip
    watch, found = ProgressWatch(), list[bool]()
    for now, progress, has_work in seen:
        monkeypatch.setattr(base, "monotonic", lambda now=now: now)
        found.append(watch.stands_still(progress, has_work, 5.0))
    assert found == [False, False, False, True, False, False, True, False]


# ---- the engine


@contextmanager
def written_by(llm: LLM) -> Iterator[tuple[Idle, Texts]]:
    """An engine whose rounds are made by a thread of this process, and another reads what the front sends."""
    engine = Idle()
    texts = Texts(llm, engine.other)

    def obey() -> None:
        for orders in engine.other.receive():
            texts.obey(orders)
        texts.close()

    threads = [threading.Thread(target=work, daemon=True) for work in (obey, texts.make_rounds)]
    for thread in threads:
        thread.start()
    yield engine, texts
    engine.channel.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


async def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        await sleep(0.001)


def test_events_of_every_round_come_where_they_are_asked_for_and_else_the_first() -> None:
    llm = make()
    wanted = llm.generate([1, 2], PARAMS)
    options = {"max_tokens": PARAMS.max_tokens, "ignore_eos": True}

    async def work(backend: ProcessBackend, engine: Idle) -> None:
        for every_round, logprobs in ((True, None), (False, None), (False, 2)):
            *events, done = await read_all(backend, every_round=every_round, logprobs=logprobs, **options)
            assert isinstance(done, Completion)
            assert (done.text, done.token_ids) == (wanted.text, wanted.token_ids)
            tokens = [token for event in events if isinstance(event, Event) for token in event.tokens]
            whole = every_round or logprobs is not None
            assert tokens == (done.token_ids if whole else done.token_ids[: len(tokens)])
            assert len(events) == 1 or whole
            assert tokens
            assert [len(entry.top) for entry in done.logprobs or ()] == [2] * (12 if logprobs else 0)
        with pytest.raises(UnknownName, match="nobody"):
            await read_all(backend, drafter="nobody")

    with written_by(llm) as (engine, _):
        run(work, engine)


def test_an_engine_gives_up_what_its_front_aborts() -> None:
    llm = make()
    real = llm.engine.step

    async def work(backend: ProcessBackend, engine: Idle) -> None:
        text = backend.stream((1, 2), max_tokens=5000, ignore_eos=True)
        assert isinstance(await anext(text), Event)
        (seq,) = llm.engine.running
        await text.aclose()
        await wait_until(lambda: seq.finished is not None)
        assert seq.finished == "aborted"

    def slow() -> list[Event]:
        threading.Event().wait(0.002)  # 5000 tokens take seconds
        return real()

    llm.engine.step = slow  # type: ignore[method-assign]
    with written_by(llm) as (engine, _):
        run(work, engine)


def test_a_text_whose_grammar_is_compiled_counts_as_progress_and_may_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    begun, gate, queued = threading.Event(), threading.Event(), list[Any]()
    enqueue = llm.engine.enqueue

    def compile_slowly(request: Request) -> Request:
        if request.params.structure is None:
            return request
        begun.set()
        assert gate.wait(10)
        return Request(request.prompt, PARAMS)

    monkeypatch.setattr(llm.engine.grammars, "compile", compile_slowly)
    monkeypatch.setattr(llm.engine, "enqueue", lambda seq: (queued.append(seq), enqueue(seq)))

    async def work(backend: ProcessBackend, engine: Idle) -> None:
        form = {"response_format": {"type": "json_object"}}
        left, kept = (asyncio.create_task(read_all(backend, **form)) for _ in range(2))
        await wait_until(begun.is_set)
        found = list[tuple[int, int]]()
        for _ in range(3):
            await backend.refresh()
            found.append(backend._report.progress)
        assert found[0] < found[1] < found[2], "nothing hangs"
        assert len(await read_all(backend, max_tokens=1)) == 2, "others do not wait for it"
        left.cancel()
        await asyncio.wait([left])  # its abort is sent
        await backend.refresh()  # behind the abort
        gate.set()
        *_, done = await kept
        assert isinstance(done, Completion)
        assert done.tokens == 12
        assert len(queued) == 2, "not the text that was left"
        await backend.refresh()
        assert backend.load().running == 0

    with written_by(llm) as (engine, _):
        run(work, engine)


# ---- an engine on a thread, and the door of a server


def test_a_new_engine_thread_has_nothing_of_what_the_old_one_left() -> None:
    """A driver whose rounds raise: whoever was running or queued gets an error, and does not run on unasked."""
    llm = make(max_batch=1)

    async def work() -> None:
        backend = LocalBackend(AsyncLLM(llm))
        gone, real = SystemError("the engine is gone"), llm.engine.step

        def fails() -> list[Event]:
            raise gone

        llm.engine.step = fails  # type: ignore[method-assign]
        with pytest.raises(SystemError):
            async for _ in backend.stream((1, 2), max_tokens=5000, ignore_eos=True):
                pass
        for _ in range(2):
            llm.engine.enqueue(llm.engine.prepare(Request((1, 2))))
        llm.engine.step = real  # type: ignore[method-assign]
        assert backend.failure is gone
        assert await backend.restart() == "yes"
        assert (llm.engine.busy, backend.failure) == (False, None)
        assert len([item async for item in backend.stream((1, 2), max_tokens=1)]) == 2
        await backend.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_server_takes_as_many_texts_as_batch_and_queue_hold_until_it_drains() -> None:
    async def work() -> None:
        backend = LocalBackend(AsyncLLM(make(max_batch=2)))
        service = Service(backend, ServerSettings(("m",), max_queue=3))
        assert service.read_now("tokenize", b" " * (QUICK + 1)) is None, "a process of its own reads what is large"
        with service.admitted(3), service.admitted(2):
            assert service.active == 5
            with pytest.raises(ApiError, match="room for 5") as refused, service.admitted(1):
                pass
            assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
        assert service.active == 0
        with pytest.raises(ApiError, match="room for 5"), service.admitted(6):
            pass
        service.draining = True
        with pytest.raises(ApiError, match="shutting down"), service.admitted(1):
            pass
        await backend.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_health_says_what_a_gpu_still_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, left = make(max_batch=2), [7]
    monkeypatch.setattr(CaptureTurns, "missing", property(lambda turns: left[0]))
    with TestClient(create_app(LocalBackend(AsyncLLM(llm)), ServerSettings(("m",)))) as client:
        note = "ready; graphs for one sequence are still being captured (7 left)"
        assert client.get("/health").json() == {"status": "ok", "note": note}
        assert client.get("/ready").json() == {"ready": True}
        assert client.get("/stats").json()["captures"] == 7
        left[0] = 0
        assert client.get("/health").json() == {"status": "ok"}
