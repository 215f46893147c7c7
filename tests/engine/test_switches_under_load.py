"""Under a server's load forms change behind rounds that were not read: hardly a round waits for the host."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from tests.simulate.load import SimulatedServer, asks

CLIENTS = 48


def load() -> tuple[int, int, int, float]:
    """Rounds that were read first, all rounds, those whose form was another than the last one's; tokens per second."""
    server = SimulatedServer(True, rate=0.65)
    engine, first, forms = server.engine, list[bool](), list[object]()
    finish = engine._close

    def finished(launched: LaunchedRound) -> None:
        first.append(launched.trees.follows is None)
        forms.append(launched.trees.form)
        finish(launched)

    server.serve(asks(CLIENTS, 1, 142), CLIENTS, 1.5e-3)
    engine._close = finished  # type: ignore[method-assign]
    found = server.serve(asks(3 * CLIENTS, 2, 142), CLIENTS, 1.5e-3)
    changes = sum(one != other for one, other in pairwise(forms))
    return sum(first), len(first), changes, found.rate


def test_hardly_a_round_is_read_first_though_forms_change() -> None:
    first, rounds, changes, _ = load()
    assert changes > 0.05 * rounds
    assert first < 0.04 * rounds


@pytest.mark.slow
def test_negative_control_where_every_change_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = load()[3]
    monkeypatch.setattr(Engine, "_switches", lambda self, seqs: False)
    first, rounds, _, slower = load()
    assert first > 0.06 * rounds
    assert slower < rate, "the device waits meanwhile"
