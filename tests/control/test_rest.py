"""A head that rests: rounds in which nothing can pay cost next to no planning, and nothing is missed by that."""

from __future__ import annotations

from forerun.control.cost import CostModel
from tests.control.simulate.predictable import Make, Simulation, TextKind

COSTS = CostModel({1: 1.0, 2: 1.03, 4: 1.1, 8: 1.45, 16: 2.5})
UNPREDICTABLE = TextKind(0.02)
HEAD = Make(0.3, ngram=True)


def simulated(make: Make = HEAD, seed: int = 3) -> Simulation:
    return Simulation(COSTS, make, width=1, seed=seed)


def test_a_head_that_rests_says_for_how_long() -> None:
    """Passes of that many rounds may be run in one call."""
    simulation, said = simulated(), list[int]()
    simulation.write(UNPREDICTABLE, 60)
    for _ in range(100):
        simulation.write(UNPREDICTABLE, 1)
        said += [one.repeats for one in simulation.budgets if not one.nodes]
    assert len(said) > 80
    assert max(said) > 8
    assert min(said) == 0


def test_copied_text_is_drafted_at_once() -> None:
    simulation = simulated()
    simulation.write(UNPREDICTABLE, 60)
    assert simulation.speed(TextKind(0.02, copied=0.9, copy_rate=0.95), 100) > 1.5


def test_short_texts_do_not_pay_for_learning() -> None:
    """Answers of 40 tokens, some that a head predicts and some that nobody does, one after the other."""
    simulation, lost = simulated(), [0.0, 0.0]
    for text in range(40):
        simulation.controller.forget(simulation.texts[0])
        simulation.texts[0].tokens[1:] = []
        kind = UNPREDICTABLE if text % 10 >= 4 else TextKind(0.85)
        tokens, passes = simulation.write(kind, 40)
        if kind is UNPREDICTABLE:
            lost = [lost[0] + tokens, lost[1] + passes]
    assert lost[0] / lost[1] > 0.97


def test_a_head_is_soon_tried_again_and_stopped_soon() -> None:
    simulation = simulated()
    simulation.write(TextKind(0.9), 100)
    tokens, passes = simulation.write(UNPREDICTABLE, 100)
    assert passes - tokens < 5.0  # plain passes lost before it is stopped, and on trials: was 9 in a hundred
    tokens, passes = simulation.write(TextKind(0.9), 100)
    assert tokens / passes > 1.3  # not blind for hundreds of rounds: this was 1.0
