"""What the load test says of the host's time, and the server without a model that it can be measured on."""

from __future__ import annotations

import httpx

from lab.runner import parse
from lab.serve.emulated import load, texts_of
from lab.serve.load import PARTS, host_figures, read_host
from lab.serve.stream_client import Endpoint
from tests.server.conftest import Running


def test_a_server_tells_what_its_threads_spent(served: Running) -> None:
    endpoint = Endpoint(served.url, "smollm2")
    before = read_host(endpoint)
    body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=30).status_code == 200
    assert host_figures(before, read_host(endpoint)).keys() >= {
        "engine_us_per_token",
        "front_us_per_token",
        "engine_cpu_ms_per_round",
        *(f"{part}_ms_per_round" for part in PARTS),
    }
    assert host_figures(before, before) == {}, "nothing was written"
    assert read_host(Endpoint("http://127.0.0.1:9", "m")) == {}
    assert host_figures({}, before) == {}


def test_figures_are_per_token_and_per_round() -> None:
    before = {"engine": 1.0, "front": 2.0, "others": 0.5, "tokens": 100.0, "rounds": 50.0, "host": 1.0}
    before |= {"prompt": 0.0, "draft": 0.5, "pass": 2.0, "verdict": 0.0}
    after = {"engine": 1.2, "front": 2.1, "others": 0.5, "tokens": 1100.0, "rounds": 150.0, "host": 1.5}
    after |= {"prompt": 0.1, "draft": 0.6, "pass": 2.4, "verdict": 0.0}
    assert host_figures(before, after) == {
        "engine_us_per_token": 200.0,
        "front_us_per_token": 100.0,
        "others_us_per_token": 0.0,
        "engine_cpu_ms_per_round": 2.0,
        "prompt_ms_per_round": 1.0,
        "draft_ms_per_round": 1.0,
        "pass_ms_per_round": 4.0,
        "verdict_ms_per_round": 0.0,
        "host_ms_per_round": 5.0,
        "tokens_per_round": 10.0,
    }


def test_the_emulated_server_writes_the_texts_that_it_was_given() -> None:
    llm = load(parse("serve-emulated", ["--at-once", "--max-num-seqs", "4"]))
    asked = texts_of(llm.tokenizer)[:6]
    for drafter in (None, "none"):
        done = llm.generate([prompt for prompt, _ in asked], max_tokens=32, temperature=0, drafter=drafter)
        assert [each.token_ids for each in done] == [answer[:32] for _, answer in asked]
