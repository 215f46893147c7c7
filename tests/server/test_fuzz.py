"""Whatever is sent, no answer is a 5xx, and the stream beside it has its text. `make fuzz` sends 10,000 requests.

What is sent is made by tests/fuzz/bodies.py from a seed.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from forerun import SamplingParams
from tests.fuzz.bodies import POSTS, Sent, requests_of
from tests.server.conftest import Running

PROMPT = "Count: 1 2 1 2 1"
WANTED = SamplingParams(max_tokens=48, ignore_eos=True)


@contextmanager
def neighbour(served: Running) -> Iterator[None]:
    """Streams the same text again and again, beside whatever is done here; it must be the model's own each time."""
    wanted = served.llm.generate(PROMPT, WANTED).text
    ended, texts = threading.Event(), list[str]()
    body = {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, "temperature": 0, "stream": True}

    def read() -> None:
        while not ended.is_set():
            text = ""
            with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            texts.append(text)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(120)
    assert texts
    assert set(texts) == {wanted}


def check(http: httpx.Client, sent: Sent) -> int:
    answer = http.post(sent.path, content=sent.raw, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (sent, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"], sent
        assert "\n" not in error["message"], sent
        assert len(error["message"]) < 1500, sent
    else:
        assert "server_error" not in answer.text, (sent, answer.text)
    return answer.status_code


def send_all(served: Running, path: str, count: int, seed: int) -> Counter[int]:
    document = httpx.get(f"{served.url}/openapi.json", timeout=60).json()
    with neighbour(served), httpx.Client(base_url=served.url, timeout=120) as http:
        return Counter(check(http, sent) for sent in requests_of(document, path, count, seed))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("path", POSTS)
def test_no_body_gives_a_5xx(served: Running, path: str) -> None:
    statuses = send_all(served, path, 60, seed=14)
    assert statuses[200] >= 5, f"too few bodies were valid: {statuses}"
    assert statuses[400] >= 20, f"too few bodies were damaged: {statuses}"


@pytest.mark.parametrize("path", [path for path in POSTS if path.startswith(("/v1/r", "/v1/m", "/v1/e"))])
def test_no_body_of_another_api_gives_a_5xx(http: httpx.Client, path: str) -> None:
    """A few, in the fast tier."""
    document = http.get("/openapi.json").json()
    statuses = Counter(check(http, sent) for sent in requests_of(document, path, 40, seed=40))
    assert statuses[200] >= 1
    assert statuses[400] >= 10


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1, 11))
def test_10000_bodies_give_no_5xx(served: Running, seed: int) -> None:
    statuses = sum((send_all(served, path, 250, seed) for path in POSTS), Counter[int]())
    print(f"\nseed {seed}: {dict(sorted(statuses.items()))}")
    assert statuses.total() == 250 * len(POSTS)


def test_every_path_is_in_the_schema(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {*POSTS, "/v1/models", "/health", "/ready", "/version", "/metrics", "/stats"} <= set(paths)


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/%00", "/page/..%2fapp.py", "/page/%ff", "/v1/models/é"])
def test_strange_paths_are_not_found(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code in (307, 404)
