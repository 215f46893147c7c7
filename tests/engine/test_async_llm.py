"""AsyncLLM: callers that want the whole text do not wake the event loop every round; an engine that is given up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from forerun import AsyncLLM
from forerun.api.calls import make_request
from forerun.api.llm import Completion, _Coroutines
from forerun.core.errors import ForerunError
from forerun.core.params import SamplingParams
from tests.engine.test_driver import PARAMS, make

LONG = SamplingParams(max_tokens=800, ignore_eos=True)


@pytest.mark.parametrize("every_round", [True, False])
def test_a_whole_text_wakes_the_loop_at_its_first_round_and_its_end(
    every_round: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes, real = list[None](), _Coroutines._wake_ready
    monkeypatch.setattr(_Coroutines, "_wake_ready", lambda self: (wakes.append(None), real(self))[1])

    async def main() -> list[Any]:
        async with AsyncLLM(make()) as llm:
            wanted = await llm.generate("abc", LONG, drafter="none")
            wakes.clear()
            request = make_request("abc", LONG, {"drafter": "none"}, llm.encode)
            steps = [step async for step in llm.items(request, every_round=every_round)]
            assert "".join(step.text for step in steps[:-1]) == wanted.text
            return steps

    steps = asyncio.run(main())
    assert isinstance(steps[-1], Completion)
    assert len(steps) == 801, "every event comes, at once or as it happens"
    if every_round:
        assert len(wakes) > 10, "negative control"
    else:
        assert len(wakes) <= 6, "queued, first round, end, and where two fall together"


def test_an_engine_that_is_given_up_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm, hangs, goes_on = AsyncLLM(make()), threading.Event(), threading.Event()
        real = llm.llm.engine.step
        monkeypatch.setattr(llm.llm.engine, "step", lambda: (hangs.set(), goes_on.wait(), real())[2])
        waiting = [asyncio.create_task(llm.generate("abc", PARAMS)) for _ in range(3)]
        assert await asyncio.to_thread(hangs.wait, 60)
        llm.fail(ForerunError("it hangs"))
        for task in waiting:
            with pytest.raises(ForerunError, match="it hangs"):
                await task
        with pytest.raises(ForerunError, match="it hangs"):
            await llm.generate("abc", PARAMS)
        assert str(llm.failure) == "it hangs"
        assert await llm.close(0.05) is False, "its thread hangs"
        goes_on.set()
        assert await llm.close(5.0) is True
        assert not llm.llm.engine.busy, "what was dropped is gone when the thread has ended"

    asyncio.run(main())


def test_a_round_calls_the_loop_once_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call writes to a socket: one for each stream would take the engine's thread longer than the round."""
    calls, params = list[None](), SamplingParams(max_tokens=100, ignore_eos=True)

    async def main() -> tuple[int, int]:
        async with AsyncLLM(make(max_batch=8)) as llm:
            loop = asyncio.get_running_loop()
            real = loop.call_soon_threadsafe
            monkeypatch.setattr(
                loop, "call_soon_threadsafe", lambda *args, **kw: (calls.append(None), real(*args, **kw))[1]
            )
            wanted = await llm.generate("abc", params, drafter="none")

            async def read() -> str:
                events = [event async for event in llm.stream("abc", params, drafter="none")]
                assert len(events) == 100
                return "".join(event.text for event in events)

            before = llm.llm.engine.stats.rounds
            calls.clear()
            texts = await asyncio.gather(*(read() for _ in range(8)))
            assert texts == [wanted.text] * 8
            return len(calls), llm.llm.engine.stats.rounds - before

    woken, rounds = asyncio.run(main())
    assert rounds < 8 * 101 / 2, "negative control: they ran together"
    assert 10 < woken <= rounds + 40, "one for each round, and a few for requests that come and go"
