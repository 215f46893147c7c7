"""Many streams at once with clients that leave, clients that read slowly and faults: nothing is lost or changed.

A few seconds by default; FORERUN_SOAK=180 is the long run. From a minute on, memory must not grow in its second half.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from typing import Any

import httpx
import pytest

from forerun import LLM, EngineConfig, SamplingParams
from tests.server.test_robust import serving, sometimes

SECONDS = float(os.environ.get("FORERUN_SOAK", "6"))
STREAMS = 32
PROMPTS = [f"List: a{i} b{i} c{i} a{i} b{i}" for i in range(8)]
TOKENS = 12


def resident() -> int:
    """Bytes of memory that this process holds: server and clients; 0 where the system does not tell."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Client:
    """One stream after the other until the time is up."""

    def __init__(self, http: httpx.AsyncClient, wanted: list[str], number: int) -> None:
        self.http, self.wanted, self.dice = http, wanted, random.Random(number)
        self.finished = self.left = 0
        self.wrong: list[str] = []

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            which = self.dice.randrange(len(PROMPTS))
            leaves, slow = self.dice.random() < 0.2, self.dice.random() < 0.2
            drafter = self.dice.choice(["ngram", "ngram+eagle3", "none"])
            text = await self._one(PROMPTS[which], drafter, leaves, slow)
            if text is None:
                self.left += 1
                continue
            self.finished += 1
            if text != self.wanted[which]:
                self.wrong.append(f"{drafter}: {text!r} instead of {self.wanted[which]!r}")

    async def _one(self, prompt: str, drafter: str, leaves: bool, slow: bool) -> str | None:
        body: dict[str, Any] = {
            "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
            "speculative": {"drafter": drafter},
        }  # fmt: skip
        text, ended = "", False
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if leaves and text:
                    return None
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    if "error" in chunk:
                        return f"error: {chunk['error']}"
                if slow:
                    await asyncio.sleep(0.02)
        return text if ended else f"lost after {text!r}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With a KV cache that is soon full: what is cached would else grow for minutes, up to its limit."""
    return LLM.load("smollm2", config=EngineConfig(max_batch=4, max_length=1024, kv_memory="64MiB"))


@pytest.mark.slow
def test_soak(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [llm.generate(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True)).text for prompt in PROMPTS]
    drafter = llm.engine.drafters.get(llm.engine.default_drafter)
    monkeypatch.setattr(drafter, "propose", sometimes(drafter.propose, 53))
    monkeypatch.setattr(llm.engine.target, "score", sometimes(llm.engine.target.score, 97))

    async def all_clients(url: str) -> list[Client]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            clients = [Client(http, wanted, i) for i in range(STREAMS)]
            until = time.monotonic() + SECONDS
            await asyncio.gather(*(client.run(until) for client in clients))
        return clients

    async def watched(url: str) -> tuple[list[Client], list[int]]:
        work, sizes = asyncio.ensure_future(all_clients(url)), list[int]()
        while not work.done():
            sizes.append(resident())
            await asyncio.sleep(min(1.0, SECONDS / 10))
        return await work, sizes

    with serving(llm) as url:
        clients, sizes = asyncio.run(watched(url))
        stats = httpx.get(f"{url}/stats", timeout=60).json()
        deadline = time.monotonic() + 10
        while llm.engine.target.used_slots and time.monotonic() < deadline:
            time.sleep(0.05)
        assert llm.engine.target.used_slots == 0, "what clients left behind was freed"
        assert (llm.engine.running, list(llm.engine.waiting)) == ([], []), stats
    half, end = max(sizes[: len(sizes) // 2]), max(sizes[len(sizes) // 2 :])
    written = sum(client.finished for client in clients)
    # pytest -s
    sys.stdout.write(f"{written} texts, resident {half >> 20} MiB in the first half, {end >> 20} later")
    assert SECONDS < 60 or end < half + (8 << 20), f"memory grows: {sizes}"
    assert [each for client in clients for each in client.wrong] == []
    assert sum(client.finished for client in clients) >= STREAMS
    assert sum(client.left for client in clients) >= 1
