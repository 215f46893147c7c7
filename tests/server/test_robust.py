"""Faults, deaths, deadlines, keys, slow readers, shutdown: what goes wrong stays where it went wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams
from forerun.core.params import EngineConfig
from forerun.server.settings import ServerSettings, read_keys
from tests.server.conftest import start

PROMPTS = [f"Count: {i} {i + 1} {i} {i + 1} {i}" for i in range(16)]


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[str]:
    server, thread, url = start(llm, ServerSettings(("m",), **settings))
    yield url
    server.should_exit = True
    thread.join(10)


def stream(url: str, prompt: str, **options: Any) -> tuple[str, str | None, dict[str, Any] | None]:
    """A streamed completion: its text, why it ended, and its error."""
    text, reason, error = "", None, None
    body = {"prompt": prompt, "temperature": 0, "stream": True, "max_tokens": 16, "ignore_eos": True, **options}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        if answer.status_code != 200:
            return "", None, json.loads(answer.read())["error"]
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            error = chunk.get("error", error)
            for choice in chunk.get("choices", ()):
                text, reason = text + choice["text"], choice["finish_reason"] or reason
    return text, reason, error


def sometimes(real: Callable[..., Any], every: int) -> Callable[..., Any]:
    """A function that fails at every n-th call: never twice in a row, which would rightly end a request."""
    calls = count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) % every == 0:
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    return call


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[str]:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    return [llm.generate(prompt, params).text for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["drafter", "pass"])
def test_faults_change_no_text(
    part: str, llm: LLM, wanted: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if part == "drafter":
        drafter = llm.engine.drafters.get(llm.engine.default_drafter)
        monkeypatch.setattr(drafter, "propose", sometimes(drafter.propose, 9))
    else:
        monkeypatch.setattr(llm.engine.target, "score", sometimes(llm.engine.target.score, 7))
    with serving(llm) as url, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: stream(url, prompt), PROMPTS))
    assert any("injected" in record.getMessage() for record in caplog.records), "no fault was injected"
    assert [text for text, _, _ in found] == wanted
    assert {reason for _, reason, _ in found} == {"length"}
    assert llm.engine.target.used_slots == 0


def test_an_answer_names_what_drafted(
    llm: LLM, wanted: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    with serving(llm) as url, caplog.at_level(logging.INFO):
        named = list[str]()
        for _ in range(2):
            asked = {**body, "speculative": {"drafter": "ngram", "budget": 4}}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
            assert answer["choices"][0]["text"] == wanted[0]
            named.append(answer["metrics"]["speculative_decoding"]["drafter"])
            monkeypatch.setattr(llm.engine.drafters.get("ngram"), "propose", sometimes(lambda: None, 1))
    assert named == ["ngram", "none"]
    logged = [record.getMessage() for record in caplog.records if '"drafter"' in record.getMessage()]
    assert [json.loads(line)["drafter"] for line in logged] == named


@pytest.mark.slow
def test_one_request_that_always_fails_does_not_hurt_the_others(
    llm: LLM, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that fails whenever one prompt is in it: that request ends with an error, the rest with their texts."""
    real, bad = llm.engine.target.score, tuple(llm.tokenizer.encode(PROMPTS[3]))

    def score(seqs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(seq.request.prompt == bad for seq in seqs):
            raise RuntimeError("injected")
        return real(seqs, *args, **kwargs)

    monkeypatch.setattr(llm.engine.target, "score", score)
    with serving(llm) as url, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: stream(url, prompt), PROMPTS))
    for i, (text, reason, error) in enumerate(found):
        if i == 3:
            assert error is not None
            assert error["type"] == "server_error"
        else:
            assert (text, reason, error) == (wanted[i], "length", None)


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
def test_an_engine_that_died_is_reported(restart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.load("smollm2", config=EngineConfig(max_batch=4, max_length=512))
    with serving(llm, restart=restart) as url:
        before = stream(url, "Once", max_tokens=8)
        real = llm.engine.step

        def step() -> Any:
            if llm.engine.stats.rounds > before_rounds + 5:
                monkeypatch.setattr(llm.engine, "step", real)
                raise SystemError("the engine is gone")
            return real()

        before_rounds = llm.engine.stats.rounds
        monkeypatch.setattr(llm.engine, "step", step)
        _, reason, error = stream(url, "Once", max_tokens=200)
        assert reason is None
        assert error is not None, "its requests end with an error"
        if not restart:
            assert httpx.get(f"{url}/health", timeout=60).status_code == 503
            assert httpx.get(f"{url}/ready", timeout=60).status_code == 503
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 500
            return
        deadline = time.monotonic() + 60
        while httpx.get(f"{url}/health", timeout=60).status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stream(url, "Once", max_tokens=8) == before
        assert llm.engine.target.used_slots == 0


@pytest.mark.slow
def test_deadlines_end_streams_and_whole_answers(llm: LLM) -> None:
    with serving(llm, deadline=0.5) as url:
        _, reason, error = stream(url, "Once", max_tokens=900)
        assert (reason, error and error["code"]) == (None, "timeout")
        whole = httpx.post(
            f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 900, "ignore_eos": True}, timeout=60
        )
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        assert stream(url, "Once", max_tokens=2)[1] == "length", "the next one is served"


@pytest.mark.slow
def test_keys_from_a_file_and_their_rates(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst\n\nsecond\n")
    with serving(llm, api_keys=read_keys(tmp_path / "keys"), rate_limit=3) as url:

        def ask(key: str | None) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            body = {"prompt": "x", "max_tokens": 1}
            return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)

        assert [ask(key).status_code for key in (None, "wrong", "# ours")] == [401, 401, 401]
        assert [ask("first").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert ask("second").status_code == 200, "another key has a rate of its own"
        assert int(ask("first").headers["retry-after"]) >= 1
        for path in ("/v1/models", "/tokenize", "/detokenize"):
            assert httpx.request("GET" if "v1" in path else "POST", url + path, json={}, timeout=60).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert httpx.get(url + path, timeout=60).status_code == 200


def test_prompts_are_logged_only_where_asked(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forerun.server")
    for log_prompts in (False, True):
        caplog.clear()
        with serving(llm, log_prompts=log_prompts) as url:
            body = {"prompt": "A secret word", "max_tokens": 2}
            httpx.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}, timeout=30)
        lines = [r.getMessage() for r in caplog.records if r.name == "forerun.server.service"]
        facts = json.loads(lines[-1])
        assert (facts["request"], facts["tokens"]) == ("mine", 2)
        assert ("A secret word" in caplog.text) is log_prompts


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real command, until it has ended."""
    command = [sys.executable, "-m", "forerun", "serve", "--port", "0", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving" in line)
        yield process, next(word for word in line.split() if word.startswith("http"))
        assert process.wait(20) == 0


@pytest.mark.slow
def test_what_does_not_end_in_time_is_said() -> None:
    """Enough time: test_engine_process.py."""
    with started("--drain-seconds", "0.5") as (process, url):
        body = {"prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"the server is shutting down"' in rest[-2]
