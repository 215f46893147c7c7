"""Cached prompts over HTTP: what usage says, who shares with whom, and what the metrics count."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from forerun import LLM
from tests.server.conftest import Running
from tests.server.test_robust import serving

RULES = "You are the clerk of a small harbour and answer in one word. Ships report by name, berth and cargo. " * 4


def ask(url: str, key: str | None = None, **more: Any) -> dict[str, Any]:
    body = {"prompt": RULES + "Next?", "max_tokens": 3, "temperature": 0, **more}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"forerun:{name}"))


@pytest.mark.slow
def test_a_second_request_is_read_from_the_cache(http: httpx.Client, served: Running) -> None:
    salt = {"cache_salt": "test_prefix"}
    queries, hits = (metric(served.url, f"prefix_cache_{name}_total") for name in ("queries", "hits"))
    first, second = (ask(served.url, **salt) for _ in range(2))
    assert cached(first) == 0
    assert cached(second) == first["usage"]["prompt_tokens"] - 1
    assert second["choices"] == first["choices"]
    assert metric(served.url, "prefix_cache_hits_total") - hits == cached(second)
    assert metric(served.url, "prefix_cache_queries_total") - queries >= 2 * first["usage"]["prompt_tokens"]
    assert metric(served.url, "kv_cache_cached_slots") > 0
    assert metric(served.url, "num_preemptions_total") == 0
    assert cached(ask(served.url, cache_salt="another")) == 0


def test_the_next_turn_of_a_chat_reads_what_is_new(http: httpx.Client) -> None:
    turns = [{"role": "system", "content": RULES}, {"role": "user", "content": "Name a ship."}]
    body: dict[str, Any] = {"messages": turns, "max_tokens": 5, "temperature": 0, "cache_salt": "chat"}
    first = http.post("/v1/chat/completions", json=body).json()
    turns += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    turns += [{"role": "user", "content": "And another."}]
    second = http.post("/v1/chat/completions", json=body).json()
    # the template may close the last turn otherwise
    assert cached(second) >= first["usage"]["prompt_tokens"] - 8
    fresh = http.post("/v1/chat/completions", json={**body, "cache_salt": "chat, cold"}).json()
    assert cached(fresh) == 0
    assert fresh["choices"] == second["choices"]


@pytest.mark.slow
def test_keys_share_nothing_unless_they_are_told_to(llm: LLM) -> None:
    keys = ("one", "two")
    for shares in (False, True):
        with serving(llm, api_keys=keys, share_prefixes=shares) as url:
            more = {"cache_salt": f"keys {shares}"}
            found = [cached(ask(url, key, **more)) > 0 for key in ("one", "two", "one", "two")]
            assert found == [False, shares, True, True]
