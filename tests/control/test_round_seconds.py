"""What rounds take with all their parts: the price of a draft beside its nodes, and what a draft has cost."""

from __future__ import annotations

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import PRESUMED_GAP, CostModel
from forerun.control.prices import IN_A_ROW, RoundSeconds
from forerun.core.types import FREE, Budget, Offer, Round, Seq
from forerun.testing import FakeSeq

CURVE = {1: 4e-3, 2: 4.2e-3, 4: 4.4e-3, 8: 5e-3, 16: 8e-3}


def parts(once: float, host: float) -> dict[str, float]:
    return {"pass": once, "host": host, "draft": 0.0, "verdict": 0.0}


def plain_rounds(rounds: RoundSeconds, count: int, host: float = 1e-4) -> None:
    for _ in range(count):
        rounds.note_plain(parts(4e-3, host))


def test_a_draft_costs_what_its_rounds_take_longer() -> None:
    rounds = RoundSeconds()
    assert rounds.more == PRESUMED_GAP
    plain_rounds(rounds, IN_A_ROW)
    assert rounds.plain == pytest.approx(4.1e-3)
    for _ in range(80):
        cost = rounds.note(parts(4.4e-3, 9e-4), 4.4e-3, nodes=3, cost=0.1)
    assert rounds.more == pytest.approx(8e-4, rel=0.01)
    assert cost == pytest.approx((4.4e-3 + 9e-4) / 4.1e-3 - 1.0), "not 0.1, as the pass alone says"


def test_until_plain_rounds_were_seen_the_pass_tells_the_cost() -> None:
    rounds = RoundSeconds()
    plain_rounds(rounds, IN_A_ROW - 1)
    assert rounds.note(parts(4.4e-3, 9e-4), 4.4e-3, nodes=3, cost=0.1) == 0.1
    assert rounds.more == PRESUMED_GAP


def test_plain_rounds_count_in_rows_that_no_draft_has_cut() -> None:
    """The first round of a native call is slow, the others are not: only whole calls tell what a round takes."""
    rounds = RoundSeconds()
    for _ in range(20):
        for host in (1e-3, 1e-4, 1e-4):
            rounds.note_plain(parts(4e-3, host))
        rounds.note(parts(4.4e-3, 9e-4), 4.4e-3, nodes=3, cost=0.1)
    assert rounds.plain == 0.0
    for host in (1e-3, 1e-4, 1e-4, 1e-4):
        rounds.note_plain(parts(4e-3, host))
    assert rounds.plain == pytest.approx(4e-3 + 1.3e-3 / 4)


def test_a_round_of_a_drafter_that_must_run_pays_for_the_host_too() -> None:
    rounds = RoundSeconds()
    asked = {"pass": 4.4e-3, "draft": 1e-3, "verdict": 1e-4, "host": 4e-4}
    assert rounds.note_asked(asked) == 0.0, "no plain round was seen"
    plain_rounds(rounds, IN_A_ROW)
    assert rounds.note_asked(asked) == pytest.approx(4e-4 / 4.1e-3), "neither the pass nor the draft"
    assert rounds.note_asked(asked | {"host": 5.0}) < 0.3, "a pause of the machine"
    assert rounds.more == PRESUMED_GAP, "look-ups are priced by themselves"


def test_a_pause_of_the_machine_counts_little() -> None:
    rounds = RoundSeconds()
    plain_rounds(rounds, IN_A_ROW)
    assert rounds.note(parts(4.4e-3, 5.0), 4.4e-3, nodes=3, cost=0.1) < 2.0
    assert rounds.more < 2 * (PRESUMED_GAP + 1e-4)
    plain_rounds(rounds, IN_A_ROW, host=5.0)
    assert rounds.plain < 1.2 * 4.1e-3


class Matches:
    """A controller for one text with a match of these survivals in every round."""

    def __init__(self, *survivals: float) -> None:
        self.free = survivals
        self.controller = AdaptiveController(CostModel(CURVE), 16, 4, self._offer, lambda seq: True)
        self.seq, self.asked = FakeSeq(0, [1]), 0

    def _offer(self, seq: Seq) -> Offer:
        self.asked += 1
        return Offer(free=self.free) if self.free else FREE

    def plan(self) -> Budget:
        return self.controller.plan([self.seq])[0]

    def finish(self, nodes: int, accepted: int, host: float, ahead: int = 0) -> None:
        once = self.controller.cost.pass_seconds(1 + nodes)
        drafted = (nodes,), (nodes,), (accepted,)
        self.controller.observe(Round((self.seq,), *drafted, parts(once, host), ahead=ahead))
        self.seq.tokens += [0] * (1 + accepted)

    def idle(self, rounds: int) -> None:
        free, self.free = self.free, ()
        for _ in range(rounds):
            assert not self.plan().nodes
            self.finish(0, 0, 1e-4)
        self.free = free


def test_a_weak_match_is_drafted_only_where_the_host_is_quick() -> None:
    for host, pays in ((1.2e-4, True), (1.2e-3, False)):
        matches = Matches(0.25)
        matches.idle(8)
        for _ in range(40):  # what the host takes is learnt from strong matches
            matches.free = (0.9, 0.85)
            nodes = matches.plan().nodes
            assert nodes
            matches.finish(nodes, 2, host)
            matches.idle(4)
        matches.free = (0.25,)
        assert bool(matches.plan().nodes) is pays


def test_one_text_drafts_chains() -> None:
    matches = Matches(0.9, 0.8, 0.7)
    matches.idle(IN_A_ROW)
    budget = matches.plan()
    assert budget.width == 1
    assert budget.nodes == budget.depth > 0
    assert budget.source == "free"


def test_what_plain_rounds_take_is_seen_before_anything_is_drafted() -> None:
    matches = Matches(0.9, 0.8, 0.7)
    for _ in range(IN_A_ROW):
        assert not matches.plan().nodes
        matches.finish(0, 0, 1e-4)
    assert matches.plan().nodes
    matches.seq = FakeSeq(1, [1])
    assert matches.plan().nodes, "once, and not for every text"


def test_nothing_is_drafted_where_the_next_pass_is_run_already() -> None:
    matches = Matches(0.9, 0.8, 0.7)
    matches.idle(IN_A_ROW)
    assert matches.plan().nodes
    matches.finish(2, 2, 5e-4, ahead=2)
    asked = matches.asked
    assert not matches.plan().nodes
    assert matches.asked == asked, "nor is it looked up"
    matches.finish(0, 0, 5e-5, ahead=1)
    assert not matches.plan().nodes
    matches.finish(0, 0, 5e-5, ahead=0)
    assert matches.plan().nodes


def test_passes_run_for_one_text_do_not_keep_another_from_drafting() -> None:
    matches = Matches(0.9, 0.8, 0.7)
    matches.idle(IN_A_ROW)
    assert matches.plan().nodes
    matches.finish(2, 2, 5e-4, ahead=2)
    matches.seq = FakeSeq(1, [1])
    assert matches.plan().nodes


def test_losses_that_the_host_causes_end_drafting() -> None:
    """By passes alone each of these rounds would have gained."""
    matches = Matches(0.5)
    matches.idle(8)
    drafted = 0
    for _ in range(200):
        nodes = matches.plan().nodes
        drafted += nodes > 0
        matches.finish(nodes, 0, 4e-3 if nodes else 1e-4)
    assert 0 < drafted < 12
