"""A server that sleeps gives all memory of its engine back; awake again it writes the same texts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.server.backends.start import LOAD_LLM, Loader
from forerun.server.settings import ServerSettings
from tests.server.conftest import MODEL, Running, children_of, start, start_process

pytestmark = pytest.mark.model
ADMIN = {"Authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "Count from one to ten."}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def sleeper(llm: LLM) -> Iterator[Running]:
    """`--restart` starts an engine that has ended, but not one that sleeps."""
    settings = ServerSettings(("smollm2",), admin_key="secret", restart=True)
    server, thread, url = start_process(Loader(LOAD_LLM, MODEL), settings)
    yield Running(url, llm)
    server.should_exit = True
    thread.join(10)


def ask(served: Running, **more: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/chat/completions", json={**CHAT, **more}, timeout=120)


def order(served: Running, what: str, **headers: str) -> httpx.Response:
    return httpx.post(f"{served.url}/{what}", headers=headers or ADMIN, timeout=120)


def is_sleeping(served: Running) -> bool:
    found: bool = httpx.get(f"{served.url}/is_sleeping", headers=ADMIN, timeout=60).json()["is_sleeping"]
    return found


def sleep_beside_a_text(served: Running, **body: Any) -> str:
    """Order it while a text is being written: nobody else is served, and the text ends first, which is returned."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(order(served, "sleep").json()))
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**CHAT, **body, "stream": True}, timeout=120) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line)
        thread.start()
        while not is_sleeping(served):
            time.sleep(0.01)
        assert ask(served).status_code == 503
        text = "".join([first, *lines])
    thread.join(60)
    assert answers == [{"is_sleeping": True}]
    return text


def test_it_ends_its_texts_then_its_process_and_they_are_the_same(
    sleeper: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    long: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    wanted, others = ask(sleeper).json()["choices"][0]["message"]["content"], children_of(os.getpid())
    written = ask(sleeper, **long).json()["choices"][0]["message"]["content"]
    assert not is_sleeping(sleeper)
    streamed = sleep_beside_a_text(sleeper, **long)
    assert "[DONE]" in streamed
    assert '"finish_reason":"length"' in streamed
    assert order(sleeper, "sleep").json() == {"is_sleeping": True}
    assert len(children_of(os.getpid())) == len(others) - 1, "its memory is the system's again"
    time.sleep(0.6)  # the watch looks several times
    assert len(children_of(os.getpid())) == len(others) - 1
    refused = ask(sleeper)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert "POST /wake_up" in refused.json()["error"]["message"]
    assert httpx.post(f"{sleeper.url}/tokenize", json={"prompt": "x"}, timeout=60).status_code == 200
    assert httpx.get(f"{sleeper.url}/health", timeout=60).json() == {"status": "sleeping"}
    assert httpx.get(f"{sleeper.url}/ready", timeout=60).status_code == 503
    assert (sleeper.metric("engine_sleep_state"), sleeper.metric("kv_cache_cached_slots")) == (1, 0)
    assert order(sleeper, "wake_up").json() == order(sleeper, "wake_up").json() == {"is_sleeping": False}
    assert ask(sleeper).json()["choices"][0]["message"]["content"] == wanted
    assert ask(sleeper, **long).json()["choices"][0]["message"]["content"] == written
    assert (sleeper.metric("engine_sleep_state"), is_sleeping(sleeper)) == (0, False)
    assert sum("the engine sleeps" in line or "is awake after" in line for line in caplog.messages) == 2


def test_it_is_the_admins_and_a_thread_cannot(sleeper: Running, llm: LLM) -> None:
    assert order(sleeper, "sleep", Authorization="Bearer other").status_code == 401
    assert order(sleeper, "wake_up", Authorization="Bearer other").status_code == 401
    assert httpx.get(f"{sleeper.url}/is_sleeping", timeout=60).status_code == 401
    server, thread, url = start(llm, ServerSettings(("smollm2",), admin_key="secret"))
    try:
        refused = order(Running(url, llm), "sleep")
        assert refused.status_code == 400
        assert "--front thread" in refused.json()["error"]["message"]
        assert ask(Running(url, llm)).status_code == 200
    finally:
        server.should_exit = True
        thread.join(30)
