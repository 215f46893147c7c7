"""Bodies: what cannot fit is refused before it is tokenised; what may take long is never read in the front."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.models.load.tokenizer import Tokenizer
from forerun.server import reading
from forerun.server.errors import ApiError, as_api_error
from forerun.server.reading import ReaderFacts, ReaderProcess, RequestReader, What
from forerun.server.service import QUICK
from forerun.server.settings import ServerSettings
from tests.server.conftest import start

CONTEXT = 1024
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
HI = [{"role": "user", "content": "Hi"}]
LONG = "A long prompt, of some words. 漢字 é 😀\n" * 300


@pytest.fixture(scope="module")
def facts(llm: LLM) -> ReaderFacts:
    return ReaderFacts(llm.engine.target.vocab_size, False, ("m",), 16, False)


@pytest.fixture
def reader(llm: LLM, facts: ReaderFacts) -> RequestReader:
    return RequestReader(llm.tokenizer, facts)


def refusal(reader: RequestReader, what: What, body: Any) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Exception) as raised:
        reader.read(what, raw, CONTEXT)
    return as_api_error(raised.value)


HUGE: list[tuple[What, Callable[[], dict[str, Any]], str]] = [
    ("tokenize", lambda: {"prompt": "a" * 1_950_000}, "tokens ("),
    ("tokenize", lambda: {"prompt": "漢" * 30_000}, "tokens ("),
    ("tokenize", lambda: {"messages": HI * 100_000}, "100000 messages"),
    ("chat", lambda: {"messages": [{"role": "user", "content": "a" * 1_950_000}]}, "tokens ("),
    ("chat", lambda: {"messages": HI * 1025}, "1025 messages"),
    ("completion", lambda: {"prompt": "7" * 4_000_000}, "tokens ("),
    ("completion", lambda: {"prompt": ["7" * 4_000_000, "x"]}, "tokens ("),
    ("completion", lambda: {"prompt": [5] * 1025}, "1025 tokens"),
    ("completion", lambda: {"prompt": [[5] * 1025]}, "1025 tokens"),
    ("detokenize", lambda: {"tokens": [5] * 1_000_000}, "1000000 token ids"),
]


@pytest.mark.parametrize(("what", "make", "says"), HUGE)
def test_what_cannot_fit_the_context_is_refused_before_it_is_tokenised(
    reader: RequestReader, what: What, make: Callable[[], Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    for name in ("encode", "decode"):
        monkeypatch.setattr(Tokenizer, name, lambda *given, name=name: done.append(name) or [])
    error = refusal(reader, what, make())
    assert (error.status, error.code, done) == (400, "context_length_exceeded", [])
    assert says in error.message
    assert str(CONTEXT) in error.message


def test_too_many_prompts_are_refused_before_they_are_tokenised(
    reader: RequestReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    error = refusal(reader, "completion", {"prompt": ["x"] * 400_000})
    assert (error.status, error.param) == (400, "n")
    assert "400000 prompts" in error.message


def test_the_longest_prompt_that_fits_is_not_refused(reader: RequestReader, llm: LLM) -> None:
    """The longest token as often as the context holds it; a byte more is refused."""
    longest = "\n" + " " * 80
    _, (job,) = reader.read("completion", json.dumps({"prompt": longest * 1000, "max_tokens": 24}).encode(), CONTEXT)
    assert len(job.prompt) == 1000
    found = json.loads(reader.read("tokenize", json.dumps({"prompt": longest * CONTEXT}).encode(), CONTEXT))
    assert found["count"] == CONTEXT
    error = refusal(reader, "tokenize", {"prompt": longest * CONTEXT + "x"})
    assert error.message == (
        f"the prompt has at least 1025 tokens ({81 * CONTEXT + 1} characters); "
        "the context holds at most 1024; shorten it"
    )


@pytest.mark.parametrize(
    ("what", "raw", "says"),
    [
        ("chat", b'{"messages": ' + b"[" * 500_000 + b"]" * 500_000 + b"}", "recursion limit"),
        ("chat", b'{"messages": [{"role": "\\ud800", "content": "x"}]}', "surrogate"),
        ("chat", b'{"\\udfff": 1, "messages": [{"role": "user", "content": "x"}]}', "surrogate"),
        ("completion", b'{"prompt": "x", "seed": ' + b"7" * 100_000 + b"}", ""),
        ("completion", b'{"prompt": "x", "temperature": NaN}', "not JSON"),
        ("completion", b'{"prompt": "x\xff"}', "not JSON"),
        ("completion", b"\xff\xfe{", "not JSON"),
        ("completion", b"", "not JSON"),
        ("completion", b"[1]", "must be a JSON object"),
        ("completion", b'{"prompt": ["x", 1, [2], {}]}', "prompt: "),
        ("completion", b'{"prompt": "x", "stop": ["' + b"a" * 8000 + b'", "' + b"a" * 193 + b'"]}', "8193 characters"),
        ("completion", b'{"prompt": "x", "cache_salt": "' + b"a" * 1025 + b'"}', "at most 1024"),
        ("completion", b'{"prompt": "x", "speculative": {"drafter": "' + b"a" * 1025 + b'"}}', "at most 1024"),
        ("chat", json.dumps({"messages": HI, "tools": [{"function": {"name": "f"}}] * 1025}).encode(), "at most 1024"),
    ],
)  # fmt: skip
def test_damaged_bodies_are_400s(reader: RequestReader, what: What, raw: bytes, says: str) -> None:
    error = refusal(reader, what, raw)
    assert error.status == 400
    assert says in error.message
    assert "\n" not in error.message
    assert len(error.message) < 600


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message", "self"])
def test_template_variables_that_are_fields_of_the_request_are_refused(reader: RequestReader, name: str) -> None:
    error = refusal(reader, "chat", {"messages": HI, "chat_template_kwargs": {name: 1}})
    assert (error.status, error.param) == (400, "chat_template_kwargs")
    assert repr(name) in error.message
    assert reader.read("chat", json.dumps({"messages": HI, "chat_template_kwargs": {"x": 1}}).encode(), CONTEXT)


def test_a_last_message_that_is_to_be_continued_stays_open(reader: RequestReader, llm: LLM) -> None:
    begun = [*HI, {"role": "assistant", "content": "Tom is "}]
    body = {"messages": begun, "continue_final_message": True}
    _, (job,) = reader.read("chat", json.dumps(body).encode(), CONTEXT)
    text = llm.tokenizer.decode(job.prompt, skip_special=False)
    assert text == llm.tokenizer.chat_text(HI) + "Tom is "
    error = refusal(reader, "chat", body | {"add_generation_prompt": True})
    assert (error.status, error.param) == (400, "continue_final_message")


def test_a_byte_order_mark_is_no_part_of_a_body(reader: RequestReader) -> None:
    assert reader.read("tokenize", b'\xef\xbb\xbf{"prompt": "a"}', CONTEXT)


def test_the_front_keeps_no_prompt_unless_it_is_to_be_logged(llm: LLM, facts: ReaderFacts) -> None:
    raw = json.dumps({"messages": HI, "chat_template_kwargs": {"x": 1}, "temperature": 0.5}).encode()
    body, _ = RequestReader(llm.tokenizer, facts).read("chat", raw, CONTEXT)
    assert (body.messages, body.chat_template_kwargs, body.temperature) == ([], None, 0.5)
    body, _ = RequestReader(llm.tokenizer, facts._replace(keeps_prompts=True)).read("chat", raw, CONTEXT)
    assert body.messages == HI


@pytest.fixture(scope="module")
def threaded(llm: LLM) -> Iterator[str]:
    """A front in this process, so that what it calls can be seen."""
    server, thread, url = start(llm, ServerSettings(("smollm2",)))
    yield url
    server.should_exit = True
    thread.join(10)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("path", "body", "in_place"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}, True),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1, "user": "x" * QUICK}, False),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, "response_format": SCHEMA}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 900}], "max_tokens": 1}, True),
        ("/v1/completions", {"prompt": "#" * QUICK, "max_tokens": 1}, False),
        ("/v1/completions", {"prompt": [5] * 900, "max_tokens": 1}, True),
        ("/tokenize", {"prompt": LONG}, False),
        ("/tokenize", {"prompt": "word"}, True),
        ("/detokenize", {"tokens": [50] * 1000, "model": "smollm2"}, True),
        ("/detokenize", {"tokens": [50000] * 3000, "model": "smollm2"}, False),
    ],
)  # fmt: skip
def test_what_may_take_long_never_runs_in_the_front(
    threaded: str, path: str, body: dict[str, Any], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on its event loop nor on a thread: parsing, validation, templates and tokenising."""
    done = list[str]()

    def seen(kind: type, name: str) -> None:
        real = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given, **more: (done.append(name), real(*given, **more))[1])

    for kind, name in ((Tokenizer, "encode"), (Tokenizer, "chat_text")):
        seen(kind, name)
    monkeypatch.setattr(reading, "from_json", lambda raw, real=reading.from_json, **more: real(_small(raw), **more))
    answer = httpx.post(threaded + path, json=body, timeout=60)
    assert answer.status_code == (400 if len(body.get("tokens", ())) > CONTEXT else 200), answer.text
    assert bool(done) == (in_place and not isinstance(body.get("prompt"), list) and "tokens" not in body)


def _small(raw: bytes) -> bytes:
    assert len(raw) <= QUICK, "a large body was parsed in the front"
    return raw


BODIES: list[tuple[What, dict[str, Any]]] = [
    ("chat", {"messages": [{"role": "user", "content": LONG[:2000]}], "n": 2, "seed": 7, "logit_bias": {"5": 1.5}}),
    ("chat", {"messages": HI, "tools": [{"function": {"name": "f"}}], "tool_choice": "required", "stop": ["a"]}),
    ("chat", {"messages": HI, "response_format": SCHEMA, "speculative": {"budget": {"nodes": 4}}, "stream": True}),
    ("completion", {"prompt": ["a b", LONG[:1000]], "stream_options": {"include_usage": True}, "logprobs": 3}),
    ("completion", {"prompt": [5, 6], "temperature": 0}),
    ("tokenize", {"prompt": LONG, "return_token_strs": True}),
    ("detokenize", {"tokens": [*range(1000)]}),
]  # fmt: skip


def with_process(llm: LLM, facts: ReaderFacts, work: Callable[[ReaderProcess], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        process = ReaderProcess(llm.tokenizer, facts)
        try:
            await asyncio.wait_for(work(process), 120)
        finally:
            process.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_process_reads_as_the_front_does(llm: LLM, facts: ReaderFacts, reader: RequestReader) -> None:
    async def work(process: ReaderProcess) -> None:
        for what, body in BODIES:
            raw = json.dumps(body).encode()
            assert await process.read(what, raw, CONTEXT) == reader.read(what, raw, CONTEXT)
        for what, make, _ in HUGE:
            raw = json.dumps(make()).encode()
            with pytest.raises(ApiError) as raised:
                await process.read(what, raw, CONTEXT)
            wanted = refusal(reader, what, raw)
            assert (raised.value.status, raised.value.body()) == (wanted.status, wanted.body())
        assert process._child is not None
        assert os.getpriority(os.PRIO_PROCESS, process._child[0].pid) > os.getpriority(os.PRIO_PROCESS, 0)

    with_process(llm, facts, work)


RAW = b'{"prompt": "a"}'


def test_a_process_that_was_killed_is_started_again(llm: LLM, facts: ReaderFacts) -> None:
    async def work(process: ReaderProcess) -> None:
        before = await process.read("tokenize", RAW, CONTEXT)
        assert process._child is not None
        os.kill(process._child[0].pid, signal.SIGSTOP)
        waiting = asyncio.create_task(process.read("tokenize", RAW, CONTEXT))
        behind = asyncio.create_task(process.read("tokenize", RAW, CONTEXT))
        await asyncio.sleep(0)
        process._child[0].kill()
        with pytest.raises(ApiError, match="has ended"):
            await waiting
        assert await behind == before, "by a new one"

    with_process(llm, facts, work)


@pytest.mark.slow
def test_what_takes_too_long_is_given_up(llm: LLM, facts: ReaderFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(process: ReaderProcess) -> None:
        before = await process.read("tokenize", RAW, CONTEXT)
        assert process._child is not None
        os.kill(process._child[0].pid, signal.SIGSTOP)  # as if it had much to do
        with monkeypatch.context() as patch:
            patch.setattr(reading, "LONGEST", 0.05)
            with pytest.raises(ApiError, match=r"could not be read within 0.05 s") as raised:
                await process.read("tokenize", RAW, CONTEXT)
        assert raised.value.status == 400
        assert await process.read("tokenize", RAW, CONTEXT) == before

    with_process(llm, facts, work)


def test_small_bodies_are_read_first_and_nothing_for_who_has_left(
    llm: LLM, facts: ReaderFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[int]()

    async def work(process: ReaderProcess) -> None:
        await process.read("tokenize", RAW, CONTEXT)
        assert process._child is not None
        channel, real = process._child[1], process._child[1].send  # other servers of these tests send as well
        monkeypatch.setattr(channel, "send", lambda order: (sent.append(len(order[1])), real(order)))
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        later = loop.call_later
        monkeypatch.setattr(loop, "call_later", lambda *given: timers.append(later(*given)) or timers[-1])
        sizes = (300, 9000, 500, 700, 100)
        asked = [
            asyncio.create_task(process.read("tokenize", json.dumps({"prompt": "a" * (size - 14)}).encode(), CONTEXT))
            for size in sizes
        ]
        await asyncio.sleep(0)
        asked[3].cancel()
        await asyncio.wait(asked)
        assert len(timers) == 4
        assert all(timer.cancelled() for timer in timers), "no limit of one ends the reading of another"

    with_process(llm, facts, work)
    assert sent == [300, 100, 500, 9000]


def test_bodies_that_wait_take_little_memory(llm: LLM, facts: ReaderFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_WAITING", 40)

    async def work(process: ReaderProcess) -> None:
        asked = [asyncio.create_task(process.read("tokenize", RAW, CONTEXT)) for _ in range(4)]
        await asyncio.wait(asked)
        refused = [each.exception() for each in asked]
        assert [each is None for each in refused] == [True, True, True, False]
        assert isinstance(refused[3], ApiError)
        assert (refused[3].status, refused[3].headers) == (429, {"Retry-After": "1"})
        asked = [asyncio.create_task(process.read("tokenize", RAW, CONTEXT)) for _ in range(3)]
        await asyncio.sleep(0)
        asked[1].cancel()
        await asyncio.sleep(0)
        await process.read("tokenize", RAW, CONTEXT)  # who has left takes no room
        await asyncio.wait(asked)

    with_process(llm, facts, work)


def test_who_waits_is_told_when_the_server_ends(llm: LLM, facts: ReaderFacts) -> None:
    async def work(process: ReaderProcess) -> None:
        asked = [asyncio.create_task(process.read("tokenize", RAW, CONTEXT)) for _ in range(2)]
        await asyncio.sleep(0)
        process.close()
        await asyncio.wait(asked)
        assert [error.status for each in asked if isinstance(error := each.exception(), ApiError)] == [503, 503]

    with_process(llm, facts, work)
