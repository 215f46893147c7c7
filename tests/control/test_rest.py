"""A head that rests: rounds in which nothing can pay cost next to no planning, and nothing is missed by that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun.control.cost import CostModel
from forerun.control.per_sequence import SequencePlanner
from forerun.control.prices import Allowance
from forerun.core.types import Budget, Offer, Seq
from tests.control.simulate.predictable import Make, Simulation, TextKind

COSTS = CostModel({1: 1.0, 2: 1.03, 4: 1.1, 8: 1.45, 16: 2.5})
UNPREDICTABLE = TextKind(0.02)
HEAD = Make(0.3, ngram=True)
MAKES = {"stops": HEAD, "chosen trees": Make(0.3, stops=False), "drawn chains": Make(0.3, False, stops=False)}
each_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


class CountedPlans(SequencePlanner):
    """Counts whole plans."""

    plans = 0

    def plan(self, seqs: Sequence[Seq], offers: Sequence[Offer], batch: int, beside: int = 0) -> list[Budget]:
        self.plans += 1
        return super().plan(seqs, offers, batch, beside)


class NeverRests(SequencePlanner):
    """The same controller with a plan in every round."""

    def rests(self, seq: Seq, offer: Offer) -> bool:
        return False


def simulated(planner: type[SequencePlanner], make: Make = HEAD, seed: int = 3) -> Simulation:
    simulation = Simulation(COSTS, make, width=1, seed=seed)
    own = simulation.controller.planner
    simulation.controller.planner = planner(own.cost, own.nodes, own.width, own.offer)
    return simulation


@each_make
def test_rounds_in_which_nothing_can_pay_are_not_planned(make: Make) -> None:
    simulation = simulated(CountedPlans, make)
    planner = simulation.controller.planner
    assert isinstance(planner, CountedPlans)
    simulation.write(UNPREDICTABLE, 60)
    before = planner.plans
    tokens, passes = simulation.write(UNPREDICTABLE, 200)
    assert planner.plans - before < 60
    assert tokens / passes > 0.97


@pytest.mark.slow(keep=1)
@each_make
def test_nothing_is_missed_by_resting(make: Make) -> None:
    """As fast as with a plan in every round, in a mixture of texts."""
    kinds = (UNPREDICTABLE, TextKind(0.9), UNPREDICTABLE, TextKind(0.3, copied=0.3), TextKind(0.8)) * 4
    speeds = []
    for planner in (SequencePlanner, NeverRests):
        simulation = simulated(planner, make)
        written = [simulation.write(kind, 80) for kind in kinds]
        speeds.append(sum(tokens for tokens, _ in written) / sum(passes for _, passes in written))
    assert speeds[0] > 0.95 * speeds[1] > (1.2 if make.ngram else 1.0)


def test_copied_text_is_drafted_at_once() -> None:
    simulation = simulated(SequencePlanner)
    simulation.write(UNPREDICTABLE, 60)
    assert simulation.speed(TextKind(0.02, copied=0.9, copy_rate=0.95), 100) > 1.5


def test_short_texts_do_not_pay_for_learning() -> None:
    """Answers of 40 tokens, some that a head predicts and some that nobody does, one after the other."""
    simulation, lost = simulated(SequencePlanner), [0.0, 0.0]
    for text in range(40):
        simulation.controller.forget(simulation.texts[0])
        simulation.texts[0].tokens[1:] = []
        kind = UNPREDICTABLE if text % 10 >= 4 else TextKind(0.85)
        tokens, passes = simulation.write(kind, 40)
        if kind is UNPREDICTABLE:
            lost = [lost[0] + tokens, lost[1] + passes]
    assert lost[0] / lost[1] > 0.97


def test_a_head_is_soon_tried_again_and_stopped_soon() -> None:
    simulation = simulated(SequencePlanner)
    simulation.write(TextKind(0.9), 100)
    tokens, passes = simulation.write(UNPREDICTABLE, 100)
    assert passes - tokens < 5.0  # plain passes lost before it is stopped, and on trials: was 9 in a hundred
    tokens, passes = simulation.write(TextKind(0.9), 100)
    assert tokens / passes > 1.3  # not blind for hundreds of rounds: this was 1.0


def test_rounds_until_a_trial_are_counted_from_what_rounds_earn() -> None:
    allowance = Allowance(most=4.0, earned=0.1, floor=4.0, level=0.0)
    sure = allowance.rounds_until(1.0, most=100)
    for _ in range(sure):
        assert allowance.level < 1.0
        allowance.book(0.0)
    assert sure >= 8
    assert allowance.rounds_until(1.0, most=100) <= 1
    assert allowance.rounds_until(9.0, most=5) == 5
