"""What users are promised, through the real engine on a simulated GPU, and what would break it.

No request of 32 tokens or more is slower than 0.92x plain decoding, and no 20 of one drafter are slower than 0.985x.
"""

from __future__ import annotations

import pytest

from forerun.control import account, choices
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.offer import Offer
from forerun.core.types import PlainSeq, Round
from lab.simulate.recorded import PASSES
from tests.control.scenarios import BOTH, EXPERTS, HEAD, NONE, SMALL, Texts, outcome, write
from tests.control.simulate.menu import MenuSimulation, Trace
from tests.control.test_forms import FLAT, HOST, MENU

REQUEST, WINDOW = 0.92, 0.985
DEVICES = {"8B": PASSES, "1.5B": SMALL, "experts": EXPERTS}


def judged(rates: tuple[float, float], length: int, device: str, name: str = HEAD, count: int = 24) -> dict[str, float]:
    """Speed over plain decoding, of the slowest request and of the slowest 20."""
    texts = Texts.drawn(count, rates, 1, length=length, matches=name != HEAD)
    plain = write(texts, [NONE], DEVICES[device], None, 1)[NONE]
    return outcome(plain, write(texts, [name], DEVICES[device], AdaptiveController, 1)[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.3, 0.3), (0.0, 0.8)], ids=["never", "seldom", "any"])
@pytest.mark.parametrize("length", [32, 64])
def test_no_request_and_no_twenty_are_much_slower_than_plain(
    length: int, rates: tuple[float, float], device: str
) -> None:
    found = judged(rates, length, device)
    assert found["worst"] >= REQUEST
    assert found["worst_20"] >= WINDOW


def test_nor_with_look_ups_beside_the_head() -> None:
    found = judged((0.0, 0.3), 64, "1.5B", BOTH)
    assert found["worst"] >= REQUEST
    assert found["worst_20"] >= WINDOW


def test_negative_control_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "covered", lambda requests, worst, gain=0.0: True)
    found = judged((0.0, 0.0), 64, "experts")
    assert found["worst"] < REQUEST
    assert found["worst_20"] < WINDOW


def test_negative_control_requests_that_pay_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for each request alone would let 20 of them lose eight in a hundred."""
    monkeypatch.setattr(account, "WINDOW_LOSS", 1.0)
    assert judged((0.0, 0.0), 32, "experts")["worst_20"] < WINDOW


@pytest.mark.parametrize("slow", [3, 40, 200])
def test_where_every_round_is_read_first_a_pause_does_not_make_losses_seem_gains(slow: int) -> None:
    """A capture or another tenant: one round takes 30 times as long, wherever it comes."""
    nothing: Trace = lambda now: 0.0  # noqa: E731
    simulation = MenuSimulation(FLAT, MENU, [nothing], host=HOST)
    observe = simulation.controller.observe

    def paused(done: Round) -> None:
        times = 30.0 if len(simulation.history.rounds) == slow else 1.0
        observe(_timed(done, times))

    simulation.controller.observe = paused  # type: ignore[method-assign]
    assert simulation.run(500).worst_window() >= 0.985


def _timed(done: Round, times: float) -> Round:
    seconds = {part: times * spent for part, spent in done.seconds.items()}
    return Round(done.seqs, done.drafted, done.depths, done.accepted, seconds, followed=done.followed, plan=done.plan)


def misses(controller: AdaptiveController, seq: PlainSeq, rounds: int) -> int:
    """So many rounds with a doubtful match of which nothing is accepted; returns how many were drafted."""
    drafted = 0
    for _ in range(rounds):
        plan = controller.plan([seq])
        nodes = 2 if plan[0].nodes else 0
        drafted += nodes > 0
        seconds = {"pass": SMALL[1] / 1e3, "host": 3e-4 if nodes else 0.0}
        counts = (nodes,), (nodes,), (0,)
        controller.observe(Round((seq,), *counts, seconds, followed=not nodes, plan=plan))
        seq.tokens.append(1)
    return drafted


def test_doubtful_misses_leave_room_for_a_long_match() -> None:
    claims = [(0.35, 0.3, 0.25)]
    cost = CostModel({rows: ms / 1e3 for rows, ms in SMALL.items()})
    controller = AdaptiveController(cost, 60, 10, lambda seq: Offer(free=claims[0]), lambda seq: True, follows=True)
    seq = PlainSeq(1, [1, 2, 3], 3, max_length=1000)
    misses(controller, seq, 20)
    claims[0] = tuple(0.97**depth for depth in range(1, 13))
    drafts = max(controller.plan([seq])[0].nodes for _ in range(2)) > 0
    assert drafts
