"""Plays the requests of a scenario through AsyncLLM: tasks that come at any time, some of which are cancelled."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from forerun import AsyncLLM
from forerun.api.llm import LLM, Completion
from forerun.core.types import Request
from tests.fuzz.play import Player, Wrong, alone
from tests.fuzz.scenario import Scenario
from tests.fuzz.world import make_world
from tests.test_llm import Letters


def play_async(scenario: Scenario) -> int:
    """Texts that were compared; raises Wrong where one is not what its request gives alone."""
    for one in scenario.requests:
        alone(one, scenario.setting)
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(scenario.setting, patch)
        finished = asyncio.run(_serve(scenario, LLM(world.engine, Letters())))  # type: ignore[arg-type]
        Player(scenario, world).check_end()
    return finished


async def _serve(scenario: Scenario, llm: LLM) -> int:
    rng = random.Random(scenario.setting.seed)
    async with AsyncLLM(llm) as server:
        tasks = []
        for i, request in enumerate(scenario.requests):
            most = rng.choice((None, None, None, 0, 1, 3))  # events that are read before it is dropped
            tasks.append(asyncio.create_task(_ask(server, request, most)))
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.05)))
            if rng.random() < 0.1:
                tasks[rng.randrange(i + 1)].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    finished = 0
    for i, (request, one) in enumerate(zip(scenario.requests, found, strict=True)):
        if isinstance(one, asyncio.CancelledError) or one is None:
            continue
        wanted = alone(request, scenario.setting)
        if isinstance(one, BaseException):
            raise Wrong(f"request {i}: {one!r}") from one
        if (tuple(one.token_ids), one.text, one.finish_reason) != (wanted.tokens, wanted.text, wanted.finished):
            raise Wrong(f"request {i}: {one.token_ids} instead of {wanted}")
        finished += 1
    return finished


async def _ask(server: AsyncLLM, request: Request, most: int | None) -> Completion | None:
    """Its completion; None where it is dropped after so many events."""
    options: dict[str, Any] = {
        name: getattr(request, name) for name in ("drafter", "verifier", "budget", "shows_rejected", "cache_salt")
    }
    seen, stream = 0, server.stream(list(request.prompt), request.params, **options)
    try:
        async for _ in stream:
            seen += 1
            if most is not None and seen > most:
                return None
    finally:
        await stream.close()
    return stream.completion
