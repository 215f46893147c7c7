"""Streams as bytes on the wire: no message is lost, doubled or cut, however rounds and writes fall together.

HTTP/1.1 answers are written past the web framework, HTTP/1.0 answers by it: both must say the same.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.api.llm import LLM
from forerun.models.load.checkpoint import open_checkpoint
from forerun.server import limits
from forerun.server.settings import ServerSettings
from forerun.server.sse import Outbox, TextLine, as_line
from lab.host import HEAD, make
from tests.server.conftest import Running, start

TEXT = 'Zoë said: «naïve café» 👩‍👩‍👧 日本語のテキスト, STOP here 🚀🚀 and «"quoted\\» \n\t end. ' * 3
PROMPT = "Say it."


@pytest.fixture(scope="module")
def scripted() -> LLM:
    """Writes TEXT, a few tokens a round: characters and stop strings are split over rounds."""
    tokenizer = open_checkpoint("smollm2").tokenizer()
    prompt = tuple(tokenizer.encode(PROMPT))
    engine = make(HEAD, [(prompt, tokenizer.encode(TEXT))], 8, None)
    engine.tokenizer = tokenizer
    return LLM(engine, tokenizer, "m")


@contextmanager
def serving(llm: LLM) -> Iterator[str]:
    server, thread, url = start(llm, ServerSettings(("m",)))
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(10)


def ask(url: str, body: dict[str, Any], version: str = "1.1", path: str = "/v1/completions") -> bytes:
    """The whole answer as it came, headers included."""
    place, data = urlsplit(url), json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection((place.hostname, place.port), timeout=60) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        parts = list[bytes]()
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def split(answer: bytes) -> tuple[list[bytes], list[dict[str, Any]]]:
    """The chunks of HTTP, none where it has none, and the messages; every frame must be whole."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    chunks = list[bytes]()
    if b"transfer-encoding: chunked" in head.lower():
        while True:
            size, _, rest = rest.partition(b"\r\n")
            chunk, end, rest = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
            assert (len(chunk), end) == (int(size, 16), b"\r\n")
            if not chunk:
                break
            chunks.append(chunk)
        assert rest == b"", "nothing follows the last chunk"
        rest = b"".join(chunks)
    *messages, last = rest.split(b"\n\n")
    assert last == b""
    assert messages.pop() == b"data: [DONE]"
    assert all(message.startswith(b"data: ") for message in messages)
    return chunks, [json.loads(message.removeprefix(b"data: ")) for message in messages]


def without_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "id": "", "created": 0} for message in messages]


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for message in messages for choice in message["choices"])


BODY = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "speculative": {"budget": 3}}


def wanted(llm: LLM, **options: Any) -> str:
    return llm.generate(PROMPT, max_tokens=400, temperature=0, drafter="none", **options).text


@pytest.mark.parametrize("pure", [True, False])
def test_characters_that_rounds_split_arrive_whole(scripted: LLM, pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With uvicorn's own parser of HTTP (`pure`) and with httptools, where that is installed."""
    if pure:
        monkeypatch.setattr(limits, "Connection", type("Connection", (limits.Watched, H11Protocol), {}))
    with serving(scripted) as url:
        before = scripted.engine.stats.rounds
        chunks, messages = split(ask(url, BODY))
        rounds = scripted.engine.stats.rounds - before
    assert chunks, "negative control: it came in chunks"
    text = text_of(messages)
    assert text == wanted(scripted)
    assert text == TEXT
    pieces = [choice["text"] for message in messages for choice in message["choices"]]
    assert 100 < rounds < 360, "negative control: several tokens in some rounds"
    assert any(not piece for piece in pieces[:-1]), "negative control: a round ended within a character"


@pytest.mark.parametrize("stop", ["STOP here", "👧 日本", "ST", "d. Zoë", "not in it"])
def test_a_stop_string_that_rounds_split_is_not_sent(scripted: LLM, stop: str) -> None:
    with serving(scripted) as url:
        _, messages = split(ask(url, {**BODY, "stop": [stop]}))
    text = text_of(messages)
    assert text == wanted(scripted, stop=[stop])
    assert text == TEXT.partition(stop)[0]
    assert messages[-1]["choices"][0]["finish_reason"] == ("stop" if stop in TEXT else "length")


FIGURES = {"include_usage": True, "include_speculative": True, "include_rejected": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage in every chunk": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "what was drafted": {"stream_options": FIGURES},
    "logprobs": {"logprobs": 2, "stream_options": {"include_usage": True}},
    "two texts": {"n": 2, "seed": 3, "temperature": 0.8},
}
DRAFTED = {"prompt": "one two three four one two three four one two", "max_tokens": 24, "temperature": 0,
           "speculative": {"drafter": "ngram", "budget": 4}, "ignore_eos": True}  # fmt: skip


def by_choice(messages: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Of several texts each in its order: which comes first is the clock's affair."""
    found: dict[int, list[dict[str, Any]]] = {}
    for message in messages:
        found.setdefault(message["choices"][0]["index"] if message["choices"] else -1, []).append(message)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chats", [False, True])
def test_both_ways_say_the_same(name: str, chats: bool, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ways, real = list[bool](), Outbox.send
    monkeypatch.setattr(Outbox, "send", lambda *args: (ways.append(True), real(*args))[1])
    body, path = {**DRAFTED, **CASES[name]}, "/v1/completions"
    if chats:
        path, words = "/v1/chat/completions", body.pop("prompt")
        body["messages"] = [{"role": "user", "content": words}]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": 2}
    messages = split(ask(served.url, body, path=path))[1]
    assert ways == [True]
    others = split(ask(served.url, body, version="1.0", path=path))[1]
    assert ways == [True], "negative control: these are two ways"
    assert by_choice(without_names(messages)) == by_choice(without_names(others))


def test_every_token_has_its_figures_once(served: Running) -> None:
    """Ids, log-probabilities, counts of tokens and what was accepted belong together, message by message."""
    body = {**DRAFTED, "logprobs": 1, "stream_options": {**FIGURES, "continuous_usage_stats": True}}
    _, messages = split(ask(served.url, body))
    *pieces, last, figures = messages
    ids, seen, at = list[int](), 0, 0
    for piece in pieces:
        (choice,), own = piece["choices"], piece["speculative"]
        ids += own["tokens"]
        seen += len(own["tokens"])
        assert piece["usage"]["completion_tokens"] == seen
        assert own["accepted"] in (len(own["tokens"]) - 1, len(own["tokens"])), "all but the target's own"
        assert len(choice["logprobs"]["tokens"]) == len(own["tokens"])
        assert choice["logprobs"]["text_offset"][0] == at
        at += len(choice["text"])
    done = served.llm.generate(str(DRAFTED["prompt"]), max_tokens=24, temperature=0, ignore_eos=True, drafter="none")
    assert (ids, text_of(pieces)) == (done.token_ids, done.text)
    assert figures["usage"]["completion_tokens"] == seen == 24
    spec = figures["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] == sum(piece["speculative"]["accepted"] for piece in pieces) > 0
    assert spec["num_spec_steps"] == len(pieces) < 24
    assert last["choices"][0]["finish_reason"] == "length"


def test_streams_of_one_round_do_not_mix(scripted: LLM) -> None:
    answers: dict[int, str] = {}

    def one(number: int, url: str) -> None:
        answers[number] = text_of(split(ask(url, {**BODY, "max_tokens": 60 + number}))[1])

    with serving(scripted) as url:
        threads = [threading.Thread(target=one, args=(i, url)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for number, text in answers.items():
        own = scripted.generate(PROMPT, max_tokens=60 + number, temperature=0, drafter="none").text
        assert text == own
    assert len(answers) == 12


def test_what_falls_together_is_one_write(scripted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last piece, end of the text, usage and [DONE] come at once."""
    writes, real = list[int](), Outbox._write
    monkeypatch.setattr(Outbox, "_write", lambda *args: (writes.append(len(args[2])), real(*args))[1])
    with serving(scripted) as url:
        chunks, messages = split(ask(url, {**BODY, "stream_options": {"include_usage": True}}))
    assert sum(writes) == len(messages) + 1, "negative control: all went this way"
    assert len([size for size in writes if size]) == len(chunks)
    assert writes[-1] >= 4


def test_a_line_whose_text_changes_is_the_line_of_that_text() -> None:
    rng = random.Random(0)
    alphabet = '"\\/\b\f\n\r\t\0\x1f\x7f\u2028é日🚀\ufffd abc{}[]:,'
    for index in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))
        name = "".join(rng.choice(alphabet) for _ in range(5))

        def chunk(words: str, name: str = name, index: int = index) -> dict[str, Any]:
            return {"id": name, "choices": [{"index": index, "delta": {"content": words}, "logprobs": None}]}

        assert TextLine(chunk).with_text(text) == as_line(chunk(text))
        assert json.loads(as_line(chunk(text)).removeprefix(b"data: ")) == chunk(text)
