"""Look-ups of one text on a CPU, simulated: no kind of text is slower than plain decoding, and copied ones gain."""

from __future__ import annotations

import pytest

from forerun.control import prices
from forerun.control.cost import CostModel
from forerun.measure.bench.suites import TASKS
from tests.control import record_texts
from tests.control.lookup_texts import random_texts
from tests.control.simulate.history import Text
from tests.control.simulate.native_run import ARM, DEARER, X86, Host, RunHistory, RunSimulation

RECORDED: list[Text] = [*record_texts.read()]
BY_TASK = {task: RECORDED[2 * i : 2 * i + 2] for i, task in enumerate(TASKS[:8])}
WRONG = {"wrong matches": random_texts(40), "few matches": random_texts(4000)}
MEASURED, SLOW = Host(), Host(drafted=1.5e-3)
WORLDS = {
    "x86": (X86, X86, MEASURED),
    "x86, slow Python": (X86, X86, SLOW),
    "x86, drafts dearer than the curve says": (DEARER, X86, MEASURED),
    "the same, slow Python": (DEARER, X86, SLOW),
    "ARM": (ARM, ARM, MEASURED),
}


def simulated(world: str, texts: dict[str, list[Text]], noise: float = 0.0) -> RunHistory:
    cost, told, host = WORLDS[world]
    return RunSimulation(cost, host, texts, told=told, noise=noise).run()


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("world", WORLDS)
def test_no_task_is_slower_than_plain_decoding(world: str, noise: float) -> None:
    found = simulated(world, BY_TASK, noise)
    assert found.least_speed() > 0.98, {name: group.speed for name, group in found.groups.items()}
    assert found.groups["code_edit"].speed > 1.2


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("world", WORLDS)
def test_texts_in_which_nothing_is_copied_lose_little(world: str) -> None:
    assert simulated(world, WRONG).least_speed() > 0.975


@pytest.mark.slow
def test_without_the_price_of_the_host_drafts_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slow host takes is what keeps weak matches from being drafted."""
    with_price = simulated("x86, slow Python", WRONG | BY_TASK)
    monkeypatch.setattr(prices.RoundSeconds, "more", property(lambda self: 0.0))
    without = simulated("x86, slow Python", WRONG | BY_TASK)
    drafted = [sum(group.drafted for group in one.groups.values()) for one in (with_price, without)]
    assert drafted[0] < 0.9 * drafted[1]
    assert with_price.groups["wrong matches"].speed > without.groups["wrong matches"].speed


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("world", WORLDS)
def test_hardly_a_pass_is_run_in_vain(world: str) -> None:
    found = simulated(world, BY_TASK)
    assert sum(group.in_vain for group in found.groups.values()) == 0


def test_idle_look_ups_let_calls_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts of weak matches that are not worth drafting, rounds take nearly what plain rounds take."""
    steep = CostModel({rows: 5e-3 * rows for rows in (1, 2, 4, 8, 16, 24, 32, 64)})
    texts = {"weak": random_texts(40)}
    found = RunSimulation(steep, MEASURED, texts).run()
    assert found.groups["weak"].drafted == 0
    assert found.speed() > 0.995
    stops = RunSimulation(steep, MEASURED, texts)
    monkeypatch.setattr(stops.drafter, "_run_past", lambda seq: stops.drafter.needs)
    assert stops.run().speed() < 0.985, "a call that ends at every match"


PAUSE = 0.25  # of a plain pass: what the first pass of a call takes longer, as measured on two x86 cores
REVERSED = dict(reversed(BY_TASK.items()))  # other texts come first, when least is known


def behind_pauses(texts: dict[str, list[Text]], pause: float = PAUSE, seed: int = 1) -> RunHistory:
    return RunSimulation(X86, MEASURED, texts, noise=0.1, seed=seed, pause=pause).run()


@pytest.mark.slow
@pytest.mark.parametrize("texts", [BY_TASK, REVERSED, WRONG], ids=["tasks", "reversed", "wrong"])
def test_passes_behind_a_pause_are_part_of_what_drafts_cost(texts: dict[str, list[Text]]) -> None:
    found = [behind_pauses(texts, seed=seed) for seed in range(1, 5)]
    assert min(one.least_speed() for one in found) > 0.98


@pytest.mark.slow
def test_a_controller_that_does_not_see_pauses_would_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a pass for each call, and what rounds take is not learnt: weak matches seem to pay."""
    seen, rounds = behind_pauses(WRONG | BY_TASK, pause=0.5), prices.RoundSeconds
    monkeypatch.setattr(rounds, "more", property(lambda self: 0.0))
    monkeypatch.setattr(rounds, "note", lambda self, seconds, expected, nodes, cost: cost)
    monkeypatch.setattr(CostModel, "observe", lambda *given: None)
    unseen = behind_pauses(WRONG | BY_TASK, pause=0.5)
    assert unseen.speed() < seen.speed()
    assert unseen.groups["wrong matches"].drafted > 2 * seen.groups["wrong matches"].drafted


def test_a_long_match_that_is_refused_does_not_end_every_call() -> None:
    """It grows with every token that is copied: a call that ended at each of them would run one pass."""
    copied = [[7 + i % 90 for i in range(90)] * 2]
    texts: dict[str, list[Text]] = {"copied": [(one[:90], one[90:]) for one in copied]}
    simulation = RunSimulation(X86, MEASURED, texts, pause=PAUSE)
    simulation.controller.planner.free.allowance.level = -10.0  # nothing is drafted
    found = simulation.run()
    assert found.groups["copied"].drafted == 0
    assert found.speed() > 0.97
