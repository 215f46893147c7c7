"""A round that requests start with is plain whatever would pay: no trial may be planned for it, as it would be lost."""

from __future__ import annotations

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.core.types import Round
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from tests.simulate.load import Ask, SimulatedServer

ANSWER = 64  # tokens: as many rounds as lie between trials, so that every trial is due with a new text


def trials_of(server: SimulatedServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes that the trials of one client drafted, all but those of a text's last token, which has no room for any."""
    controller, found = server.engine.controller, list[int]()
    assert isinstance(controller, AdaptiveController)
    real = controller.observe

    def observe(outcome: Round) -> None:
        (decision,) = controller._planned.decisions or [None]
        ended = all(len(seq.tokens) == seq.max_length for seq in outcome.seqs)
        unplanned = outcome.undrafted == len(outcome.seqs)
        if decision and decision.promise.is_trial and decision.promise.form.nodes and not (ended or unplanned):
            found.append(sum(outcome.drafted))
        real(outcome)

    monkeypatch.setattr(controller, "observe", observe)
    server.serve([Ask(40, ANSWER)] * 30, 1)
    return found


def test_no_trial_is_lost_to_a_round_that_requests_start_with(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trials_of(SimulatedServer(True, rate=0.05), monkeypatch)
    assert len(found) > 10
    assert all(found)


def test_negative_control_a_plan_for_those_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    server, real = SimulatedServer(True, rate=0.05), Engine._launch

    def planned(engine: Engine, seqs, trees, readers, *more) -> None:  # type: ignore[no-untyped-def]
        if all(seq in readers for seq in seqs):
            engine.controller.plan(seqs)
        real(engine, seqs, trees, readers, *more)

    monkeypatch.setattr(Engine, "_launch", planned)
    monkeypatch.setattr(LaunchedRound, "starters", lambda *_: 0)
    assert 0 in trials_of(server, monkeypatch)
