"""One form for a whole batch, in a simulator where time is counted: never far below plain, and near the best form."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.types import PLAIN, Budget, Form, Offer, Round, RoundPlan
from forerun.testing import FakeSeq
from lab.simulate.speeds import SimulatedMenu, accepted_of
from tests.control.simulate.menu import MenuSimulation, Trace

FLAT = CostModel({1: 4.4, 32: 4.8, 64: 5.0, 128: 5.4, 192: 6.0, 256: 7.0, 384: 9.5, 512: 12.0, 1024: 24.0})
LEAPS = CostModel({1: 4.4, 32: 4.9, 64: 5.6, 128: 7.2, 192: 12.5, 256: 13.1, 384: 18.4, 512: 24.0, 1024: 48.0})
STEEP = CostModel({1: 5.0, 2: 6.5, 4: 9.5, 8: 17.0, 16: 30.0})
FORMS = tuple(
    Form(*form) for form in ((1, 1, 1), (2, 2, 1), (3, 3, 1), (5, 5, 1), (8, 3, 3), (16, 4, 4), (24, 5, 6), (59, 6, 10))
)
MENU = SimulatedMenu(FORMS, level=0.11)
HOST = 0.02  # of one sequence, in the same milliseconds
LEAST = 0.978  # of plain decoding, over any 200 rounds: 0.8 + 2.2 + 200 * 0.006 may be lost (`Allowance`)

TRACES: dict[str, Trace] = {
    "low": lambda now: 0.05,
    "nothing": lambda now: 0.0,
    "middle": lambda now: 0.4,
    "high": lambda now: 0.8,
    "every 10": lambda now: 0.0 if now // 10 % 2 else 0.8,
    "every 60": lambda now: 0.0 if now // 60 % 2 else 0.85,
    "falls": lambda now: 0.9 if now < 250 else 0.0,
    "rises": lambda now: 0.9 if now > 250 else 0.0,
}


def seconds_of(cost: CostModel, form: Form, batch: int) -> float:
    drafting = MENU.seconds(form, batch) if form.nodes else 0.0
    return cost.pass_seconds(batch * (1 + form.nodes)) + drafting + HOST * batch


def best_speed(cost: CostModel, batch: int, rate: float) -> float:
    """What the best single form gives over plain decoding."""
    plain = seconds_of(cost, Form(0, 0, 1), batch)
    each = [(1 + accepted_of(form, rate)) * plain / seconds_of(cost, form, batch) for form in FORMS]
    return max(1.0, *each)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("batch", [1, 8, 64, 128])
@pytest.mark.parametrize("cost", [FLAT, LEAPS, STEEP], ids=["flat", "leaps", "steep"])
def test_never_far_below_plain_over_any_200_rounds(cost: CostModel, batch: int, trace: str) -> None:
    history = MenuSimulation(cost, MENU, [TRACES[trace]] * batch, host=HOST).run(420)
    assert history.worst_window() >= LEAST


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("trace", ["low", "nothing", "every 60", "falls", "rises"])
@pytest.mark.parametrize("batch", [8, 64])
def test_nor_where_plain_rounds_follow_each_other(batch: int, trace: str) -> None:
    """Then a draft also costs what the host does before it and behind it."""
    gap = 0.1 * FLAT.pass_seconds(batch)
    history = MenuSimulation(FLAT, MENU, [TRACES[trace]] * batch, host=HOST, gap=gap).run(600)
    assert history.worst_window() >= LEAST - 0.01  # the first gaps are not foreseen
    if trace == "nothing":
        plain = [one for one in history.rounds if not one.nodes]
        assert sum(one.seconds <= one.plain for one in plain) > 0.95 * len(plain), "they follow"


def test_sequences_that_a_round_sent_back_are_not_counted() -> None:
    controller = AdaptiveController(CostModel(FLAT.seconds), 60, 10, lambda seq: Offer(menu=MENU))
    seqs = [FakeSeq(i, [1]) for i in range(6)]
    for there in (6, 5, 6, 4, 5, 6) * 4:
        some, budgets = seqs[6 - there :], controller.plan(seqs)[6 - there :]
        nodes, depths = tuple(one.nodes for one in budgets), tuple(one.depth for one in budgets)
        seconds = {"draft": 0.3, "pass": FLAT.pass_seconds(there + sum(nodes)), "host": 0.1}
        controller.observe(Round(tuple(some), nodes, depths, tuple(min(1, count) for count in nodes), seconds))
    assert budgets[0].nodes > 0


@pytest.mark.parametrize("nodes", [2, 4, 60])
def test_no_form_is_larger_than_the_user_allows(nodes: int) -> None:
    controller = AdaptiveController(CostModel(FLAT.seconds), nodes, 10, lambda seq: Offer(menu=MENU))
    seqs, met = [FakeSeq(0, [1])], set[int]()
    for _ in range(200):
        budget = controller.plan(seqs)[0]
        met.add(budget.nodes)
        seconds = {"draft": 0.1, "pass": FLAT.pass_seconds(1 + budget.nodes), "host": 0.1}
        controller.observe(Round(tuple(seqs), (budget.nodes,), (budget.depth,), (budget.depth,), seconds))
    assert 0 < max(met) <= nodes
    assert (max(met) > 4) is (nodes == 60)


class Adversary:
    """Drafts are good until they are made for a few rounds in a row, and then worthless until they stop."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.simulation: MenuSimulation | None = None

    def __call__(self, now: int) -> float:
        assert self.simulation is not None
        recent = self.simulation.history.rounds[-self.patience :]
        return 0.0 if recent and all(one.nodes for one in recent) else 0.9


def against_adversary(cost: CostModel, batch: int, patience: int) -> MenuSimulation:
    adversary = Adversary(patience)
    adversary.simulation = MenuSimulation(cost, MENU, [adversary] * batch, host=HOST)
    return adversary.simulation


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("patience", [1, 4, 20])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("cost", [FLAT, LEAPS, STEEP], ids=["flat", "leaps", "steep"])
def test_not_even_against_an_adversary(cost: CostModel, batch: int, patience: int) -> None:
    least = 0.92 if batch == 1 else LEAST  # what one text alone has gained it may lose again
    assert against_adversary(cost, batch, patience).run(600).worst_window() >= least


def test_it_is_the_allowance_that_holds_against_the_adversary() -> None:
    simulation = against_adversary(LEAPS, 1, 1)
    assert isinstance(simulation.controller, AdaptiveController)
    allowance = simulation.controller.allowance
    allowance.most = allowance.level = allowance.at_start = 1e9
    assert simulation.run(600).worst_window() < 0.92


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cost", [FLAT, LEAPS], ids=["flat", "leaps"])
def test_sequences_that_differ_join_and_leave(cost: CostModel, seed: int) -> None:
    traces: list[Trace] = [TRACES[name] for name in TRACES] * 8
    simulation = MenuSimulation(cost, MENU, traces, lifetime=90, host=HOST, noise=0.05, seed=seed)
    sizes: Callable[[int], int] = lambda now: 1 + (now // 3 * 7) % 64  # noqa: E731
    assert simulation.run(600, sizes).worst_window() >= LEAST


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("factor", [0.6, 1.6])
@pytest.mark.parametrize("batch", [1, 32])
def test_a_curve_that_was_measured_badly_is_put_right(batch: int, factor: float) -> None:
    wrong = CostModel({size: spent * (factor if size > 48 else 1.0) for size, spent in LEAPS.seconds.items()})
    simulation = MenuSimulation(LEAPS, MENU, [TRACES["high"]] * batch, believed=wrong, host=HOST)
    history = simulation.run(700)
    assert history.speed(400) >= 0.88 * best_speed(LEAPS, batch, 0.8)
    assert history.worst_window() >= LEAST


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("batch", [1, 8, 32, 64])
@pytest.mark.parametrize("cost", [FLAT, LEAPS], ids=["flat", "leaps"])
def test_finds_most_of_what_the_best_form_gives(cost: CostModel, batch: int, rate: float) -> None:
    history = MenuSimulation(cost, MENU, [lambda now: rate] * batch, host=HOST, noise=0.03).run(500)
    assert history.speed(200) >= 0.87 * best_speed(cost, batch, rate)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_drafting_returns_after_acceptance_has_risen(batch: int) -> None:
    """Nothing is accepted for long, twice: neither debt nor a bad record keeps drafts away for more than 300 rounds."""
    trace: Trace = lambda now: 0.85 if now // 500 % 2 else 0.0  # noqa: E731
    history = MenuSimulation(FLAT, MENU, [trace] * batch, host=HOST).run(2000)
    for end in (1000, 2000):
        assert history.speed(end - 200, end) >= 0.87 * best_speed(FLAT, batch, 0.85)


def test_one_form_for_all_and_it_stays() -> None:
    simulation = MenuSimulation(FLAT, MENU, [TRACES["middle"]] * 16, host=HOST)
    simulation.run(100)
    budgets = simulation.controller.plan(simulation.seqs)
    assert len(set(budgets)) == 1
    assert Form(budgets[0].nodes, budgets[0].depth, budgets[0].width) in FORMS
    assert budgets[0].source == "costly"
    assert budgets[0].price is None
    rounds = simulation.run(300).rounds[100:]
    changes = sum(before.nodes != after.nodes for before, after in pairwise(rounds))
    assert changes < 60


def test_few_rounds_are_trials_where_nothing_pays() -> None:
    history = MenuSimulation(FLAT, MENU, [TRACES["nothing"]] * 32, host=HOST).run(1000)
    assert 3 <= sum(one.nodes > 0 for one in history.rounds[200:]) <= 800 // 50


def test_forms_that_are_too_dear_are_never_tried() -> None:
    dear = CostModel({1: 1.0, 4: 1.2, 8: 4.0, 1024: 3000.0})
    history = MenuSimulation(dear, MENU, [TRACES["high"]] * 4).run(300)
    assert not any(one.nodes for one in history.rounds)


class PartlyReady(SimulatedMenu):
    """Forms of more than three nodes are not captured."""

    def seconds(self, form: Form, batch: int) -> float:
        return super().seconds(form, batch) if form.nodes <= 3 else inf


def test_forms_that_are_not_ready_are_never_asked_for() -> None:
    history = MenuSimulation(FLAT, PartlyReady(FORMS, 0.11), [TRACES["high"]] * 4, host=HOST).run(300)
    assert {one.nodes // one.batch for one in history.rounds} <= {0, 1, 2, 3}
    assert history.speed(100) > 1.8


@pytest.mark.parametrize("survival", [0.95, 0.2])
def test_free_chains_or_the_menu_never_both_in_one_round(survival: float) -> None:
    """Where n-gram matches promise more for the batch, all draft from them; else all take the menu's form."""
    free = tuple(survival**depth for depth in range(1, 9))
    controller = AdaptiveController(CostModel(FLAT.seconds), 60, 10, lambda seq: Offer(free=free, menu=MENU))
    seqs = [FakeSeq(i, [1]) for i in range(8)]
    sources = []
    for _ in range(80):
        budgets = controller.plan(seqs)
        nodes = tuple(min(8, budget.nodes) if budget.source == "free" else budget.nodes for budget in budgets)
        depths = tuple(budget.depth for budget in budgets)
        accepted = tuple(min(1, count) for count in nodes)
        drafting = 0.4 if budgets[0].source == "costly" else 0.0
        seconds = {"draft": drafting, "pass": FLAT.pass_seconds(8 + sum(nodes)), "host": 0.1}
        controller.observe(Round(tuple(seqs), nodes, depths, accepted, seconds))
        assert len({budget.source for budget in budgets}) == 1
        sources.append(budgets[0].source)
    assert sources[-20:].count("free" if survival > 0.5 else "costly") >= 18


@pytest.mark.parametrize("undrafted", [0, 1])
def test_whoever_starts_beside_trees_that_nobody_drafted_for_it_says_nothing_of_a_head(undrafted: int) -> None:
    """The round behind it was asked for with it, before its own first round was observed."""
    controller = AdaptiveController(CostModel(FLAT.seconds), 60, 10, lambda seq: Offer(menu=MENU))
    seqs = [FakeSeq(i, [1]) for i in range(7)]
    for _ in range(30):
        budget = controller.plan(seqs[:6])[0]
        trees = (budget.nodes,) * 6, (budget.depth,) * 6, (budget.depth,) * 6
        seconds = {"draft": 0.3, "pass": FLAT.pass_seconds(6 + 6 * budget.nodes), "host": 0.1}
        controller.observe(Round(tuple(seqs[:6]), *trees, seconds))
    assert budget.nodes > 0
    assert controller.follow(seqs, RoundPlan("trees", 1), bool) is not None
    (chooser,) = controller._choosers.values()
    last, before = seqs[6].id, chooser.acceptance.weight([seqs[6].id])
    nodes, depths, accepted = ((*part, 0) for part in trees)
    controller.observe(Round(tuple(seqs), nodes, depths, accepted, seconds, undrafted=undrafted))
    after = chooser.acceptance.weight([last])
    assert after == before if undrafted else after < before


def test_a_batch_of_several_kinds_has_a_form_for_some_and_budgets_for_the_rest() -> None:
    offers = {0: Offer(menu=MENU), 1: Offer(free=(0.9, 0.8)), 2: Offer(menu=MENU), 3: Offer()}
    controller = AdaptiveController(CostModel(FLAT.seconds), 60, 10, lambda seq: offers[seq.id])
    seqs = [FakeSeq(i, [1]) for i in range(4)]
    for _ in range(20):
        first, second, third, fourth = budgets = controller.plan(seqs)
        assert first is third
        assert second.source == fourth.source == "free"
        nodes = (first.nodes, 2, third.nodes, 0)
        seconds = {"draft": 0.3, "pass": FLAT.pass_seconds(4 + sum(nodes)), "host": 0.1}
        depths = tuple(budget.depth for budget in budgets)
        controller.observe(Round(tuple(seqs), nodes, depths, tuple(min(1, n) for n in nodes), seconds))
    assert first.nodes > 0
    for seq in seqs:
        controller.forget(seq)


def test_a_trial_that_was_not_launched_is_due_as_before() -> None:
    """Said to follow an unread round, which then had to be read first: there was no room, say."""
    controller = AdaptiveController(CostModel(FLAT.seconds), 60, 10, lambda seq: Offer(menu=MENU))
    seqs, trials = [FakeSeq(i, [1]) for i in range(6)], 0
    budget = controller.plan(seqs)[0]
    for _ in range(300):
        drafted = (budget.nodes,) * 6, (budget.depth,) * 6, (0,) * 6
        seconds = {"draft": 0.3, "pass": FLAT.pass_seconds(6 + 6 * budget.nodes), "host": 0.1}
        controller.observe(Round(tuple(seqs), *drafted, seconds))
        plan, said = controller.follow(seqs, RoundPlan("trees"), lambda: True), controller._next
        following = None if plan is None else Budget(*(plan.form or PLAIN).sizes, source="costly", repeats=plan.repeats)
        refused = said is not None and said.decisions[0].promise.is_trial
        trials += refused
        budget = controller.plan(seqs)[0] if following is None or refused else following
        assert not refused or budget == following, "the same again"
    assert trials > 1


@pytest.mark.parametrize("stops", [False, True])
def test_a_drafter_that_leaves_nodes_out_is_told_their_price(stops: bool) -> None:
    cost = CostModel({1: 2.3, 2: 2.8, 4: 3.3, 8: 3.8, 16: 4.2, 32: 5.2, 64: 6.4})
    controller, seqs = AdaptiveController(cost, 59, 10, lambda seq: Offer(menu=MENU, stops=stops)), [FakeSeq(0, [1])]
    for _ in range(20):
        (budget,) = controller.plan(seqs)
        spent = {"draft": 0.3, "pass": cost.pass_seconds(1 + budget.nodes), "host": 0.1}
        controller.observe(Round(tuple(seqs), (budget.nodes,), (budget.depth,), (budget.depth,), spent))
    assert budget.nodes
    assert budget.price == (cost.price_for_all(59, 1) if stops else None)


@pytest.mark.parametrize("rows", [0, 17])
def test_a_tree_of_which_nothing_was_left_is_no_plain_round(rows: int) -> None:
    """Its head was too unsure. Where there are no rows of a tree either, the drafter was not ready."""
    controller = AdaptiveController(CostModel(FLAT.seconds), 60, 10, lambda seq: Offer(menu=MENU))
    seqs, found = [FakeSeq(0, [1])], list[float]()
    for i in range(16):
        (budget,) = controller.plan(seqs)
        form = Form(budget.nodes, budget.depth, budget.width)
        nodes, depth, tree_rows = (0, 0, rows) if i == 15 else (budget.nodes, budget.depth, 0)
        (chooser,) = controller._choosers.values()
        found = [chooser.acceptance.expected(form, 3.0)]
        spent = {"draft": 0.5, "pass": 4.6, "host": 0.1}
        controller.observe(Round(tuple(seqs), (nodes,), (depth,), (depth,), spent, tree_rows=tree_rows))
        found.append(chooser.acceptance.expected(form, 3.0))
    assert form.nodes
    assert (found[1] < found[0]) == (rows > 0)
