"""A real Ray cluster: texts of one engine, routing by prefix, a replica killed in mid-stream, a drafter changed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # to import it takes seconds, also where these tests are left out
    pytest.skip("ray is not here", allow_module_level=True)
pytest.importorskip("httpx")

import httpx

from forerun import LLM
from forerun.train.data.corpus import read_shard
from forerun.train.data.make import DataProgress, make_data
from forerun.train.options import DataOptions
from tests.cluster.conftest import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.ray]
STREAMS = 6
LONG = 240  # tokens: some seconds, so that a replica can be killed meanwhile
THINGS = ("rivers", "clocks", "bread", "whales", "chess", "glass", "wind", "salt")
Body = dict[str, Any]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", max_batch=8, max_length=1024, threads=1, drafter="none")


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def chat(thing: str, **more: Any) -> Body:
    asked = [{"role": "user", "content": f"Tell me all about {thing}."}]
    return {"messages": asked, "max_tokens": 24, "temperature": 0, **more}


def text_of(http: httpx.Client, body: Body) -> str:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def stream(url: str, body: Body, counts: list[int], place: int) -> tuple[str, list[str]]:
    """The text of a stream, and the errors in it; `counts[place]` grows with each chunk."""
    text, problems = "", []
    async with httpx.AsyncClient(base_url=url, timeout=90) as client:
        sent = client.stream("POST", "/v1/chat/completions", json={**body, "stream": True})
        async with sent as answer:
            if answer.status_code != 200:
                return "", [f"status {answer.status_code}"]
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    problems.append(chunk["error"]["message"])
                for choice in chunk.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    counts[place] += 1
    return text, problems


def test_texts_are_those_of_one_engine(http: httpx.Client, llm: LLM) -> None:
    for thing in THINGS[:2]:
        body = chat(thing)
        assert text_of(http, body) == llm.chat(body["messages"], max_tokens=24, temperature=0).text
    seeded = chat("chess", temperature=0.9, seed=11)
    assert text_of(http, seeded) == llm.chat(seeded["messages"], max_tokens=24, temperature=0.9, seed=11).text


def test_errors_and_grammars_cross_processes(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json=chat("salt", top_p=7)).status_code == 400
    assert http.post("/v1/chat/completions", json=chat("salt", speculative={"drafter": "no"})).status_code == 400
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = text_of(http, chat("salt", response_format=wanted, max_tokens=30))
    assert set(json.loads(found)) == {"warm"}
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such type"}}}
    assert http.post("/v1/chat/completions", json=chat("salt", response_format=wrong)).status_code == 400


def test_a_conversation_goes_where_its_prompt_is_cached(http: httpx.Client) -> None:
    for thing in ("iron", "moss", "rain", "coal", "silk"):
        opening = chat(thing, max_tokens=8)
        opening["messages"][0]["content"] += f" Begin with what {thing} is used for, and end with its history." * 2
        said = text_of(http, opening)
        more = [*opening["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        answer = http.post("/v1/chat/completions", json={**opening, "messages": more}).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 32, (thing, answer["usage"])


def test_a_replica_killed_in_mid_stream_loses_no_text(cluster: Cluster, http: httpx.Client, llm: LLM) -> None:
    bodies = [chat(thing, max_tokens=LONG, ignore_eos=True) for thing in THINGS[:STREAMS]]
    bodies[1] |= {"temperature": 0.8, "seed": 5}
    late = [chat(thing) for thing in THINGS]
    before = http.get("/replicas").json()

    async def scene() -> tuple[list[tuple[str, list[str]]], int]:
        counts = [0] * (len(bodies) + len(late))
        tasks = [asyncio.create_task(stream(cluster.url, body, counts, i)) for i, body in enumerate(bodies)]
        while min(counts[: len(bodies)]) < 8 and not any(task.done() for task in tasks):
            await asyncio.sleep(0.02)
        os.kill(before["replicas"][0]["pid"], signal.SIGKILL)
        running = sum(not task.done() for task in tasks)
        tasks += [
            asyncio.create_task(stream(cluster.url, body, counts, len(bodies) + i)) for i, body in enumerate(late)
        ]
        return await asyncio.gather(*tasks), running

    found, running = asyncio.run(scene())
    assert running >= STREAMS - 2, "texts ended before the replica was killed: make LONG longer"
    assert [problems for _, problems in found] == [[]] * len(found)
    sampling = [
        {"max_tokens": body["max_tokens"], "temperature": body["temperature"], "seed": body.get("seed"),
         "ignore_eos": body.get("ignore_eos", False)} for body in (*bodies, *late)
    ]  # fmt: skip
    wanted = llm.chat([body["messages"] for body in (*bodies, *late)], sampling)
    assert [text for text, _ in found] == [each.text for each in wanted]
    after = http.get("/replicas").json()
    assert after["resumed"] >= 1, "the replica that was killed wrote none of the texts"


def test_one_metrics_page_for_all_and_counts_do_not_fall(cluster: Cluster, http: httpx.Client) -> None:
    rows = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in rows}
    written = found['forerun:generation_tokens_total{model_name="smollm2"}']
    assert written >= STREAMS * LONG  # the one that was killed included
    assert found["forerun:replicas"] >= 1
    assert any(name.startswith("forerun:replica_running{") for name in found)


def test_another_drafter_is_taken_without_a_restart_and_streams_go_on(
    cluster: Cluster, http: httpx.Client, llm: LLM
) -> None:
    from forerun.server.cluster.run import update

    def drafter() -> str:
        answer = http.post("/v1/chat/completions", json=chat("tin", max_tokens=4)).json()
        return str(answer["metrics"]["speculative_decoding"]["drafter"])

    body = chat("clay", max_tokens=LONG, ignore_eos=True)
    pids = {each["pid"] for each in http.get("/replicas").json()["replicas"]}
    assert drafter() != "recycling"

    async def scene() -> tuple[str, list[str]]:
        counts = [0]
        task = asyncio.create_task(stream(cluster.url, body, counts, 0))
        while counts[0] < 4:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(update, replace(cluster.settings, drafter="recycling"))
        return await task

    text, problems = asyncio.run(scene())
    assert problems == []
    assert text == llm.chat(body["messages"], max_tokens=LONG, temperature=0, ignore_eos=True).text
    assert drafter() == "recycling"
    assert pids <= {each["pid"] for each in http.get("/replicas").json()["replicas"]}


def test_many_workers_make_the_shards_of_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    from forerun.train.data.make import ray_writer

    def options(name: str) -> DataOptions:
        return DataOptions(
            "smollm2", str(tmp_path / name), own_prompts=5, openings=("Tell me", "Why"), temperatures=(0.0, 1.0),
            max_prompt=40, max_length=72, batch=2, shard_tokens=250, device="cpu",
        )  # fmt: skip

    def shards(name: str) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted((tmp_path / name).glob("shard-*"))}

    def texts(name: str) -> list[tuple[int, list[int]]]:
        """In order, whatever shards they are in: an interrupted run keeps what it has in a shorter one."""
        found = [read_shard(file) for file in sorted((tmp_path / name).glob("shard-*"))]
        return [
            (number, shard["tokens"][start:end].tolist())
            for shard in found
            for number, start, end in zip(
                shard["numbers"].tolist(), shard["starts"].tolist(), shard["starts"].tolist()[1:], strict=False
            )
        ]

    def interrupt(at: DataProgress) -> None:
        if at.stage == "answers" and at.done == 6:
            raise KeyboardInterrupt

    make_data(options("one"))
    with ray_writer(options("many"), workers=2) as write:
        make_data(options("many"), write=write)
        with pytest.raises(KeyboardInterrupt):
            make_data(options("stopped"), interrupt, write=write)
        assert 0 < len(texts("stopped")) < len(texts("one"))
        make_data(options("stopped"), write=write)  # goes on where it was
    assert len(shards("one")) >= 3
    assert shards("many") == shards("one")
    assert texts("stopped") == texts("one")
    read = [(tmp_path / name / "prompts.jsonl").read_text() for name in ("one", "many", "stopped")]
    assert read[0] == read[1] == read[2]
