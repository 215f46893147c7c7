"""The controller in its simulator, where time is counted and not measured: what it settles on, and how it follows."""

from __future__ import annotations

import itertools

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.control.per_sequence import shortest_trial
from forerun.core.request import best_count
from forerun.core.types import Budget, Offer, Round, Seq
from forerun.drafters.base import NoDrafter
from forerun.testing import FakeSeq
from tests.control.simulate.predictable import Make, Simulation, TextKind
from tests.control.test_control import FLAT, STEEP

CPU = CostModel({1: 1.0, 2: 1.33, 4: 1.9, 8: 3.4, 16: 6.0})
GPU = CostModel({1: 1.0, 2: 1.01, 4: 1.02, 8: 1.04, 16: 1.07, 32: 1.12, 64: 1.2})
CHAIN = Make(0.1, chosen=False, stops=False)  # a draft model: lengths are fixed beforehand
HEAD = Make(0.1)
EVEN = 1e6  # a spread so large that every token is as likely as the average


class Always:
    """The same budget every round, in the simulator."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def plan(self, seqs: object) -> list[Budget]:
        return [self.budget]

    def observe(self, outcome: Round) -> None: ...

    def forget(self, seq: Seq) -> None: ...


def best_fixed(cost: CostModel, make: Make, kind: TextKind, shapes: list[Budget]) -> float:
    still = Make(make.level, make.chosen, stops=False)
    return max(Simulation(cost, still).speed(kind, 250, Always(shape)) for shape in shapes)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("cost", [STEEP, FLAT, CPU])
@pytest.mark.parametrize("level", [0.05, 0.2])
def test_chains_never_settle_far_below_plain_and_find_most_of_the_gain(
    acceptance: float, cost: CostModel, level: float
) -> None:
    simulation = Simulation(cost, Make(level, chosen=False, stops=False), nodes=8)
    kind = TextKind(acceptance, spread=EVEN)
    simulation.speed(kind, 100)
    speed = simulation.speed(kind, 1500)
    price = cost.price(8)
    tokens = [sum(acceptance**i for i in range(n + 1)) for n in range(9)]
    best = max(tokens[n] / (price[n] + n * level) for n in range(9))
    assert speed >= 0.97
    assert speed >= 0.85 * best


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("acceptance", [0.3, 0.65, 0.9])
@pytest.mark.parametrize(
    ("cost", "make"), [(CPU, HEAD), (CPU, Make(0.2)), (GPU, Make(0.1)), (GPU, Make(0.1, stops=False))]
)
def test_a_head_gets_what_the_best_fixed_tree_would(cost: CostModel, make: Make, acceptance: float) -> None:
    kind = TextKind(acceptance)
    simulation = Simulation(cost, make)
    simulation.speed(kind, 100)
    shapes = [Budget(0, 0), *(Budget(n, n) for n in (1, 2, 3, 5))]
    if cost is GPU:
        shapes += [Budget(30, 4, 8), Budget(60, 5, 8)]
    speed = simulation.speed(kind, 500)
    assert speed >= 0.97
    assert speed >= 0.95 * best_fixed(cost, make, kind, shapes)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("seed", [1, 2, 6])
@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.65])
@pytest.mark.parametrize("stops", [True, False])
def test_a_head_on_a_curve_that_leaps_does_not_settle_below_plain(acceptance: float, stops: bool, seed: int) -> None:
    simulation = Simulation(STEEP, Make(0.1, stops=stops), seed=seed)
    kind = TextKind(acceptance)
    simulation.speed(kind, 100)
    assert simulation.speed(kind, 800) >= 0.97


@pytest.mark.parametrize("stops", [True, False])
def test_a_good_head_finds_its_way_over_the_leap(stops: bool) -> None:
    simulation = Simulation(STEEP, Make(0.1, stops=stops))
    simulation.speed(TextKind(0.9), 100)
    assert simulation.speed(TextKind(0.9), 500) >= 1.2


@pytest.mark.parametrize("stops", [True, False])
def test_trees_where_nodes_are_cheap_and_chains_where_they_are_not(stops: bool) -> None:
    make, kind = Make(0.1, stops=stops), TextKind(0.7)
    flat, steep = Simulation(GPU, make), Simulation(CPU, make)
    for simulation in (flat, steep):
        simulation.speed(kind, 150)
    tree, chain = flat.budgets[0], steep.controller.plan(steep.texts)[0]
    assert tree.nodes == 60
    assert tree.width == 10
    assert tree.depth >= 4
    assert chain.width == 1
    hopeless = Simulation(CostModel({1: 1.0, 2: 3.0, 64: 90.0}), make)
    assert hopeless.speed(kind, 200) == 1.0


@pytest.mark.parametrize("kind", [TextKind(0.55), TextKind(0.8)])
def test_a_head_that_boasts_is_scaled(kind: TextKind) -> None:
    honest, overclaiming = Simulation(CPU, Make(0.1)), Simulation(CPU, Make(0.1, claim_power=0.4))
    for simulation in (honest, overclaiming):
        simulation.speed(kind, 100)
    assert overclaiming.speed(kind, 400) >= 0.9 * honest.speed(kind, 400)
    boasts, states = (one.controller.planner._earlier[0].latest.trust for one in (overclaiming, honest))
    assert boasts < 0.85 < states


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [CHAIN, Make(0.05), Make(0.05, stops=False)])
def test_follows_a_text_that_becomes_easy_within_20_rounds(seed: int, make: Make) -> None:
    simulation = Simulation(FLAT, make, nodes=8, seed=seed)
    hard, easy = TextKind(0.05, EVEN), TextKind(0.95, EVEN)
    simulation.speed(hard, 400)
    simulation.speed(easy, 20)
    assert simulation.speed(easy, 20) > 1.8


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [Make(0.2, chosen=False, stops=False), Make(0.2), Make(0.2, stops=False)])
def test_follows_a_text_that_becomes_hard_within_20_rounds(seed: int, make: Make) -> None:
    simulation = Simulation(FLAT, make, nodes=8, seed=seed)
    hard, easy = TextKind(0.05, EVEN), TextKind(0.95, EVEN)
    simulation.speed(easy, 200)
    lost = 20 / simulation.speed(hard, 20) - 20
    assert lost < 20  # passes
    assert simulation.speed(hard, 100) > 0.93


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("cost", [STEEP, FLAT, CPU])
@pytest.mark.parametrize("make", [Make(0.05, chosen=False, stops=False), Make(0.4, stops=False), Make(0.1)])
@pytest.mark.parametrize("length", [10, 40, 200])
def test_texts_that_keep_changing_cost_no_more_than_the_allowance(cost: CostModel, make: Make, length: int) -> None:
    simulation = Simulation(cost, make, nodes=8)
    tokens = seconds = 0.0
    for acceptance in itertools.islice(itertools.cycle((0.05, 0.9, 0.3)), 1200 // length):
        written, spent = simulation.write(TextKind(acceptance), length)
        tokens, seconds = tokens + written, seconds + spent
    assert tokens / seconds >= 0.97


def test_what_is_at_hand_is_used_and_the_head_rests() -> None:
    simulation = Simulation(CPU, Make(0.15, ngram=True))
    simulation.speed(TextKind(0.6, copied=1.0, copy_rate=0.9), 100)
    assert simulation.budgets[0].source == "free"
    simulation.speed(TextKind(0.8, copied=0.0), 40)
    assert simulation.budgets[0].source == "costly"
    assert simulation.budgets[0].level > 0.0


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("cost", [CPU, GPU])
@pytest.mark.parametrize("acceptance", [0.4, 0.8])
def test_both_together_beat_either_alone(cost: CostModel, acceptance: float) -> None:
    kind = TextKind(acceptance, copied=0.5, copy_rate=0.93)
    simulation = Simulation(cost, Make(0.1, ngram=True))
    simulation.speed(kind, 100)
    both = simulation.speed(kind, 300)
    head, lookup = Simulation(cost, HEAD), Simulation(cost, Make(9.0, ngram=True))
    assert both >= 0.97 * max(head.speed(kind, 300), lookup.speed(kind, 300))


def test_a_prompt_is_not_read_for_a_few_tokens() -> None:
    kind = TextKind(0.85)
    short, long = (Simulation(FLAT, Make(0.1, chosen=False, stops=False, start=8.0)) for _ in range(2))
    short.texts[0].max_length = len(short.texts[0].tokens) + 12
    assert short.controller.plan(short.texts)[0].nodes == 0
    long.texts[0].max_length = len(long.texts[0].tokens) + 400
    assert long.controller.plan(long.texts)[0].nodes > 0
    assert long.speed(kind, 300) > 1.2


def test_forgets_and_never_runs_what_cannot_pay() -> None:
    simulation = Simulation(STEEP, Make(2.0, chosen=False, stops=False), nodes=8)
    assert simulation.speed(TextKind(1.0), 50) == 1.0
    simulation.controller.forget(simulation.texts[0])
    assert not simulation.controller.planner._records


def test_a_batch_spends_its_allowance_once() -> None:
    cost = CostModel({1: 1.0, 8: 1.7, 64: 8.0})
    controller = AdaptiveController(CostModel(cost.seconds), 4, 1, lambda seq: Offer((0.3,), chosen=False))
    seqs = [FakeSeq(i, [1]) for i in range(8)]
    for _ in range(200):
        depths = [budget.depth for budget in controller.plan(seqs)]
        nodes = cost.pass_seconds(len(seqs) + sum(depths))
        outcome = Round(tuple(seqs), tuple(depths), tuple(depths), (0,) * 8, {"pass": nodes, "draft": 0.3})
        controller.observe(outcome)
    planner = controller.planner
    planner.allowance.level = 1e9
    # trials for everybody, if that were free
    assert all(budget.depth == 1 for budget in controller.plan(seqs))
    price, plain = planner._price(8, 1.0, 0).price, planner.cost.pass_seconds(8, 8)
    worst = shortest_trial(planner.offer(seqs[0]), price, plain, 8, 8)[1]
    planner.allowance.level = 1.5 * worst
    assert sum(budget.depth for budget in controller.plan(seqs)) == 1


@pytest.mark.parametrize("strong", [1, 3, 7])
def test_lookups_of_a_batch_share_the_pass_nearly_as_well_as_can_be(strong: int) -> None:
    cost = CostModel({1: 1.0, 8: 1.6, 16: 2.4, 32: 4.4, 64: 8.4})
    sure, unsure = tuple(0.95**i for i in range(1, 17)), tuple(0.35**i for i in range(1, 17))
    offers = [Offer(free=sure if i < strong else unsure) for i in range(8)]
    controller = AdaptiveController(CostModel(cost.seconds), 16, 1, lambda seq: offers[seq.id])
    seqs = [FakeSeq(i, [1]) for i in range(8)]
    for _ in range(60):  # the rate settles
        counts = _cut(controller.plan(seqs), offers)
        tokens = tuple(round(sum(offers[i].free[:n])) for i, n in enumerate(counts))
        spent = {"pass": cost.pass_seconds(8 + sum(counts))}
        controller.observe(Round(tuple(seqs), tuple(counts), tuple(counts), tokens, spent))

    def rate(counts: list[int]) -> float:
        tokens = 8 + sum(sum(offers[i].free[:n]) for i, n in enumerate(counts))
        return tokens / cost.pass_seconds(8 + sum(counts))

    options = ([n] * strong + [m] * (8 - strong) for n in range(17) for m in range(4))
    assert rate(_cut(controller.plan(seqs), offers)) >= 0.97 * max(map(rate, options))


def _cut(budgets: list[Budget], offers: list[Offer]) -> list[int]:
    return [best_count(q.free[: b.nodes], b.price) for b, q in zip(budgets, offers, strict=True)]


def test_texts_that_are_not_drafted_for_leave_the_rate_alone() -> None:
    offers = [Offer(free=(0.9, 0.8)), NoDrafter().offer(FakeSeq(1, [1]))]
    controller = AdaptiveController(CostModel(FLAT.seconds), 8, 1, lambda seq: offers[seq.id])
    for seq, accepted in ((FakeSeq(0, [1]), 2), (FakeSeq(1, [1]), 0)):
        for _ in range(100):
            controller.plan([seq])
            controller.observe(Round((seq,), (accepted,), (accepted,), (accepted,), {"pass": 1.0}))
        assert controller.planner.rate > 2.0


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("acceptance", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("cost", [CPU, FLAT, GPU])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_drafter_of_one_pass_never_settles_below_plain(acceptance: float, cost: CostModel, batch: int) -> None:
    simulation = Simulation(cost, Make(0.3, stops=False, one_pass=True), nodes=8, width=1, batch=batch)
    simulation.speed(TextKind(acceptance), 100)
    assert simulation.speed(TextKind(acceptance), 600) >= 0.97


def test_a_drafter_of_one_pass_goes_deeper_than_one_that_pays_by_level() -> None:
    depths = []
    for one_pass in (True, False):
        simulation = Simulation(FLAT, Make(0.25, stops=False, one_pass=one_pass), nodes=8, width=1)
        simulation.speed(TextKind(0.8, EVEN), 200)
        budgets = []
        for _ in range(50):
            simulation.write(TextKind(0.8, EVEN), 1)
            budgets += simulation.budgets
        depths.append(sum(budget.depth for budget in budgets) / len(budgets))
        costly = [budget for budget in budgets if budget.source == "costly"]
        assert costly
        assert all((budget.level == 0.0) == one_pass for budget in costly)  # of one more level
    assert depths[0] > depths[1] + 1.0


def test_an_overdrawn_allowance_stops_even_a_drafter_that_paid() -> None:
    """Whatever the record says: once so much was lost, nothing is drafted until tokens have earned it back."""
    controller = AdaptiveController(CostModel(FLAT.seconds), 8, 1, lambda seq: Offer((0.05,), chosen=False))
    seq = FakeSeq(0, [1], max_length=10_000)
    for _ in range(60):
        (budget,) = controller.plan([seq])
        depth = budget.depth
        seconds = {"pass": FLAT.pass_seconds(1 + depth), "draft": 0.05 * depth}
        controller.observe(Round((seq,), (depth,), (depth,), (depth,), seconds))
    allowance = controller.planner.allowance
    allowance.level = -allowance.floor + 0.01
    assert controller.plan([seq])[0].depth > 1
    allowance.level = -allowance.floor
    assert controller.plan([seq])[0].nodes == 0


def test_a_text_is_charged_for_what_the_others_draft_and_not_for_its_own() -> None:
    cost = CostModel({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5, 64: 30.0})
    sure = tuple(0.99**i for i in range(1, 6))
    offers = [Offer(free=sure), Offer()]
    controller = AdaptiveController(cost, 8, 1, lambda seq: offers[seq.id])
    first, second = controller.plan([FakeSeq(0, [1]), FakeSeq(1, [1])])
    assert first.price == cost.price(8, neighbours=1)[: len(first.price or ())]
    assert second.price == cost.price(8, neighbours=1, others=5)[: len(second.price or ())]
    assert first.nodes >= 5
