"""One engine for many threads and coroutines: every call gets the text it would get alone."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from forerun import AsyncLLM
from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.errors import ForerunError, InvalidInput, Overloaded
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.driver import Driver
from forerun.testing import Fault, TableLM
from tests.test_llm import Letters, until

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def make(**config: Any) -> LLM:
    speculative = SpeculativeConfig(controller="adaptive", budget=4)
    target, draft = TableLM(vocab_size=26), TableLM(vocab_size=26, seed=1)
    settings = EngineConfig(**config)
    engine = make_engine(target, frozenset({0}), speculative, settings, Letters(), draft)  # type: ignore[arg-type]
    return LLM(engine, Letters())  # type: ignore[arg-type]


def calls(count: int) -> list[tuple[str, SamplingParams, str]]:
    """Prompt, parameters and drafter of calls of every kind, all of which have one right text."""
    rng, made = random.Random(1), []
    for _ in range(count):
        prompt = "".join(rng.choice("abcde") for _ in range(rng.randint(1, 12)))
        temperature = rng.choice([0.0, 0.7, 1.2])
        params = SamplingParams(
            max_tokens=rng.randint(1, 14),
            temperature=temperature,
            seed=rng.randrange(1 << 30) if temperature else None,
            repetition_penalty=rng.choice([1.0, 1.3]),
            stop=rng.choice([(), ("ab",)]),
            ignore_eos=rng.random() < 0.5,
        )
        made.append((prompt, params, rng.choice(["none", "ngram", "draft_model", "hybrid"])))
    return made


def text_of(llm: LLM, call: tuple[str, SamplingParams, str], how: int) -> str | None:
    """By generate, by a batch, by a stream, or by one that is left half-way (None)."""
    prompt, params, drafter = call
    if how == 0:
        return llm.generate(prompt, params, drafter=drafter).text
    if how == 1:
        return llm.generate([prompt, "zz"], params, drafter=drafter)[0].text
    pieces, stream = [], llm.stream(prompt, params, drafter=drafter)
    for event in stream:
        pieces.append(event.text)
        if how == 3:
            return None
    assert stream.completion.text == "".join(pieces)
    return stream.completion.text


@pytest.mark.slow
def test_400_calls_of_8_threads_get_the_texts_written_alone() -> None:
    wanted = calls(50)
    alone = make()
    expected = [alone.generate(prompt, params, drafter="none").text for prompt, params, _ in wanted]
    shared = make(max_batch=6)
    wrong: list[object] = []

    def work(worker: int) -> int:
        right = 0
        for i in range(50):
            at = (i * 7 + worker * 13) % 50
            text = text_of(shared, wanted[at], (i + worker) % 4)
            if text is not None and text != expected[at]:
                wrong.append((worker, at, text, expected[at]))
            right += text is None or text == expected[at]
        return right

    with ThreadPoolExecutor(8) as pool:
        right = sum(pool.map(work, range(8)))
    assert wrong == []
    assert right == 400
    assert not shared.engine.busy
    assert shared.engine.target.used_slots == 0  # type: ignore[attr-defined]
    assert not shared.driver._waiting
    assert not shared.driver._leading


def test_streams_of_two_threads_interleave() -> None:
    """Each is fed while the other is: neither waits for the other's end."""
    llm, order = make(), []
    barrier = threading.Barrier(2)

    def listen(name: str) -> None:
        barrier.wait()
        for _ in llm.stream("abc" + name, SamplingParams(max_tokens=60, ignore_eos=True), drafter="none"):
            order.append(name)  # noqa: PERF401  # as they come

    threads = [threading.Thread(target=listen, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    changes = sum(a != b for a, b in pairwise(order))
    assert len(order) == 120
    assert changes > 10


def test_a_thread_that_leads_serves_one_that_sleeps() -> None:
    """The long call is not needed for the short one to come back, nor the other way round."""
    llm = make()
    long = threading.Thread(
        target=llm.generate, args=("abc", SamplingParams(max_tokens=3000, ignore_eos=True)), daemon=True
    )
    long.start()
    assert llm.generate("xyz", PARAMS).tokens == 12
    assert long.is_alive()
    for seq in [*llm.engine.running]:
        llm.driver.post(lambda engine, seq_id=seq.id: engine.abort(seq_id))  # type: ignore[misc]
    long.join(10)
    assert not long.is_alive()


@pytest.mark.parametrize("round_", [0, 1, 3])
def test_an_interrupt_drops_the_callers_request_and_no_other(round_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    expected = llm.generate("xyz", PARAMS).text
    stream = llm.stream("xyz", PARAMS)
    first = next(stream)
    step, rounds = llm.engine.target.score, iter(range(1000))

    def interrupted(*args: Any) -> Any:
        if next(rounds) == round_:
            raise KeyboardInterrupt
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(TableLM, "score", lambda self, *args: interrupted(*args))
        with pytest.raises(KeyboardInterrupt):
            llm.generate("abc", SamplingParams(max_tokens=50, ignore_eos=True), drafter="none")
    assert len(llm.engine.running) + len(llm.engine.waiting) == 1
    rest = [event.text for event in stream]
    assert first.text + "".join(rest) == expected
    assert not llm.engine.busy


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("first", range(8))
def test_an_interrupt_anywhere_in_the_driver_leaves_it_right(first: int) -> None:
    """While a stream is open, another call is interrupted at every point of the driver and of the LLM around it."""
    llm, modules = (make(), ("forerun.engine.driver", "forerun.api.llm", "forerun.api.calls", "forerun.api.calls"))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    alone = {prompt: llm.generate(prompt, params, drafter="none").text for prompt in ("abc", "xyz")}

    def call() -> None:
        llm.generate("abc", params, drafter="none")

    def streamed(at: int | None) -> tuple[str, Fault]:
        stream = llm.stream("xyz", params, drafter="none")
        first = next(stream)
        with suppress(KeyboardInterrupt), Fault(at, KeyboardInterrupt, modules) as fault:
            call()
        return first.text + "".join(event.text for event in stream), fault

    points = streamed(None)[1].seen
    assert points > 100
    for at in range(first, points, 8):
        text, fault = streamed(at)
        assert text == alone["xyz"], fault.fired
        assert not llm.driver._leading, fault.fired
        assert llm.generate("abc", params, drafter="none").text == alone["abc"], fault.fired
        while llm.engine.busy:  # a call that was interrupted while it dropped its request leaves it to others
            llm.engine.step()
        assert llm.engine.target.used_slots == 0, fault.fired  # type: ignore[attr-defined]


def test_an_error_of_the_request_is_raised_where_it_was_made() -> None:
    driver = Driver(make().engine)
    with pytest.raises(InvalidInput, match="empty"):
        driver.submit(Request(()))
    with pytest.raises(InvalidInput, match="empty"):
        driver.write([Request((1,), PARAMS), Request(())])
    assert not driver.engine.busy


def test_requests_come_a_few_at_once() -> None:
    driver, most = Driver(make().engine), 0
    requests = (Request((i + 1, 2), SamplingParams(max_tokens=i % 4 + 1, ignore_eos=True)) for i in range(9))
    lengths = dict.fromkeys(range(9), 0)
    for place, event in driver.stream(requests, at_once=2):
        lengths[place] += len(event.tokens)
        most = max(most, len(driver.engine.running) + len(driver.engine.waiting))
    assert list(lengths.values()) == [i % 4 + 1 for i in range(9)]
    assert most <= 2


def test_coroutines_get_the_texts_written_alone() -> None:
    wanted = calls(24)
    alone = make()
    expected = [alone.generate(prompt, params, drafter="none").text for prompt, params, _ in wanted]

    async def one(llm: AsyncLLM, i: int) -> str:
        prompt, params, drafter = wanted[i]
        if i % 3 == 0:
            return (await llm.generate(prompt, params, drafter=drafter)).text
        stream = llm.stream(prompt, params, drafter=drafter)
        text = "".join([event.text async for event in stream])
        assert stream.completion.text == text
        return text

    async def main() -> list[str]:
        async with AsyncLLM(make(max_batch=4), max_requests=10) as llm:
            texts = await asyncio.gather(*(one(llm, i) for i in range(24)))
            assert llm.requests == 0
            assert not llm.llm.engine.busy
        assert not llm._thread.is_alive()
        return texts

    assert asyncio.run(main()) == expected


def test_a_cancelled_coroutine_drops_its_request() -> None:
    async def main() -> None:
        async with AsyncLLM(make(), max_requests=2, refuse=True) as llm:
            endless = SamplingParams(max_tokens=1 << 19, ignore_eos=True)
            tasks = [asyncio.create_task(llm.generate("abc", endless)) for _ in range(2)]
            stream = llm.stream("x", PARAMS)
            await until(lambda: llm.requests == 2)
            with pytest.raises(Overloaded, match="2 requests"):
                await anext(stream)
            tasks[0].cancel()
            with suppress(asyncio.CancelledError):
                await tasks[0]
            assert (await llm.generate("abc", PARAMS)).tokens == 12
            assert len(llm.llm.engine.running) == 1
            with pytest.raises(InvalidInput, match="empty"):
                await llm.generate("", PARAMS)
            assert llm.requests == 1
            named = asyncio.create_task(llm.generate("abc", endless, request_id="seven"))
            await until(lambda: llm.requests == 2)
            llm.abort("seven")
            assert (await named).finish_reason == "aborted"
        with pytest.raises(ForerunError, match="closed"):
            await tasks[1]
        with pytest.raises(ForerunError, match="closed"):
            await llm.generate("abc", PARAMS)
        assert not llm.llm.engine.busy
        assert llm.llm.engine.target.used_slots == 0  # type: ignore[attr-defined]

    asyncio.run(main())


def test_a_stream_left_half_way_frees_its_place() -> None:
    async def main() -> None:
        async with AsyncLLM(make()) as llm:
            stream = llm.stream("abc", SamplingParams(max_tokens=1 << 19, ignore_eos=True))
            await anext(stream)
            await stream.close()
            assert llm.requests == 0
            assert (await llm.generate("abc", PARAMS)).tokens == 12
            assert not llm.llm.engine.busy

    asyncio.run(main())
