"""The recorder around a controller hands on every question that an engine may ask a controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forerun.control import base
from forerun.control.adaptive import AdaptiveController
from forerun.control.base import Controller, FixedController, WaitingPrompts
from forerun.control.cost import CostModel
from forerun.core.offer import Offer, RoundPlan
from forerun.core.types import Round
from forerun.measure.bench.contenders import Recorder
from forerun.testing import FakeSeq

SEQS = [FakeSeq(3, [1, 2, 3])]
ASKED: dict[str, tuple[Any, ...]] = {
    "plan": (SEQS,),
    "observe": (Round(tuple(SEQS), (0,), (0,), (0,), {}),),
    "forget": (SEQS[0],),
    "follow": (SEQS, RoundPlan("trees", 2), bool),
    "note_waiting": (WaitingPrompts(1),),
}


def _adaptive() -> AdaptiveController:
    return AdaptiveController(CostModel({1: 1e-3, 8: 2e-3}), 8, 2, lambda seq: Offer())


def _questions() -> list[str]:
    """The methods of all protocols for controllers, but for how a class builds itself."""
    kinds = [kind for kind in vars(base).values() if isinstance(kind, type) and "_is_protocol" in vars(kind)]
    names = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    return sorted(name for name in names & set(vars(AdaptiveController)) if name != "build")


def test_the_list_is_whole() -> None:
    assert _questions() == sorted(ASKED)


@pytest.mark.parametrize("name", ASKED)
def test_every_question_is_handed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, heard, answer = _adaptive(), [], object()
    spy: Callable[..., object] = lambda *words: heard.append(words) or answer  # noqa: E731
    monkeypatch.setattr(controller, name, spy)
    said = getattr(Recorder(controller), name)(*ASKED[name])
    assert heard == [ASKED[name]]
    assert said is (None if name in ("observe", "forget", "note_waiting") else answer)


def test_a_controller_that_is_not_asked_keeps_its_plan() -> None:
    fixed: Controller = FixedController(4, 1)
    recorder = Recorder(fixed)
    assert recorder.follow(SEQS, RoundPlan("trees", 2), lambda: True) == RoundPlan("trees", 1)
    assert recorder.follow(SEQS, RoundPlan("plain", 2), lambda: True) is None
    recorder.note_waiting(*ASKED["note_waiting"])
