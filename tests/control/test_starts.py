"""A drafter that must read a text before it drafts does so where its earlier texts have paid for that."""

from __future__ import annotations

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.control.per_sequence import EarlierTexts
from forerun.core.types import Offer, Round
from forerun.testing import FakeSeq
from tests.control.scenarios import SMALL_CPU
from tests.control.simulate.predictable import Make, Simulation, TextKind

HARD, EASY = TextKind(0.2), TextKind(0.85)


def read(simulation: Simulation, kind: TextKind, texts: int, length: int = 64) -> tuple[list[bool], float]:
    """Which of these texts the drafter read, and their speed over plain decoding."""
    found = [simulation.write_text(kind, length, 1.5, limit=512) for _ in range(texts)]
    return [one for _, one in found], texts * length / sum(passes for passes, _ in found)


def test_texts_that_nobody_predicts_are_rarely_read() -> None:
    simulation = Simulation(SMALL_CPU, Make(0.15))
    read(simulation, HARD, 4)
    found, speed = read(simulation, HARD, 24)
    assert 2 <= sum(found) <= 8
    assert speed > 0.985


def test_negative_control_starts_that_nothing_has_to_pay_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlierTexts, "cover", lambda *_: True)
    simulation = Simulation(SMALL_CPU, Make(0.15))
    read(simulation, HARD, 4)
    found, speed = read(simulation, HARD, 24)
    assert sum(found) > 16
    assert speed < 0.985


def test_texts_that_become_easy_are_soon_read_again() -> None:
    simulation = Simulation(SMALL_CPU, Make(0.15))
    read(simulation, HARD, 24)
    assert any(read(simulation, EASY, 8)[0])
    assert all(read(simulation, EASY, 8)[0])


def test_short_texts_are_not_read_and_long_ones_among_them_are() -> None:
    simulation = Simulation(SMALL_CPU, Make(0.15))
    read(simulation, EASY, 4, length=3)
    found, speed = read(simulation, EASY, 24, length=3)
    assert not any(found)
    assert speed == pytest.approx(1.0)
    assert all(read(simulation, EASY, 2, length=128)[0])


def test_what_one_drafter_lost_is_not_charged_to_another() -> None:
    offers = {0: Offer((0.1,), 1.5, stops=True, key=1), 1: Offer((0.1,), 1.5, stops=True, key=2)}
    controller = AdaptiveController(CostModel(SMALL_CPU.seconds), 8, 1, lambda seq: offers[seq.id % 2])

    def starts(seq_id: int) -> bool:
        """Does it begin with a text, of which nothing is accepted?"""
        seq, asked = FakeSeq(seq_id, [1], max_length=100), False
        for _ in range(64):
            drafts = controller.plan([seq])[0].nodes > 0
            seconds = {"pass": SMALL_CPU.pass_seconds(1 + drafts), "draft": 1.6 * drafts}
            controller.observe(Round((seq,), (int(drafts),), (int(drafts),), (0,), seconds))
            seq.tokens.append(0)
            asked = asked or drafts
        controller.forget(seq)
        return asked

    assert not all(starts(2 * text) for text in range(6))
    assert starts(1)


def test_a_text_takes_its_limit_for_its_length_until_others_have_ended() -> None:
    drafter, seq = EarlierTexts(), FakeSeq(0, [1, 1], max_length=102)
    assert drafter.left(seq) == 100
    for tokens in (4, 16):
        drafter.end(tokens)
    assert 4 < drafter.left(seq) < 16
    seq.tokens += [0] * 60
    assert drafter.left(seq) == 40, "it may take as long again as it has taken, and no more than its limit"
