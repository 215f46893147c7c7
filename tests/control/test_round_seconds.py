"""What rounds take with all their parts: the price of a draft beside its nodes, and what a draft has cost."""

from __future__ import annotations

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.offer import FREE, Offer
from forerun.core.types import Budget, Round, Seq
from forerun.testing import FakeSeq

CURVE = {1: 4e-3, 2: 4.2e-3, 4: 4.4e-3, 8: 5e-3, 16: 8e-3}


def parts(once: float, host: float) -> dict[str, float]:
    return {"pass": once, "host": host, "draft": 0.0, "verdict": 0.0}


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
        self.planned = self.controller.plan([self.seq])
        return self.planned[0]

    def finish(self, nodes: int, accepted: int, host: float, ahead: int = 0) -> None:
        once = self.controller.cost.pass_seconds(1 + nodes)
        drafted = (nodes,), (nodes,), (accepted,)
        self.controller.observe(Round((self.seq,), *drafted, parts(once, host), ahead=ahead, plan=self.planned))
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
    matches.idle(4)
    budget = matches.plan()
    assert budget.width == 1
    assert budget.nodes == budget.depth > 0
    assert budget.source == "free"


def test_nothing_is_drafted_where_the_next_pass_is_run_already() -> None:
    matches = Matches(0.9, 0.8, 0.7)
    matches.idle(4)
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
    matches.idle(4)
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
