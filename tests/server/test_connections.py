"""Clients over real sockets that stop reading, leave early, send slowly or say nothing: what they cost, how long."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun import LLM, SamplingParams
from forerun.engine.engine import Engine
from forerun.server import limits
from forerun.server.run import uvicorn_options
from forerun.server.settings import ServerSettings
from tests.server.test_robust import serving, stream

LONG = {"prompt": "Once", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "logprobs": 20}


def connect(url: str, buffer: int = 4096) -> socket.socket:
    """A client whose kernel takes little before it has read."""
    place = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect((place.hostname, place.port))
    return client


def send(client: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    client.sendall(f"{head}\r\n\r\n".encode() + data)


def wait_for(what: Callable[[], bool], says: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, says
        time.sleep(0.005)


def all_that_comes(client: socket.socket, size: int = 1 << 16, pause: float = 0.0) -> bytes:
    """Everything until the server ends the connection."""
    client.settimeout(30)
    parts = list[bytes]()
    while part := client.recv(size):
        parts.append(part)
        time.sleep(pause)
    return b"".join(parts)


def is_idle(engine: Engine) -> bool:
    return not engine.busy and engine.target.used_slots == 0


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_up_nobody_and_is_cut_off(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Its text is far more than the socket and 64 KiB take: the server stops writing, then ends the connection."""
    engine = llm.engine
    with serving(llm, client_seconds=0.7) as url, connect(url) as client:
        send(client, {**LONG, "stream": True})
        wait_for(lambda: bool(engine.running), "it is served")
        text, reason, error = stream(url, "Count: 1 2 1 2 1", max_tokens=16)
        wanted = llm.generate("Count: 1 2 1 2 1", SamplingParams(max_tokens=16, ignore_eos=True)).text
        assert (text, reason, error) == (wanted, "length", None), "others are served beside it"
        wait_for(lambda: "read nothing" in caplog.text, "it was cut off")
        wait_for(lambda: is_idle(engine), "what it held is free")
        got = all_that_comes(client)
        assert b"[DONE]" not in got
        assert len(got) < 350_000, (
            "what was written for it is bounded; the whole text has 900 chunks of a kilobyte and more"
        )


@pytest.mark.slow
def test_a_client_that_reads_slowly_is_not_cut_off(llm: LLM) -> None:
    """Longer than the server's patience passes until it may write again, but something is read all the time."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for _ in range(60):
            await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    options = {**uvicorn_options(ServerSettings(("m",), client_seconds=0.25)), "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, "it listens")
    port = server.servers[0].sockets[0].getsockname()[1]
    with connect(f"http://127.0.0.1:{port}") as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        got = all_that_comes(client, size=4096, pause=0.03)  # 48 KiB take 0.36 s
        assert got.count(b"x") >= 60 * 8192
        assert got.endswith(b"0\r\n\r\n")
    server.should_exit = True
    thread.join(10)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_leaves_is_dropped_at_once(llm: LLM, streams: bool, waits: bool) -> None:
    """Whether it streams, waits for the whole answer, or waits in the queue for its first token."""
    engine, slow = llm.engine, llm.engine.step

    def step() -> Any:
        time.sleep(0.05)  # rounds take longer than to notice that a client has left
        return slow()

    engine.step = step  # type: ignore[method-assign]
    try:
        with serving(llm) as url:
            others = [connect(url) for _ in range(engine.max_batch if waits else 0)]
            for other in others:
                send(other, LONG)
            wait_for(lambda: len(engine.running) == len(others), "the batch is full of others")
            client = connect(url)
            send(client, {**LONG, "stream": streams})
            wait_for(lambda: len(engine.waiting if waits else engine.running) == 1, "it is there")
            client.close()
            before = engine.stats.rounds
            wait_for(lambda: len(engine.waiting if waits else engine.running) == 0, "it was dropped")
            assert engine.stats.rounds - before < 100, "long before the end of its text of 900 rounds"
            for other in others:
                other.close()
            wait_for(lambda: is_idle(engine), "all is free")
    finally:
        del engine.step


def test_one_round_at_most_is_made_for_a_client_that_has_left(llm: LLM) -> None:
    """The round that was under way when the server noticed."""
    engine, plain, begun, goes_on = llm.engine, llm.engine.step, threading.Event(), threading.Event()

    def step() -> Any:
        if engine.running:
            begun.set()
            assert goes_on.wait(60)
        return plain()

    engine.step = step  # type: ignore[method-assign]
    try:
        with serving(llm) as url:
            client = connect(url)
            send(client, {**LONG, "stream": True})
            assert begun.wait(60)
            client.close()
            left = 'forerun:request_success_total{finished_reason="aborted",model_name="m"} 1.0'
            wait_for(lambda: left in httpx.get(f"{url}/metrics", timeout=60).text, "it is noticed during the round")
            before = engine.stats.rounds
            goes_on.set()
            wait_for(lambda: is_idle(engine), "all is free")
            assert engine.stats.rounds - before <= 1
    finally:
        goes_on.set()
        del engine.step


def test_all_texts_of_a_client_that_leaves_are_dropped(llm: LLM) -> None:
    engine = llm.engine
    with serving(llm) as url:
        with connect(url) as client:
            send(client, {**LONG, "n": 6, "stream": True})
            wait_for(lambda: len(engine.running) == engine.max_batch, "some of them run")
            assert len(engine.waiting) == 6 - engine.max_batch, "and some wait"
        wait_for(lambda: is_idle(engine), "all are dropped")
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        assert 'forerun:request_success_total{finished_reason="aborted",model_name="m"} 6.0' in metrics


def test_a_client_that_says_nothing_is_closed(llm: LLM) -> None:
    with serving(llm, client_seconds=0.3) as url, connect(url) as client:
        client.settimeout(30)
        assert client.recv(100) == b""


def test_a_body_that_does_not_come_is_not_waited_for(llm: LLM) -> None:
    with serving(llm, client_seconds=0.3) as url, connect(url) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        client.settimeout(30)
        answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not come" in answer + client.recv(1 << 16)


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADS = {
    "a long header": (b"GET /health HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 33_000 + b"\r\n\r\n", 431),
    "a header without an end": (b"GET /health HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 2_000_000, 431),
    "many headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"x: y\r\n" * 50_000 + b"\r\n", 431),
    "not too many headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"x: y\r\n" * 1000 + b"\r\n", 200),
    "a long path": (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "a path without an end": (b"GET /" + b"x" * 2_000_000, 431),
    "a long query": (b"GET /health?" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "a trailer without an end": (CHUNKED + b"1\r\n{\r\n0\r\nx: " + b"y" * 2_000_000, 431),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pure", [True, False])
def test_paths_and_headers_are_bounded(llm: LLM, pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With uvicorn's own parser of HTTP (`pure`), which says 400, and with httptools, where that is installed."""
    if pure:
        monkeypatch.setattr(limits, "Connection", type("Connection", (limits.Watched, H11Protocol), {}))
    with serving(llm) as url:
        for what, (head, status) in HEADS.items():
            with connect(url) as client:
                threading.Thread(target=send_until_refused, args=(client, head), daemon=True).start()
                client.settimeout(20)
                answer = client.recv(1 << 16)
                found = {400: 431}.get(int(answer[9:12]), int(answer[9:12])) if pure else int(answer[9:12])
                assert found == status, (what, answer)
        # those before have gone, and a body with short headers is no matter of theirs
        body = {"prompt": "x" * 100_000}
        assert httpx.post(f"{url}/tokenize", json=body, timeout=60).status_code in (200, 400)


def send_until_refused(client: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        client.sendall(data)


@pytest.mark.slow
def test_nothing_is_left_of_a_connection_that_has_ended(llm: LLM) -> None:
    """With the usual patience: what watches for silence must not keep connections for a minute after their end."""

    def kept() -> int:
        gc.collect()
        return sum(type(each) is limits.Connection for each in gc.get_objects())

    before = kept()
    with serving(llm) as url:
        with connect(url):
            wait_for(lambda: kept() > before, "it is connected")
        for _ in range(5):
            assert httpx.get(f"{url}/version", timeout=60).status_code == 200
        wait_for(lambda: kept() == before, "all have ended", 30)
