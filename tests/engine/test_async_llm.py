"""AsyncLLM: callers that want the whole text do not wake the event loop every round; an engine that is given up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from forerun import AsyncLLM
from forerun.async_llm import _Coroutine
from forerun.errors import ForerunError
from forerun.llm import Completion
from forerun.params import SamplingParams
from tests.engine.test_driver import PARAMS, make

LONG = SamplingParams(max_tokens=800, ignore_eos=True)


@pytest.mark.parametrize("every_round", [True, False])
def test_a_whole_text_wakes_the_loop_at_its_first_round_and_its_end(
    every_round: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes, real = list[None](), _Coroutine.woken
    monkeypatch.setattr(_Coroutine, "woken", lambda self: (wakes.append(None), real(self))[1])

    async def main() -> list[Any]:
        async with AsyncLLM(make()) as llm:
            wanted = await llm.generate("abc", LONG, drafter="none")
            wakes.clear()
            steps = [step async for step in llm.stream("abc", LONG, drafter="none", every_round=every_round)]
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
        llm, goes_on = AsyncLLM(make()), threading.Event()
        real = llm.llm.engine.step
        monkeypatch.setattr(llm.llm.engine, "step", lambda: (goes_on.wait(), real())[1])
        waiting = [asyncio.create_task(llm.generate("abc", PARAMS)) for _ in range(3)]
        await asyncio.sleep(0.05)
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
