"""`priority` in requests of every route: it reaches the engine, changes no text, and junk is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.server.settings import ServerSettings
from tests.server.conftest import start

PROMPT = "Name three colours."
MESSAGES = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 8},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 8},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/embeddings": {"input": PROMPT},
}


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    """Of a server whose engine is in this process."""
    server, thread, url = start(llm, ServerSettings(("smollm2",)))
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join(10)


def text_of(answer: Any) -> Any:
    """What an answer says, in any of the shapes."""
    for name in ("choices", "output", "content", "data"):
        if name in answer:
            return [each.get("text") or each.get("message") or each.get("content") or each for each in answer[name]]
    raise AssertionError(answer)


@pytest.mark.parametrize("route", BODIES)
def test_a_priority_reaches_the_engine_and_changes_no_text(
    route: str, http: httpx.Client, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = list[int](), llm.engine.scheduler.enqueue
    monkeypatch.setattr(llm.engine.scheduler, "enqueue", lambda seq: (seen.append(seq.request.priority), real(seq)))
    body = BODIES[route] if route == "/v1/embeddings" else {**BODIES[route], "temperature": 0}
    found = []
    for priority in (None, 0, -7, 1 << 40):
        answer = http.post(route, json={**body, **({} if priority is None else {"priority": priority})})
        assert answer.status_code == 200, answer.text
        said = text_of(answer.json())
        for each in said if route == "/v1/responses" else ():
            each[0].pop("id", None)
        found.append(said)
    assert seen == [0, 0, -7, 1 << 40]
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("junk", [1.5, "soon", True, [], 1 << 60, -(1 << 60)])
@pytest.mark.parametrize("route", BODIES)
def test_junk_is_refused(route: str, junk: Any, http: httpx.Client) -> None:
    answer = http.post(route, json={**BODIES[route], "priority": junk})
    assert answer.status_code == 400, answer.text
    assert "priority" in answer.text


def test_the_metric_is_there(http: httpx.Client) -> None:
    assert "forerun:num_requests_aged_total" in http.get("/metrics").text
