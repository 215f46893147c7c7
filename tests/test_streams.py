"""Streams of LLM and AsyncLLM: events whose texts join to the whole, a completion behind them, and leaving early."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from forerun import AsyncLLM, AsyncStream, Completion, Event, Stream
from forerun.core.errors import CannotSample, ForerunError, InvalidInput
from forerun.core.params import SamplingParams
from tests.test_llm import make, until

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1 << 19, ignore_eos=True)
FULL_STOP = {"logit_bias": {str(token): -float("inf") for token in range(26)}}


def run_async(work: Callable[[AsyncLLM], Any]) -> Any:
    """What a coroutine gives that is handed a served model, whose requests are all gone afterwards."""

    async def main() -> Any:
        async with AsyncLLM(make()) as llm:
            found = await work(llm)
            assert llm.requests == 0
            await llm.generate("a", PARAMS)  # a round, so that what was dropped is gone
            assert not llm.engine.busy
            return found

    return asyncio.run(main())


def test_joined_texts_of_events_are_the_completions_and_nothing_else_comes() -> None:
    llm = make()
    for stream in (llm.stream("abc", PARAMS), llm.stream_chat("abc", PARAMS, system="xy")):
        assert isinstance(stream, Stream)
        events = list(stream)
        assert {type(event) for event in events} == {Event}
        assert "".join(event.text for event in events) == stream.completion.text
        assert [token for event in events for token in event.tokens] == stream.completion.token_ids
        assert list(stream) == [], "a stream that has ended stays so"
    assert stream.completion.prompt_tokens == 5, "the system message is in the prompt"
    assert stream.completion == without_times(stream.completion, llm.chat("abc", PARAMS, system="xy"))


def without_times(like: Completion, other: Completion) -> Completion:
    """Another completion with the seconds and the cache hits of this one."""
    from dataclasses import replace

    times = ("seconds", "queue_seconds", "cached_tokens")
    return replace(other, **{name: getattr(like, name) for name in times})


def test_an_async_stream_is_the_same() -> None:
    async def read(llm: AsyncLLM) -> list[str]:
        texts = []
        for stream in (llm.stream("abc", PARAMS), llm.stream_chat("abc", PARAMS, system="xy")):
            assert isinstance(stream, AsyncStream)
            events = [event async for event in stream]
            assert {type(event) for event in events} == {Event}
            texts.append("".join(event.text for event in events))
            assert texts[-1] == stream.completion.text
            assert [event async for event in stream] == []
        return texts

    llm = make()
    wanted = [llm.generate("abc", PARAMS).text, llm.chat("abc", PARAMS, system="xy").text]
    assert run_async(read) == wanted


def one_line(stream: Any) -> str:
    with pytest.raises(ForerunError) as caught:
        _ = stream.completion
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_before_the_end_there_is_no_completion_and_the_error_says_what_to_do() -> None:
    llm = make()
    stream = llm.stream("abc", PARAMS)
    assert "read the stream to its end first" in one_line(stream)
    next(stream)
    assert "read the stream to its end first" in one_line(stream)
    stream.close()
    assert "it was closed before its text ended" in one_line(stream)
    assert list(stream) == []

    async def ask(served: AsyncLLM) -> list[str]:
        other, said = served.stream("abc", PARAMS), list[str]()
        await anext(other)
        said.append(one_line(other))
        await other.close()
        return [*said, one_line(other)]

    first, second = run_async(ask)
    assert "read the stream to its end first" in first
    assert "it was closed before its text ended" in second


def test_the_completion_is_there_with_the_last_event() -> None:
    """Whoever leaves the loop at `event.finished` has the whole text too."""
    stream = make().stream("abc", PARAMS)
    for event in stream:
        if event.finished:
            break
    assert stream.completion.finish_reason == event.finished == "length"

    async def read(llm: AsyncLLM) -> str:
        stream = llm.stream("abc", PARAMS)
        async for event in stream:
            if event.finished:
                break
        return stream.completion.finish_reason

    assert run_async(read) == "length"


@pytest.mark.slow
def test_a_stream_that_is_left_drops_its_request() -> None:
    llm = make()
    with llm.stream("abc", ENDLESS) as stream:
        next(stream)
        assert llm.engine.busy
    assert not llm.engine.busy
    forgotten = llm.stream("abc", ENDLESS)
    next(forgotten)
    assert llm.engine.busy, "negative control"
    del forgotten
    gc.collect()
    assert not llm.engine.busy
    llm.stream("abc", ENDLESS)
    assert not llm.engine.busy, "a stream that nobody reads asks for nothing"

    async def leave(served: AsyncLLM) -> None:
        async with served.stream("abc", ENDLESS) as stream:
            await anext(stream)
            assert served.requests == 1
        assert served.requests == 0
        async for _ in served.stream("abc", ENDLESS):
            break
        gc.collect()
        await until(lambda: served.requests == 0)  # the event loop closes what was collected

    run_async(leave)


def test_what_is_wrong_is_said_where_the_stream_is_made() -> None:
    """Not at its first event, which may be read far away."""
    with pytest.raises(InvalidInput, match="did you mean 'max_tokens'"):
        make().stream("abc", max_token=3)  # type: ignore[call-arg]

    async def ask(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidInput, match="did you mean 'max_tokens'"):
            llm.stream("abc", max_token=3)  # type: ignore[call-arg]

    run_async(ask)


def test_the_error_that_ends_a_text_is_raised_and_remembered() -> None:
    llm = make()
    stream = llm.stream("abc", FULL_STOP)
    with pytest.raises(CannotSample) as caught:
        list(stream)
    assert one_line(stream).endswith(f"its text ended with an error: {caught.value}")
    assert not llm.engine.busy

    async def ask(served: AsyncLLM) -> str:
        stream = served.stream("abc", FULL_STOP)
        with pytest.raises(CannotSample):
            _ = [event async for event in stream]
        return one_line(stream)

    assert "ended with an error" in run_async(ask)


def test_an_interrupt_between_two_events_drops_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    stream = llm.stream("abc", ENDLESS)
    next(stream)

    def interrupted(item: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stream, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert not llm.engine.busy
    assert "KeyboardInterrupt" in one_line(stream)


def test_a_request_is_ended_by_its_name() -> None:
    """From another thread, and from another coroutine; those of other names go on."""
    llm = make()
    stream, other = (llm.stream("abc", ENDLESS, request_id=name) for name in ("seven", "eight"))
    next(stream)
    next(other)
    thread = threading.Thread(target=llm.abort, args=("seven",))
    thread.start()
    thread.join()
    text = "".join(event.text for event in stream)
    assert stream.completion.finish_reason == "aborted"
    assert stream.completion.text.endswith(text)
    assert stream.completion.tokens < 1 << 19
    assert len(llm.engine.running) == 1
    other.close()

    async def ask(served: AsyncLLM) -> list[str]:
        tasks = [
            asyncio.create_task(served.generate("abc", params, request_id=name))
            for params, name in ((ENDLESS, "seven"), (PARAMS, "eight"))
        ]
        await until(lambda: served.requests > 0)
        served.abort("seven")
        return [done.finish_reason for done in await asyncio.gather(*tasks)]

    assert run_async(ask) == ["aborted", "length"]


def test_events_and_completions_spell_the_tokens_of_their_logprobs() -> None:
    llm = make()
    stream = llm.stream("abc", PARAMS, logprobs=2)
    entries = [entry for event in stream for entry in event.logprobs]
    assert entries == stream.completion.logprobs == llm.generate("abc", PARAMS, logprobs=2).logprobs
    assert "".join(entry.text for entry in entries) == stream.completion.text
    assert b"".join(entry.bytes for entry in entries).decode() == stream.completion.text
    for entry in entries:
        assert [one.text for one in entry.top] == [chr(97 + one.token) for one in entry.top]
        assert len(entry.top) == 2

    async def ask(served: AsyncLLM) -> Any:
        return (await served.generate("abc", PARAMS, logprobs=2)).logprobs

    assert run_async(ask) == entries
