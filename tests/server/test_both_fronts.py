"""The engine in a process of its own and on a thread of the front: the same answers to the same requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.core.params import for_schema
from forerun.server.backends.start import Loader
from forerun.server.settings import ServerSettings
from tests.server.conftest import Running, start, start_process
from tests.server.test_connections import LONG, connect, send, wait_for
from tests.server.test_exact import CASES, REPEATS
from tests.server.test_stream_bytes import FIGURES, by_choice, split, without_names
from tests.server.test_stream_bytes import ask as ask_raw
from tests.structure.test_grammar import FAILS_LATER

SALTS = count()
DRAFTED = {"drafter": "ngram", "budget": 4}  # fixed: what a round drafts does not depend on the clock


@pytest.fixture(scope="module")
def threaded(llm: LLM) -> Iterator[str]:
    server, thread, url = start(llm, ServerSettings(("smollm2",)))
    yield url
    server.should_exit = True
    thread.join(10)


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    more = {"cache_salt": f"both {next(SALTS)}", "speculative": DRAFTED}
    body = {"model": "smollm2", "max_tokens": 14, "messages": [{"role": "user", "content": REPEATS}], **more}
    body |= {**case, **case.get("extra_body", {})}
    body.pop("extra_body", None)
    return body


def stripped(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is made up for each: names, times, and the ids of calls."""
    text = json.dumps({**body, "id": "", "created": 0})
    calls = [call["id"] for c in body.get("choices", ()) for call in _calls(c) if "id" in call]
    for made_up in calls:
        text = text.replace(made_up, "call")
    found: dict[str, Any] = json.loads(text)
    return found


def _calls(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or []


MORE: dict[str, dict[str, Any]] = {
    "figures": {"temperature": 0, "stream_options": FIGURES},
    "usage in every chunk": {
        "temperature": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "a grammar that fails": {"temperature": 0, "max_tokens": 40, "n": 2, "response_format": for_schema(FAILS_LATER)},
    "free whitespace": {
        "temperature": 0,
        "max_tokens": 40,
        "response_format": {"type": "json_object"},
        "structured_outputs": {"disable_any_whitespace": False},
    },
    "a stop string over rounds": {"temperature": 0, "stop": ["two three"], "max_tokens": 40},
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_answers_are_the_same(name: str, served: Running, threaded: str) -> None:
    case = {**CASES, **MORE}[name]
    if "response_format" in case or "tool_choice" in case:
        pytest.importorskip("llguidance")
    if "stream_options" not in case:
        wholes = [
            httpx.post(f"{url}/v1/chat/completions", json=body_of(case), timeout=60) for url in (served.url, threaded)
        ]
        assert [answer.status_code for answer in wholes] == [200, 200]
        assert stripped(wholes[0].json()) == stripped(wholes[1].json())
    streams = [split(ask_raw(url, body_of(case), path="/v1/chat/completions"))[1] for url in (served.url, threaded)]
    one, other = (by_choice([stripped(each) for each in without_names(messages)]) for messages in streams)
    assert one == other
    assert len(streams[0]) > 2


REFUSED: dict[str, dict[str, Any]] = {
    "an option out of range": {"temperature": -1},
    "a token outside the vocabulary": {"prompt": [49152]},
    "an unknown drafter": {"speculative": {"drafter": "no-such"}},
    "a bias outside the vocabulary": {"logit_bias": {"999999": 1}},
    "too long": {"prompt": [5] * 1024},
    "an unknown verifier": {"speculative": {"verifier": "no-such"}},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("streams", [True, False])
def test_refusals_are_the_same(name: str, streams: bool, served: Running, threaded: str) -> None:
    body = {"prompt": "Once", "max_tokens": 4, "stream": streams, **REFUSED[name]}
    one, other = (httpx.post(f"{url}/v1/completions", json=body, timeout=60) for url in (served.url, threaded))
    assert (one.status_code, one.json()) == (other.status_code, other.json())
    assert one.status_code == 400


def test_a_schema_that_cannot_be_used_is_refused(served: Running, threaded: str) -> None:
    pytest.importorskip("llguidance")
    schema = {"name": "x", "schema": {"type": "no-such-type"}}
    body = body_of({"response_format": {"type": "json_schema", "json_schema": schema}})
    one, other = (httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60) for url in (served.url, threaded))
    assert (one.status_code, one.json()) == (other.status_code, other.json())
    assert one.status_code == 400


def test_a_client_that_does_not_read_holds_up_nobody(served: Running) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    with connect(served.url) as client:
        send(client, {**LONG, "stream": True})
        wait_for(lambda: served.stats()["running"] == 1, "it is served")
        answers = [httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json() for _ in range(3)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    wait_for(lambda: served.stats()["used_slots"] == 0, "what it held is free")


@pytest.fixture(scope="module")
def slow() -> Iterator[str]:
    """Rounds take long, so that they can be told apart; two texts at a time."""
    loader = Loader("tests.server.faulty_engines:load_slow", {"seconds": 0.05})
    server, thread, url = start_process(loader, ServerSettings(("m",)))
    yield url
    server.should_exit = True
    thread.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_leaves_is_dropped_at_once(waits: bool, slow: str) -> None:
    """Whether its text is written or waits in the queue."""
    running = Running(slow, None)  # type: ignore[arg-type]
    place = "waiting" if waits else "running"
    others = [connect(slow) for _ in range(2 if waits else 0)]  # the batch
    for other in others:
        send(other, LONG)
    wait_for(lambda: running.stats()["running"] == len(others), "the batch is full of others")
    client = connect(slow)
    send(client, {**LONG, "stream": True})
    wait_for(lambda: running.stats()[place] == 1, "it is there")
    client.close()
    before = running.stats()["rounds"]
    while (stats := running.stats())[place]:
        time.sleep(0.005)
    assert stats["rounds"] - before < 100, "long before the end of its text of 900 rounds"
    for other in others:
        other.close()
    wait_for(lambda: running.stats()["used_slots"] == 0, "all is free")
