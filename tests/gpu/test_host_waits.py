"""No line of a round makes the host wait for the device but the one that reads the verdict.

A wait behind a round that was just launched takes as long as that round, and what follows it is launched late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun.control.base import FixedController
from forerun.core.params import SamplingParams
from forerun.core.request import ALWAYS
from forerun.core.types import Budget, Request
from forerun.drafters.device import drafter as drafter
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.features import RowReader
from forerun.engine.engine import Engine
from forerun.models import slots
from tests.gpu.host_waits import HostWaits
from tests.gpu.silent_passes import make_silent, requests

CHAIN, TREE = Budget(2, 2), Budget(8, 3, 3)


def counted(calls: Counter[str], owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def waits_of(engine: Engine, some: list[Request], leaves: Callable[[], bool] = lambda: False) -> HostWaits:
    """Eight clients, until the last request has come; while `leaves`, some are dropped half-way."""
    with HostWaits() as waits:
        ended = 8
        while some:
            for request in some[:ended]:
                engine.submit(request)
            del some[:ended]
            if len(some) < 9 and len(engine.running) > 3 and leaves():
                engine.abort(engine.running[0].id)  # whose tree is drafted
            ended = sum(event.finished is not None for event in engine.step())
    return waits


@pytest.mark.parametrize("repeats", [ALWAYS, 0])
@pytest.mark.parametrize("budget", [CHAIN, TREE])
def test_nothing_waits_while_requests_join_and_leave(
    budget: Budget, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that follow unread ones and rounds that were read first; some prompts are found in the prefix cache."""
    calls: Counter[str] = Counter()
    for owner, name in ((HeadDraft, "_follow"), (HeadDraft, "_rearrange"), (RowReader, "read")):
        counted(calls, owner, name, monkeypatch)
    # else some draft and some do not, where many of few end at once
    monkeypatch.setattr(drafter, "SHARED", 0.0)
    engine = make_silent(8)
    controller = FixedController(1)
    controller.budget = Budget(budget.nodes, budget.depth, budget.width, repeats=repeats)
    engine.controller = controller
    some = [*requests(24, "salt", longest=60, tokens=16)]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    # few rows: read by the draft
    some[1::3] = [Request((7, 8, 9 + i), params, cache_salt="salt") for i in range(8)]
    waits = waits_of(engine, some, leaves=lambda: not calls["_rearrange"])
    assert waits.places == {}
    assert engine.stats.reused > 0
    assert calls["read"]
    assert calls["_follow"] or not repeats
    assert calls["_rearrange"] or repeats


def test_negative_control_a_tensor_of_a_list_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hidden rows of a prompt that the prefix cache had were once taken by."""
    monkeypatch.setattr(slots, "ints_of", lambda values, device: torch.tensor(values, device=device))
    waits = waits_of(make_silent(8), [*requests(24, "salt", longest=60, tokens=16)])
    assert [place.split(" ")[1] for place in waits.places] == ["_with_found"]
